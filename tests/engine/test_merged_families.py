"""Every supported family with forwards shared between units, against the same units alone.

`TOLERANCE` is the largest difference of a pixel, of a range of 1, in float32 (trained weights under strong guidance
widen rounding, so the embedded model has three times as much); a wrong timestep, a missing mask or the prompt of a
neighbour moves pixels by more than ten times as much, which the mutations below show.
"""

from __future__ import annotations

import collections
import random
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # other people's deprecations
    import diffusers
    import torch

    from tiny.hub_run import HubRun, difference, pixels
    from tiny.more_pipelines import MORE_FAMILIES, build_in_memory
    from tiny.pipelines import FAMILIES
    from triptych.engine import collation, merging
    from triptych.engine.hub import Phase, Task, UnitAborted
    from triptych.engine.model_settings import ModelSettings
    from triptych.engine.pipeline_modes import PipelineModes

from triptych.messages import MediaInput

pytestmark = pytest.mark.filterwarnings("ignore")

MODELS = [*FAMILIES, *MORE_FAMILIES, "shapes"]
TOLERANCE = collections.defaultdict(lambda: 1e-5, shapes=3e-5)

PROMPTS = ("a red circle", "a blue square above two green stars", "x", 'many "words" about a very small picture')
# family: side, keyword that steers guidance, values with and without it
SMALL: dict[str, tuple[int, str, float, float]] = {
    "qwen": (32, "true_cfg_scale", 4.0, 1.0),
    "sd15": (16, "guidance_scale", 7.5, 1.0),
    "sdxl": (16, "guidance_scale", 5.0, 1.0),
    "sd3": (8, "guidance_scale", 7.0, 1.0),
    "flux": (16, "true_cfg_scale", 3.0, 1.0),
    "zimage": (16, "guidance_scale", 5.0, 0.0),
    "pixart": (16, "guidance_scale", 4.5, 1.0),
    "wan": (16, "guidance_scale", 5.0, 1.0),
    "ltx": (32, "guidance_scale", 3.0, 1.0),
    "lumina2": (16, "guidance_scale", 4.0, 1.0),
    "sana": (32, "guidance_scale", 4.5, 1.0),
    "flux2_klein": (16, "guidance_scale", 4.0, 1.0),
    "hunyuan_video15": (16, "", 0, 0),  # its guider is a part of the model
    "qwen_edit": (32, "true_cfg_scale", 4.0, 1.0),
    "shapes": (64, "guidance_scale", 3.0, 1.0),
}
FIXED: dict[str, dict[str, Any]] = {
    "pixart": {"use_resolution_binning": False},
    "sana": {"use_resolution_binning": False},
    "shapes": {"use_resolution_binning": False},
    "wan": {"num_frames": 5},
    "ltx": {"num_frames": 5},
    "hunyuan_video15": {"num_frames": 5},
    "flux2_klein": {"text_encoder_out_layers": (1,), "max_sequence_length": 64},
}
# Models that diffusers and transformers cannot run for several samples: one fails, one lists all pictures in a row.
ALONE = {"hunyuan_video15": {"vae.decode"}, "qwen_edit": {"text_encoder.forward"}}
PICTURES = [Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8)) for seed in range(2)]
MASK = Image.fromarray(np.repeat(np.uint8([[0, 255]]), 16, axis=1).repeat(32, axis=0))


