"""The engine's promises that do not depend on the family: failures, refusals, aborts, encoders, bookkeeping."""

from __future__ import annotations

import io
import json
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import diffusers
    import torch
    from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor

    from tiny.engine_run import EngineRun, decoded
    from triptych.engine import failures

from triptych.errors import ErrorCode
from triptych.media.codecs import CODECS, Codec
from triptych.messages import Abort, Aborted, Address, Failure, Lora, Output, OutputSpec, Preview, Progress, Update

pytestmark = pytest.mark.filterwarnings("ignore")

RunOf = Callable[..., EngineRun]


@pytest.fixture
def sd15(engine_run: RunOf) -> Iterator[EngineRun]:
    run = engine_run("sd15")
    yield run
    run.on_message = None


def failure_of(run: EngineRun, **unit: Any) -> Failure:
    (end,) = run.run(run.unit(**unit))
    assert isinstance(end, Failure), end
    return end


def test_the_embedded_model_draws_a_red_circle_in_the_middle(engine_run: RunOf) -> None:
    run = engine_run("shapes")
    unit = run.unit(prompt="a red circle", seed=7, num_inference_steps=None)
    (data,) = run.bytes_of(unit)
    pixels = decoded(data).astype(int)
    assert pixels.shape == (64, 64, 3)
    red, green, blue = pixels[28:36, 28:36].mean(axis=(0, 1))
    assert red > 180
    assert green < 90
    assert blue < 90
    assert pixels[:6, :6].min() > 230, "the background that nobody named is white"
    (output,) = (message for message in run.messages if isinstance(message, Output))
    assert output.steps == 20, "the number of steps of triptych.json"


def test_values_that_are_no_numbers_are_an_engine_error_and_no_black_picture(
    sd15: EngineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = diffusers.PNDMScheduler.step_plms

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (torch.full_like(step(self, *args, **kwargs)[0], float("nan")),)

    with monkeypatch.context() as patch:
        patch.setattr(diffusers.PNDMScheduler, "step_plms", broken)
        for steps in (1, 2):  # of this model the warm-up knows that it can draw in one step
            end = failure_of(sd15, num_inference_steps=steps)
            assert (end.code, end.param) == (ErrorCode.ENGINE_ERROR, None)
            assert "no numbers (NaN or infinity)" in end.message
    sd15.bytes_of(sd15.unit())


@pytest.mark.parametrize(("name", "said"), [("qwen", "no numbers"), ("pixart", "Error")])
def test_a_model_that_cannot_draw_in_one_step_says_so_without_a_warm_up_too(
    name: str, said: str, model_path: Callable[[str], Path]
) -> None:
    run = EngineRun(model_path(name), engine_args={"warmup": False})
    end = failure_of(run, num_inference_steps=1)
    assert (end.code, end.param) == (ErrorCode.INVALID_VALUE, "num_inference_steps")
    assert "one denoising step may be too few for this model, try 2 or more: " in end.message
    assert said in end.message
    run.bytes_of(run.unit(num_inference_steps=2))


def test_what_the_pipeline_itself_refuses_is_an_invalid_value_that_names_the_field(
    engine_run: RunOf, sd15: EngineRun
) -> None:
    end = failure_of(engine_run("shapes"), guidance_scale=0.5)
    assert (end.code, end.param) == (ErrorCode.INVALID_VALUE, "guidance_scale")
    assert "has to be >= 1.0 but is 0.5" in end.message
    assert failure_of(sd15, width=12, height=16).code == ErrorCode.INVALID_VALUE


def test_an_exception_of_a_model_fails_its_unit_only(sd15: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sd15.bytes_of(sd15.unit())
    scheduler = diffusers.PNDMScheduler

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "scale_model_input", broken)
        end = failure_of(sd15)
    assert (end.code, end.message) == (ErrorCode.ENGINE_ERROR, "StableDiffusionPipeline failed: KeyError: 'lost'")
    assert sd15.bytes_of(sd15.unit()) == expected


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 1 bytes"),
        MemoryError(),
    ],
)
def test_missing_memory_is_out_of_memory(sd15: EngineRun, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(diffusers.PNDMScheduler, "scale_model_input", broken)
    assert failure_of(sd15).code == ErrorCode.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("unit", "code", "param"),
    [
        ({"lora": Lora("style")}, ErrorCode.INVALID_VALUE, "lora.name"),
        ({"output": OutputSpec("mp4")}, ErrorCode.INVALID_VALUE, "output_format"),
        ({"true_cfg_scale": 4.0}, ErrorCode.UNSUPPORTED_PARAMETER, "true_cfg_scale"),
        ({"num_frames": 5}, ErrorCode.UNSUPPORTED_PARAMETER, "num_frames"),
        ({"strength": 0.5}, ErrorCode.UNSUPPORTED_PARAMETER, "strength"),
        ({"extra_args": {"latents": 1}}, ErrorCode.UNSUPPORTED_PARAMETER, "extra_args.latents"),
        (
            {"extra_args": {"num_images_per_prompt": 9}},
            ErrorCode.UNSUPPORTED_PARAMETER,
            "extra_args.num_images_per_prompt",
        ),
        ({"extra_args": {"eta": "much"}}, ErrorCode.INVALID_VALUE, "extra_args.eta"),
        ({"extra_args": {"clip_skip": 1}}, ErrorCode.UNSUPPORTED_PARAMETER, "extra_args.clip_skip"),
    ],
)
def test_what_the_pipeline_does_not_take_is_refused(
    sd15: EngineRun, unit: dict[str, Any], code: ErrorCode, param: str | None
) -> None:
    made = sd15.unit(**unit)
    sd15.messages.clear()
    sd15.engine.submit(made, (b"\0\0\0",))
    sd15.engine.stop()
    sd15.engine.run()
    end = sd15.end_of(made.address)
    assert isinstance(end, Failure)
    assert (end.code, end.param) == (code, param)


