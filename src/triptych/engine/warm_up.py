"""First pictures before a replica is ready: weights are read, kernels chosen, shapes compiled, faults found.

Two steps of a small picture, then of each shape that `engine_args.warmup` names; with several slots a second one beside
it, so that merged forwards are made and checked. At last a small picture in one step, which not every pipeline can do.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import msgspec

from triptych.config.switches import warm_up_shapes
from triptych.engine.base import EngineStartError
from triptych.engine.failures import one_line
from triptych.engine.hub import Hub, Task
from triptych.engine.pipeline_interface import PipelineInterface
from triptych.engine.pipeline_modes import PipelineModes
from triptych.engine.pipeline_view import OnStep
from triptych.engine.pixels import to_pixels
from triptych.engine.warm_up_clock import WarmUpClock
from triptych.errors import ErrorCode, TriptychError
from triptych.messages import Address, Generate, ModelInfo, ReplicaSpec, SamplingParams, WarmUp

__all__ = ["warm_up"]

_log = logging.getLogger(__name__)

_SIDE = 128
_STEPS = 2
_PROMPTS = ("a", "a longer prompt")

_Shape = tuple[int, int, int | None]


def warm_up(
    hub: Hub,
    view: Callable[[OnStep], Any],
    modes: PipelineModes,
    *,
    wanted: bool | tuple[str, ...],
    spec: ReplicaSpec,
) -> ModelInfo:
    """Run what `engine_args.warmup` says; returns what `modes` tell, with all that was found out.

    Raises `EngineStartError`. `view` makes views of the loaded pipeline, whose forwards go through `hub`.
    """
    info, measured = modes.info, None
    shapes = warm_up_shapes(wanted)
    if shapes and modes.takes_pictures_itself:
        raise EngineStartError(f"engine_args.warmup: {info.pipeline} takes pictures, which shapes do not say")
    for shape in shapes:
        _check(shape, info)
    if wanted is False or modes.takes_pictures_itself:
        return info  # it would take a picture, and every such pipeline wants another kind
    for shape in (_small(info), *shapes):
        measured = _draw(hub, view, modes.loaded.interface, shape, spec)
    return _with_fewest_steps(msgspec.structs.replace(info, warm_up=measured), hub, view, modes.loaded.interface)


def _with_fewest_steps(
    info: ModelInfo, hub: Hub, view: Callable[[OnStep], Any], interface: PipelineInterface
) -> ModelInfo:
    """Some pipelines divide by the number of steps less one, or end in another error: these need two."""
    if "num_inference_steps" not in info.parameters:
        return info
    unit = _unit(_PROMPTS[0], _small(info), info, steps=1)
    task = Task(functools.partial(view(lambda step: None), **interface.arguments(unit, ())))
    _drive(hub, [task])
    if (error := task.error or _not_finite(task.result)) is None:
        return info
    _log.info("%s needs two steps: %s", info.pipeline, one_line(error))
    calls = {
        name: call and msgspec.structs.replace(call, min_num_inference_steps=2)
        for name, call in (("image", info.image), ("mask", info.mask))
    }
    return msgspec.structs.replace(info, min_num_inference_steps=2, **calls)


def _not_finite(result: Any) -> TriptychError | None:
    try:
        to_pixels(result)
    except TriptychError as error:
        return error if error.code is ErrorCode.ENGINE_ERROR else None  # not what a safety checker says
    return None


def _drive(hub: Hub, tasks: list[Task]) -> None:
    for task in tasks:
        hub.start(task)
    while len(hub):
        hub.step()


def _draw(
    hub: Hub, view: Callable[[OnStep], Any], interface: PipelineInterface, shape: _Shape, spec: ReplicaSpec
) -> WarmUp | None:
    clock = WarmUpClock(device_kind=spec.device_kind)
    tasks: list[Task] = []
    prompts = _PROMPTS[: spec.max_num_seqs]
    for number, prompt in enumerate(prompts):
        # Other seeds and timesteps, too: what is the same in all samples of a check, the check says nothing about.
        unit = _unit(prompt, shape, interface.info, steps=_STEPS + len(prompts) - 1 - number, seed=number)
        watched = view((lambda step: None) if tasks else clock.on_step)
        tasks.append(Task(functools.partial(watched, **interface.arguments(unit, ()))))
    _drive(hub, tasks)
    width, height, frames = shape
    for error in (task.error for task in tasks if task.error is not None):
        raise EngineStartError(
            f"model {spec.model!r}: the warm-up at {width}x{height} failed: {one_line(error)}; "
            "`warmup: false` starts without"
        ) from error
    return clock.measured(width * height * (frames or 1))


def _small(info: ModelInfo) -> _Shape:
    fewest = info.frame_counts[0] if info.frame_counts else info.frame_multiple + 1
    frames = fewest if info.kind == "video" else None
    if not {"width", "height"}.issubset(info.parameters):
        return info.default_width, info.default_height, frames
    side = min(_SIDE, info.default_width, info.default_height)
    side = math.ceil(side / info.size_multiple) * info.size_multiple
    width, height = info.sizes[0] if info.sizes else (side, side)
    return width, height, frames


def _check(shape: _Shape, info: ModelInfo) -> None:
    width, height, frames = shape
    said = f"engine_args.warmup: {width}x{height}" + (f"x{frames}" if frames is not None else "")
    if info.sizes and (width, height) not in info.sizes:
        raise EngineStartError(f"{said}: the model's sizes are {', '.join(f'{w}x{h}' for w, h in info.sizes)}")
    if width % info.size_multiple or height % info.size_multiple:
        raise EngineStartError(f"{said}: width and height must be multiples of {info.size_multiple}")
    if frames is not None and info.kind != "video":
        raise EngineStartError(f"{said}: {info.pipeline} makes pictures; wanted WIDTHxHEIGHT")
    if frames is not None and (frames - 1) % info.frame_multiple:
        raise EngineStartError(f"{said}: frames must be 1 more than a multiple of {info.frame_multiple}")
    if not {"width", "height"}.issubset(info.parameters):
        raise EngineStartError(f"{said}: {info.pipeline} takes no size")


def _unit(prompt: str, shape: _Shape, info: ModelInfo, *, steps: int, seed: int = 0) -> Generate:
    width, height, frames = shape
    sized = {"width", "height"}.issubset(info.parameters)
    params = SamplingParams(
        prompt=prompt,
        seed=seed,
        width=width if sized else None,
        height=height if sized else None,
        num_inference_steps=steps if "num_inference_steps" in info.parameters else None,
        num_frames=(frames or info.default_num_frames) if info.kind == "video" else None,
    )
    return Generate(Address("warm-up", 0, 0, 0), params)