@pytest.fixture(autouse=True)
def small_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen-Image-Edit looks at every picture as one of a million pixels."""
    module = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit"
    monkeypatch.setattr(f"{module}.calculate_dimensions", lambda area, ratio: (32, 32, None))


@pytest.fixture(scope="session")
def hub_run(model_path: Callable[[str], Path]) -> Callable[[str], HubRun]:
    """`hub_run(family)`: its pipeline under a merging hub, loaded once."""
    loaded: dict[str, HubRun] = {}

    def run(name: str) -> HubRun:
        if name not in loaded:
            pipe = build_in_memory(name) if name in MORE_FAMILIES else model_path(name)
            loaded[name] = HubRun(pipe, **FIXED.get(name, {}))
        return loaded[name]

    return run


def unit_of(name: str, number: int, *, wide: bool = False, **changes: Any) -> dict[str, Any]:
    """One of many different units: prompts, lengths, steps, seeds, sizes, guidance on and off, negative prompts."""
    side, guidance, strong, none = SMALL[name]
    guided = number % 3 != 1
    unit = {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "negative_prompt": ("bad", "ugly and blurred")[number % 2] if guided else None,
        guidance: strong + number if guided else none,
        "width": 2 * side if wide and name != "shapes" else side,
        "height": side,
        "seed": number,
        "num_inference_steps": 2 + number % 3,
    }
    if name == "qwen_edit":
        unit["image"] = PICTURES[number % 2]
    return unit | changes


@pytest.mark.parametrize("name", MODELS)
def test_units_that_join_and_leave_at_any_step_equal_their_solo_runs(
    name: str, hub_run: Callable[[str], HubRun]
) -> None:
    run = hub_run(name)
    chance = random.Random(name)
    units = [unit_of(name, number, wide=number == 4) for number in range(6)]
    wanted = run.solo(units)
    tasks = [run.task(unit) for unit in units]
    joins = {number: chance.randrange(12) for number in range(2, 6)}
    aborted = chance.sample(range(6), 2)
    run.drive(tasks, joins=joins, aborts={number: joins.get(number, 0) + chance.randrange(1, 4) for number in aborted})
    kept = [number for number in range(6) if not isinstance(tasks[number].error, UnitAborted)]
    assert len(kept) < 6
    assert {*range(6)} - {*aborted} <= {*kept}
    found = [pixels(tasks[number]) for number in kept]
    assert difference(found, [wanted[number] for number in kept]) <= TOLERANCE[name]
    same_size = [picture for picture in wanted if picture.shape == wanted[0].shape]
    assert min(difference([one], [other]) for one, other in pairwise(same_size)) > 10 * TOLERANCE[name]


@pytest.mark.parametrize("name", MODELS)
def test_equal_units_share_every_denoising_forward_and_guidance_costs_none(
    name: str, hub_run: Callable[[str], HubRun]
) -> None:
    run = hub_run(name)
    units = [unit_of(name, 0, seed=seed, prompt=PROMPTS[seed]) for seed in range(3)]
    run.drive([run.task(unit) for unit in units])  # whatever is to be checked has been
    tasks = [run.task(unit) for unit in units]
    run.drive(tasks)
    assert [task.batch_size_mean for task in tasks] == [3.0] * 3
    assert [task.forwards for task in tasks] == [3 if name == "sd15" else 2] * 3  # its scheduler makes one step more
    assert difference([pixels(task) for task in tasks], run.solo(units)) <= TOLERANCE[name]


def stopped(run: HubRun, unit: dict[str, Any], *, call: int) -> tuple[Task, list[Phase]]:
    """A task that is told to stop when it makes its `call`-th call of a model, and the calls that it makes."""
    made: list[Phase] = []

    def on_phase(phase: Phase) -> None:
        made.append(phase)
        task.abort_requested = task.abort_requested or len(made) == call

    task = run.task(unit, on_phase=on_phase)
    return task, made


@pytest.mark.parametrize("name", MODELS)
def test_joins_before_every_forward_and_aborts_at_every_call_leave_the_others_as_if_alone(
    name: str, hub_run: Callable[[str], HubRun]
) -> None:
    run = hub_run(name)
    first, joining, aborted = (unit_of(name, number, num_inference_steps=2) for number in (0, 1, 3))
    wanted = run.solo([first, joining])
    whole, calls = stopped(run, aborted, call=0)
    run.drive([whole])
    tasks = [run.task(first), *(run.task(joining) for _ in calls)]
    doomed = [stopped(run, aborted, call=call + 1) for call in range(len(calls))]
    run.drive([*tasks, *(task for task, _ in doomed)], joins={number: number for number in range(len(tasks))})
    assert difference([pixels(task) for task in tasks], [wanted[0], *wanted[1:] * len(calls)]) <= TOLERANCE[name]
    assert max(task.batch_size_mean for task in tasks) > 1
    assert {model.name for model in run.hub._merger._switched_off} <= ALONE.get(name, set())
    for call, (task, made) in enumerate(doomed, start=1):
        assert isinstance(task.error, UnitAborted)
        assert call <= len(made) <= call + 1, "both guidance branches may be one forward"
        assert task.forwards <= made[: call - 1].count("step")


@pytest.mark.parametrize("name", MODELS)
def test_units_that_pause_for_each_other_at_every_forward_resume_to_the_same_result(
    name: str, hub_run: Callable[[str], HubRun]
) -> None:
    run = hub_run(name)
    units = [unit_of(name, number, num_inference_steps=2) for number in (0, 1)]
    tasks = [run.task(unit) for unit in units]
    for task in tasks:
        run.hub.start(task)
    while len(run.hub):
        tasks[0].priority, tasks[1].priority = tasks[1].priority, 1 - tasks[1].priority
        run.hub.step()
    assert [task.batch_size_mean for task in tasks] == [1.0, 1.0]
    assert difference([pixels(task) for task in tasks], run.solo(units)) <= TOLERANCE[name]


def modes_of(run: HubRun) -> tuple[Any, Any]:
    """How the model is called with a picture, and with a picture and a mask; None: not at all."""
    modes = PipelineModes(run.pipe, ModelSettings())
    image, mask = (MediaInput(kind, "RGB", 32, 32, 0) for kind in ("image", "mask"))
    return (
        modes.of([image]) if modes.info.image is not None else None,
        modes.of([image, mask]) if modes.info.mask is not None else None,
    )


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "flux", "qwen", "zimage", "ltx", "flux2_klein"])
def test_drawn_redrawn_and_filled_pictures_of_one_model_side_by_side_equal_their_solo_runs(
    name: str, hub_run: Callable[[str], HubRun]
) -> None:
    run = hub_run(name)
    redrawn, filled = modes_of(run)
    if name == "sd3":
        filled = None  # that class wants a model with 16 latent channels
    assert redrawn is not None
    common = {"width": 32, "height": 32, "num_inference_steps": 3}
    side = 64 if name == "flux2_klein" else 32  # smaller ones it refuses
    pictures = [picture.resize((side, side)) for picture in PICTURES]
    units = [
        unit_of(name, 0, **common),
        unit_of(name, 1, **common, mode=redrawn, image=pictures[0], strength=0.75),
        unit_of(name, 2, **common, mode=redrawn, image=pictures[1], strength=0.7),
    ]
    if filled is not None:
        units.append(unit_of(name, 3, **common, mode=filled, image=pictures[0], mask_image=MASK, strength=1.0))
    wanted = run.solo(units)
    tasks = [run.task(unit) for unit in units]
    run.drive(tasks)
    assert difference([pixels(task) for task in tasks], wanted) <= TOLERANCE[name]
    assert min(difference([one], [other]) for one, other in pairwise(wanted)) > 10 * TOLERANCE[name]
    shares = [task.batch_size_mean for task in tasks]
    alike = name in ("sd15", "sdxl", "flux", "qwen")  # whose classes all call the model with the same arguments
    assert (min(shares[:3]) if alike else max(shares)) > 1, shares


@pytest.mark.parametrize("name", ["sd15", "qwen", "zimage", "wan"])
def test_a_call_for_two_outputs_beside_calls_for_one_draws_what_it_draws_alone(
    name: str, hub_run: Callable[[str], HubRun]
) -> None:
    run = hub_run(name)
    pair = {"num_images_per_prompt": 2, "num_videos_per_prompt": 2}
    units = [unit_of(name, 0), unit_of(name, 2, num_inference_steps=3, **pair), unit_of(name, 3)]
    wanted = run.solo(units)
    tasks = [run.task(unit) for unit in units]
    run.drive(tasks)
    assert difference([pixels(task) for task in tasks], wanted) <= TOLERANCE[name]
    assert len(tasks[1].result[0]) == 2


def test_units_with_different_schedulers_share_forwards(hub_run: Callable[[str], HubRun]) -> None:
    run = hub_run("sdxl")
    names = ("EulerDiscrete", "DDIM", "DPMSolverMultistep", "UniPCMultistep", "HeunDiscrete", "LCM", "PNDM", "DDPM")
    units = [
        unit_of("sdxl", number, scheduler=getattr(diffusers, f"{name}Scheduler"), num_inference_steps=4)
        for number, name in enumerate(names)
    ]
    wanted = run.solo(units)
    tasks = [run.task(unit) for unit in units]
    run.drive(tasks)
    # DDIM divides by small numbers.
    assert difference([pixels(task) for task in tasks], wanted) <= 10 * TOLERANCE["sdxl"]
    assert min(task.batch_size_mean for task in tasks) > 2  # some make two or three times as many forwards


def _other_timesteps(name: str, values: Any) -> Any:
    return list(reversed(values)) if name in ("timestep", "t") else values


def _other_prompts(name: str, values: Any) -> Any:
    return list(reversed(values)) if name in ("encoder_hidden_states", "cap_feats") else values


@pytest.mark.parametrize("mutation", [_other_timesteps, _other_prompts])
@pytest.mark.parametrize("name", MODELS)
def test_the_tolerance_tells_a_swapped_timestep_and_the_prompt_of_a_neighbour(
    name: str, mutation: Any, hub_run: Callable[[str], HubRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hub_run(name)
    join, joined_text = collation._join, collation._joined_text
    monkeypatch.setattr(collation, "_join", lambda name, values, first: join(name, mutation(name, values), first))
    monkeypatch.setattr(collation, "_joined_text", lambda name, values: joined_text(name, mutation(name, values)))
    units = [unit_of(name, 0, prompt=PROMPTS[number], num_inference_steps=2 + number) for number in (0, 1)]
    assert _worst_without_checks(run, units, monkeypatch) > 10 * TOLERANCE[name]


@pytest.mark.parametrize("name", ["qwen", "pixart"])
def test_the_tolerance_tells_a_missing_text_mask(
    name: str, hub_run: Callable[[str], HubRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collation, "_joined_mask", lambda masks, shapes: None)
    units = [unit_of(name, 0, prompt=PROMPTS[number]) for number in (0, 1)]
    assert _worst_without_checks(hub_run(name), units, monkeypatch) > 10 * TOLERANCE[name]


def _worst_without_checks(run: HubRun, units: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> float:
    wanted = run.solo(units)
    monkeypatch.setattr(merging, "_difference", lambda merged, separate: None)
    tasks = [run.task(unit) for unit in units]
    for _ in range(2):  # the first time, separate results are used and every kind counts as checked
        tasks = [run.task(unit) for unit in units]
        run.drive(tasks)
    return difference([pixels(task) for task in tasks], wanted)


def test_a_model_whose_merged_forward_differs_is_never_merged_again(
    model_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = HubRun(model_path("sd15"))
    join = collation._join
    monkeypatch.setattr(collation, "_join", lambda name, values, first: join(name, _other_prompts(name, values), first))
    units = [unit_of("sd15", 0, prompt=PROMPTS[number]) for number in (0, 1)]
    wanted = run.solo(units)
    for _ in range(2):
        tasks = [run.task(unit) for unit in units]
        run.drive(tasks)
        assert difference([pixels(task) for task in tasks], wanted) <= TOLERANCE["sd15"]
        assert [task.batch_size_mean for task in tasks] == [1.0, 1.0]
    (record,) = (record for record in caplog.records if record.name == merging.__name__)
    assert "forwards of unet.forward are not merged: a merged output differs" in record.getMessage()


def test_gradients_are_not_kept(hub_run: Callable[[str], HubRun]) -> None:
    run = hub_run("qwen")
    task = run.task(unit_of("qwen", 0))
    with torch.enable_grad():
        run.drive([task])
    assert not task.result.images.requires_grad
