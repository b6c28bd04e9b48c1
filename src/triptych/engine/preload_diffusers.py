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
    "diffusers.pipelines.pipeline_utils",
    "diffusers.models.modeling_utils",
    "diffusers.schedulers.scheduling_flow_match_euler_discrete",
    "diffusers.pipelines.prx.pipeline_prx_pixel",
    "triptych.engine.diffusers_engine",
)


def _preload(modules: tuple[str, ...]) -> None:
    server = os.getppid()
    for module in modules:
        importlib.import_module(module)
        if os.getppid() != server:
            os._exit(0)


_preload(_MODULES)
