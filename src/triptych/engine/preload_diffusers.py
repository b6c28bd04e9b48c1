"""What replicas of the diffusers engine share: torch, transformers, diffusers and the classes these load lazily.

Imported by the forkserver before it forks. Nothing here may create tensors, threads or a CUDA context. A timer looks
after the server meanwhile, so that the forkserver does not outlive it by a whole preload.
"""

from __future__ import annotations

import importlib
import os
import signal
from types import FrameType

from triptych.engine.preload import SERVER_PID, clean_up_after_server

_LOOK_EVERY_S = 0.2
_MODULES = (
    "torch",
    "transformers",
    "diffusers",
    "triptych.engine.diffusers_engine",
    "diffusers.pipelines.pipeline_utils",
    "diffusers.guiders",
    "diffusers.pipelines.auto_pipeline",
    # Classes that the model directory names are imported when first used: a few ms each here, in every child otherwise.
    "diffusers.pipelines.prx.pipeline_prx_pixel",
    "diffusers.pipelines.qwenimage.pipeline_qwenimage",
    "diffusers.pipelines.wan.pipeline_wan",
    "transformers.models.clip.modeling_clip",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.t5.modeling_t5",
    "transformers.models.umt5.modeling_umt5",
)


def _leave_if_orphaned(number: int, frame: FrameType | None) -> None:
    if os.getppid() != SERVER_PID:
        clean_up_after_server()
        os._exit(0)


def _preload(modules: tuple[str, ...]) -> None:
    # A signal, because a thread would not survive the forks to come.
    signal.signal(signal.SIGALRM, _leave_if_orphaned)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_EVERY_S, _LOOK_EVERY_S)
    # Pipelines that are imported, but not loaded, complain about packages that only they would need.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


_preload(_MODULES)