@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_as_many_layers_are_skipped_as_the_text_encoders_can_spare(name: str, engine_run: RunOf) -> None:
    run = engine_run(name)
    made = run.bytes_of(*(run.unit(skip, extra_args={"clip_skip": skip}) for skip in (0, 1, 2)))
    assert len(set(made)) == 3
    for skip in (-1, 3):
        end = failure_of(run, extra_args={"clip_skip": skip})
        assert (end.code, end.param) == (ErrorCode.INVALID_VALUE, "extra_args.clip_skip")
        assert "between 0 and 2" in end.message


def test_extra_arguments_reach_the_pipeline(sd15: EngineRun) -> None:
    plain, rescaled = sd15.bytes_of(sd15.unit(0), sd15.unit(1, extra_args={"guidance_rescale": 0.7}))
    assert plain != rescaled


def test_an_absurd_sequence_length_is_refused_before_memory_is_spent(engine_run: RunOf) -> None:
    end = failure_of(engine_run("qwen"), extra_args={"max_sequence_length": 10**9})
    assert (end.code, end.param) == (ErrorCode.INVALID_VALUE, "extra_args.max_sequence_length")


def test_a_rejection_by_the_safety_checker_is_no_black_picture(
    sd15: EngineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = lambda self, image, device, dtype: (image, [True])  # noqa: E731
    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "run_safety_checker", checked)
    end = failure_of(sd15)
    assert (end.code, end.param) == (ErrorCode.INVALID_VALUE, "prompt")


def test_a_unit_that_waits_for_a_slot_is_aborted_at_once(sd15: EngineRun) -> None:
    running, waiting = sd15.unit(0), sd15.unit(1)

    def abort_waiting(message: object) -> None:
        if isinstance(message, Progress) and message.phase == "encode":
            sd15.engine.abort(Abort(waiting.address))

    sd15.on_message = abort_waiting
    first, second = sd15.run(running, waiting)
    assert isinstance(first, Output)
    assert isinstance(second, Aborted)
    assert not sd15.progress(waiting.address)


def test_aborts_and_updates_of_unknown_units_are_ignored(sd15: EngineRun) -> None:
    sd15.engine.abort(Abort(sd15.unit(8).address))
    sd15.engine.update(Update(sd15.unit(9).address, 3))
    (end,) = sd15.run(sd15.unit())
    assert isinstance(end, Output)


def test_a_priority_update_of_a_unit_that_has_not_begun_holds_when_it_begins(sd15: EngineRun) -> None:
    begun: list[int] = []
    start = sd15.engine._start

    def watched(unit: Any, frames: Any) -> Any:
        begun.append(unit.priority)
        return start(unit, frames)

    first, second = sd15.unit(0), sd15.unit(1)
    sd15.on_message = lambda message: (
        sd15.engine.update(Update(second.address, -3)) if message.address == first.address else None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sd15.engine, "_start", watched)
        sd15.run(first, second)
    assert begun == [0, -3]


def test_a_priority_update_lets_the_other_unit_finish_first(engine_run: RunOf) -> None:
    run = engine_run("sd15", slots=2)
    first, second = run.unit(0), run.unit(1)

    def promote(message: object) -> None:
        if isinstance(message, Progress) and message.address == second.address and message.phase == "encode":
            run.engine.update(Update(second.address, -1))

    run.on_message = promote
    try:
        run.run(first, second)
    finally:
        run.on_message = None
    decoded_in = [m.address for m in run.messages if isinstance(m, Progress) and m.phase == "decode"]
    assert decoded_in == [second.address, first.address]


