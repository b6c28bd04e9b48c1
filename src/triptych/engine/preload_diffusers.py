"""What replicas of the diffusers engine share: torch, transformers, diffusers and the classes these load lazily.

Imported by the forkserver before it forks. Nothing here may create tensors, threads or a CUDA context. A server that
dies meanwhile is noticed between two imports, so that the forkserver does not outlive it by a whole preload.
"""

from __future__ import annotations

import importlib
import os

_MODULES = (
    "torch",
    "transformers",
    "diffusers",
    "triptych.engine.diffusers_engine",
    "diffusers.pipelines.pipeline_utils",
    "diffusers.guiders",
    # Classes that the model directory names are imported when first used: a few ms each here, in every child otherwise.
    "diffusers.pipelines.prx.pipeline_prx_pixel",
    "diffusers.pipelines.qwenimage.pipeline_qwenimage",
    "diffusers.pipelines.wan.pipeline_wan",
    "transformers.models.clip.modeling_clip",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.t5.modeling_t5",
    "transformers.models.umt5.modeling_umt5",
)


def _preload(modules: tuple[str, ...]) -> None:
    server = os.getppid()
    for module in modules:
        importlib.import_module(module)
        if os.getppid() != server:
            os._exit(0)


_preload(_MODULES)
