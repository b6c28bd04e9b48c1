"""Partial pictures: which steps show one, that they resemble what comes, and that the run itself does not notice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # other people's deprecations
    import diffusers
    import torch
    from diffusers import DiffusionPipeline

    from tiny.engine_run import PROMPT, EngineRun, decoded
    from tiny.pipelines import FAMILIES

from triptych.engine import previews as previews_module
from triptych.engine.denoised import SchedulerStep
from triptych.engine.latents import UnknownLatents, picture_of
from triptych.engine.pixels import pixels_of
from triptych.engine.preview_plan import preview_steps
from triptych.messages import Abort, Aborted, Output, Preview, Progress

pytestmark = pytest.mark.filterwarnings("ignore")

RunOf = Callable[..., EngineRun]


def previews_of(run: EngineRun) -> list[Preview]:
    return [message for message in run.messages if isinstance(message, Preview)]


@pytest.mark.parametrize(
    ("steps", "count", "planned"),
    [
        (20, 3, (5, 10, 15)),
        (20, 1, (10,)),
        (4, 3, (1, 2, 3)),
        (2, 3, (1,)),
        (1, 3, ()),
        (20, 0, ()),
        (7, 2, (2, 5)),
        (0, 2, ()),
    ],
)
def test_previews_are_spread_over_the_steps_but_the_last(steps: int, count: int, planned: tuple[int, ...]) -> None:
    assert preview_steps(steps, count) == planned


@pytest.mark.parametrize("name", [*FAMILIES, "shapes"])
def test_previews_come_closer_to_the_result_and_leave_its_bytes_alone(name: str, engine_run: RunOf) -> None:
    run = engine_run(name)
    (plain,) = run.bytes_of(run.unit(num_inference_steps=8))
    assert not previews_of(run)
    (data,) = run.bytes_of(run.unit(num_inference_steps=8, previews=3))
    assert data == plain
    shown = previews_of(run)
    assert [(preview.index, preview.step) for preview in shown] == [(0, 2), (1, 4), (2, 6)]
    assert isinstance(run.messages[-1], Output), "the result comes after its previews"
    if run.info.kind == "video":
        assert {preview.mime for preview in shown} == {"image/jpeg"}
        return
    result = decoded(data).astype(float)
    assert {(preview.height, preview.width, preview.mime) for preview in shown} == {(*result.shape[:2], "image/png")}
    early, _, late = (np.abs(decoded(picture) - result).mean() for picture in run.pictures)
    assert late < 0.6 * early
    assert late < 6, "of 255"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_latents_become_the_picture_or_first_frame_of_the_pipeline_itself(
    name: str, model_path: Callable[[str], Path]
) -> None:
    pipe = DiffusionPipeline.from_pretrained(model_path(name))
    pipe.set_progress_bar_config(disable=True)
    video = name in ("wan", "ltx")
    width, height = (32, 64) if video else (32, 48)
    num_frames = 9 if name == "wan" else 1  # LTX looks at later frames, too, when it decodes the first
    options: dict[str, Any] = {"num_frames": num_frames} if video else {}
    if name == "pixart":
        options["use_resolution_binning"] = False
    if name in ("sd15", "sdxl", "pixart"):
        pipe.vae.register_to_config(shift_factor=None)  # these pipelines pass over it, and theirs have none

    def made(output_type: str) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(1)
        output = pipe(
            PROMPT,
            width=width,
            height=height,
            num_inference_steps=2,
            generator=generator,
            output_type=output_type,
            **options,
        )
        return output.frames if video else output.images

    with torch.no_grad():
        picture = picture_of(pipe, made("latent"), width=width, height=height, num_frames=num_frames)
    expected = made("pt")[0]
    difference = pixels_of(picture).astype(int) - pixels_of(expected[0] if video else expected)
    assert np.abs(difference).max() <= (1 if video else 0)


@pytest.mark.parametrize(
    ("scheduler", "options"),
    [
        ("DDIMScheduler", {"clip_sample": False}),
        ("DDPMScheduler", {"clip_sample": False}),
        ("PNDMScheduler", {"skip_prk_steps": True}),
        ("EulerDiscreteScheduler", {}),
        ("EulerAncestralDiscreteScheduler", {}),
        ("HeunDiscreteScheduler", {}),
        ("KDPM2DiscreteScheduler", {}),
        ("LMSDiscreteScheduler", {}),
        ("DPMSolverMultistepScheduler", {}),
        ("DPMSolverSinglestepScheduler", {}),
        ("UniPCMultistepScheduler", {}),
        ("UniPCMultistepScheduler", {"prediction_type": "flow_prediction", "use_flow_sigmas": True}),
        ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
        ("FlowMatchHeunDiscreteScheduler", {}),
    ],
)
@pytest.mark.parametrize("return_dict", [True, False])
def test_the_prediction_of_a_perfect_model_is_the_clean_picture(
    scheduler: str, options: dict[str, Any], return_dict: bool
) -> None:
    made = getattr(diffusers, scheduler)(**options)
    made.set_timesteps(6)
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(1, 4, 8, 8, generator=generator) for _ in range(2))
    flow = scheduler.startswith("FlowMatch") or "use_flow_sigmas" in options
    time = made.timesteps[0]
    if scheduler.startswith("FlowMatch"):
        noisy = made.sigmas[0] * noise + (1 - made.sigmas[0]) * clean
    else:
        noisy = made.add_noise(clean, noise, time[None])
    arguments = (noise - clean if flow else noise, time, noisy)
    result = made.step(*arguments, return_dict=return_dict)
    predicted = SchedulerStep(made, arguments, {"return_dict": return_dict}, result).clean_latents()
    torch.testing.assert_close(predicted, clean, atol=2e-3, rtol=0)


def test_a_scheduler_without_a_prediction_shows_the_latents_themselves() -> None:
    made = diffusers.DEISMultistepScheduler()
    made.set_timesteps(4)
    arguments = (torch.zeros(1, 4, 2, 2), made.timesteps[0], torch.ones(1, 4, 2, 2))
    result = made.step(*arguments)
    assert SchedulerStep(made, arguments, {}, result).clean_latents() is result.prev_sample


def test_a_pipeline_whose_latents_nobody_can_read_gives_no_previews_and_its_result(
    engine_run: RunOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = engine_run("sd15")
    (expected,) = run.bytes_of(run.unit())

    def unknown(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise UnknownLatents("latents of another kind")

    monkeypatch.setattr(previews_module, "picture_of", unknown)
    assert run.bytes_of(run.unit(previews=3)) == [expected]
    assert not previews_of(run)
    messages = [record.getMessage() for record in caplog.records if "no previews" in record.getMessage()]
    assert messages == ["no previews of StableDiffusionPipeline: UnknownLatents: latents of another kind"]


def test_latents_of_an_unknown_shape_are_said_to_be_unknown(engine_run: RunOf) -> None:
    pipe = engine_run("sd15").engine._pipe
    for shape in ((1, 7, 4, 4), (1, 15, 4), (1, 5, 4, 8, 8)):
        with pytest.raises(UnknownLatents):
            picture_of(pipe, torch.zeros(shape), width=16, height=16, num_frames=1)


def test_an_abort_during_the_decoding_of_a_preview_ends_the_unit_there(engine_run: RunOf) -> None:
    run = engine_run("sd15")
    unit = run.unit(previews=1)
    forwards: list[int] = []

    def abort(message: object) -> None:
        if isinstance(message, Progress) and message.phase == "decode" and message.step < message.steps:
            forwards.append(run.engine.heartbeat()[0])
            run.engine.abort(Abort(unit.address))

    run.on_message = abort
    try:
        (end,) = run.run(unit)
    finally:
        run.on_message = None
    assert isinstance(end, Aborted)
    assert [run.engine.heartbeat()[0]] == forwards, "not even the preview was decoded"
    assert not previews_of(run)


def test_units_side_by_side_show_their_own_previews(engine_run: RunOf) -> None:
    solo, shared = engine_run("sd15"), engine_run("sd15", slots=2)
    units = [shared.unit(number, seed=number, previews=2, num_inference_steps=6) for number in range(2)]
    expected = []
    for unit in units:
        solo.bytes_of(unit)
        expected.append(list(solo.pictures))
    shared.bytes_of(*units)
    shown = list(zip(previews_of(shared), shared.pictures, strict=True))
    for unit, pictures in zip(units, expected, strict=True):
        own = [decoded(picture).astype(int) for preview, picture in shown if preview.address == unit.address]
        assert len(own) == 2
        for picture, alone in zip(own, pictures, strict=True):
            assert np.abs(picture - decoded(alone)).max() <= 2
