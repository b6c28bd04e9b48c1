"""The engine with several slots: it keeps nothing of its units, and says how many shared their forwards."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import diffusers
    import torch

    from tiny.engine_run import EngineRun, decoded
    from triptych.engine.hub import Task
    from triptych.engine.merging import Call

from triptych.messages import Abort, Aborted, Failure, Output, Progress

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.timeout(300)
def test_the_engine_keeps_nothing_of_units_that_ended_failed_or_were_aborted(
    engine_run: Callable[..., EngineRun],
) -> None:
    run = engine_run("sd15", slots=8)

    def abort_some(message: object) -> None:
        if isinstance(message, Progress) and message.phase == "step" and message.address.unit % 5 == 0:
            run.engine.abort(Abort(message.address))

    def kept_after(count: int) -> int:
        units = [  # every seventh has a size that the pipeline refuses
            run.unit(number, num_inference_steps=1 + number % 2, width=12 if number % 7 == 3 else 16)
            for number in range(count)
        ]
        ends = run.run(*units)
        assert {type(end) for end in ends} == {Output, Failure, Aborted}
        gc.collect()
        return sum(issubclass(type(kept), torch.Tensor | Task | Call) for kept in gc.get_objects())

    run.on_message = abort_some
    try:
        few = kept_after(16)
        assert kept_after(80) == few
    finally:
        run.on_message = None


def test_units_hold_no_tensors_in_circles_after_their_end(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run("sd15", slots=2)

    def abort_one(message: object) -> None:
        if isinstance(message, Progress) and message.phase == "step" and message.address.unit == 1:
            run.engine.abort(Abort(message.address))

    def kept() -> int:
        kinds = torch.Tensor | Task | Call | diffusers.DiffusionPipeline
        return sum(issubclass(type(kept), kinds) for kept in gc.get_objects())

    units = [run.unit(0), run.unit(1), run.unit(2, width=12)]
    run.run(*units)
    run.on_message = abort_one
    gc.collect()
    gc.disable()
    try:
        before = kept()
        ends = run.run(*units)
        assert kept() == before
    finally:
        gc.enable()
        run.on_message = None
    assert [type(end) for end in ends] == [Output, Aborted, Failure]


def test_a_model_that_widens_its_vae_decodes_side_by_side_and_after_an_abort(model_path: Callable[[str], Path]) -> None:
    run = EngineRun(model_path("sdxl"), slots=2, engine_args={"dtype": "float16"})
    units = [run.unit(0), run.unit(1, prompt="x", seed=9)]
    wanted = [data for unit in units for data in run.bytes_of(msgspec.structs.replace(unit, alone=True))]

    def abort_one(message: object) -> None:
        if isinstance(message, Progress) and message.phase == "decode" and message.address.unit == 0:
            run.engine.abort(Abort(message.address))

    run.on_message = abort_one
    run.run(*units)
    run.on_message = None
    found = run.bytes_of(*units)
    for one, other in zip(found, wanted, strict=True):
        assert np.abs(decoded(one).astype(int) - decoded(other)).max() <= 4  # rounding of half precision


def test_units_that_run_alone_or_deterministically_share_nothing_and_are_the_same_to_the_bit(
    engine_run: Callable[..., EngineRun],
) -> None:
    single, shared = engine_run("sd15"), engine_run("sd15", slots=2)
    units = [single.unit(number, seed=number) for number in range(2)]
    wanted = single.bytes_of(*units)
    alone = [msgspec.structs.replace(unit, alone=True) for unit in units]
    assert shared.bytes_of(*alone) == wanted
    assert [end.batch_size_mean for end in map(shared.end_of, (unit.address for unit in units))] == [1.0, 1.0]  # type: ignore[union-attr]
    run = dataclasses.replace(shared, engine_args={"deterministic": True}, messages=[], data={})
    assert run.bytes_of(*units) == wanted
    shared.bytes_of(*units)
    assert [end.batch_size_mean for end in map(shared.end_of, (unit.address for unit in units))] == [2.0, 2.0]  # type: ignore[union-attr]