def test_no_unit_starts_while_the_encoders_are_full(sd15: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    release, entered = threading.Event(), threading.Semaphore(0)

    def slow(pixels: Any, fps: int, compression: int | None) -> bytes:
        entered.release()
        assert release.wait(30)
        return b"encoded"

    monkeypatch.setitem(CODECS, "png", Codec("image", "image/png", slow))  # type: ignore[arg-type]
    units = [sd15.unit(number) for number in range(4)]
    sd15.messages.clear()
    for unit in units:
        sd15.engine.submit(unit, ())
    sd15.engine.stop()
    runner = threading.Thread(target=sd15.engine.run)
    runner.start()
    try:
        assert entered.acquire(timeout=30)
        assert entered.acquire(timeout=30)
        assert not entered.acquire(timeout=0.5)
        assert not sd15.progress(units[2].address)
    finally:
        release.set()
        runner.join(60)
    assert not runner.is_alive()
    assert all(isinstance(sd15.end_of(unit.address), Output) for unit in units)


def test_a_codec_that_fails_fails_its_unit_only(sd15: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(pixels: Any, fps: int, compression: int | None) -> bytes:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setitem(CODECS, "png", Codec("image", "image/png", broken))  # type: ignore[arg-type]
        end = failure_of(sd15)
    assert (end.code, end.message) == (
        ErrorCode.ENGINE_ERROR,
        "the result cannot be encoded as png: OSError: disk full",
    )
    sd15.bytes_of(sd15.unit())


@pytest.mark.parametrize(("name", "kind"), [("jpeg", "JPEG"), ("webp", "WEBP")])
def test_pictures_come_in_the_format_that_was_asked_for(sd15: EngineRun, name: Any, kind: str) -> None:
    unit = sd15.unit(output=OutputSpec(name, 90))
    (data,) = sd15.bytes_of(unit)
    assert Image.open(io.BytesIO(data)).format == kind
    end = sd15.end_of(unit.address)
    assert isinstance(end, Output)
    assert end.mime == f"image/{name}"


def test_seeds_over_the_whole_range_give_different_pictures(sd15: EngineRun) -> None:
    made = sd15.bytes_of(*(sd15.unit(number, seed=seed) for number, seed in enumerate((0, 1, 2**63 - 1))))
    assert len(set(made)) == 3


def with_scheduler(model: Path, folder: Path, name: str) -> Path:
    """A copy of the model with another scheduler."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    getattr(diffusers, name).from_config(config).save_pretrained(folder / "scheduler")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", name]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_more_steps_than_the_scheduler_can_make_are_an_invalid_value(tiny_pipelines: Path, tmp_path: Path) -> None:
    run = EngineRun(with_scheduler(tiny_pipelines / "sd15", tmp_path / "sd15", "LCMScheduler"))
    end = failure_of(run, num_inference_steps=60)
    assert (end.code, end.param) == (ErrorCode.INVALID_VALUE, "num_inference_steps")
    assert "is smaller than `num_inference_steps`: 60" in end.message


def test_what_the_pipeline_says_of_an_input_picture_names_it() -> None:
    with pytest.raises(ValueError, match="at least 64px") as caught:
        Flux2ImageProcessor.check_image_input(Image.new("RGB", (32, 32)))
    failure = failures.failure_of(caught.value, Address("request", 0, 0, 0), None)
    assert (failure.code, failure.param) == (ErrorCode.INVALID_VALUE, "image")


@pytest.mark.parametrize(
    "scheduler",
    [
        "HeunDiscreteScheduler",
        "KDPM2DiscreteScheduler",
        "DPMSolverSinglestepScheduler",
        "EulerDiscreteScheduler",
        "LCMScheduler",
    ],
)
def test_steps_are_those_of_the_request_whatever_the_scheduler(
    scheduler: str, tiny_pipelines: Path, tmp_path: Path
) -> None:
    run = EngineRun(with_scheduler(tiny_pipelines / "sdxl", tmp_path / "sdxl", scheduler))
    unit = run.unit(num_inference_steps=5, previews=2)
    run.bytes_of(unit)
    assert [message.step for message in run.messages if isinstance(message, Preview)] == [2, 3]
    steps = [message.step for message in run.progress(unit.address)]
    assert steps == sorted(steps)
    assert steps[-1] == 5
    assert {message.steps for message in run.progress(unit.address)} == {5}


def test_detaching_leaves_the_pipeline_as_diffusers_made_it(model_path: Callable[[str], Path]) -> None:
    run = EngineRun(model_path("sd15"))
    run.bytes_of(run.unit())
    pipe = run.engine._pipe
    run.engine.close()
    assert not [name for name, module in pipe.components.items() if "forward" in getattr(module, "__dict__", {})]
    assert "decode" not in pipe.vae.__dict__
    assert np.asarray(pipe("a", num_inference_steps=1).images[0]).shape == (32, 32, 3)
