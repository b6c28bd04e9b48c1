"""Every supported family with forwards shared between units, against the same units alone.

`TOLERANCE` is the largest difference of a pixel, of a range of 1, in float32; a wrong timestep, a missing mask or the
prompt of a neighbour moves pixels by more than ten times as much, which the mutations below show.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # other people's deprecations
    import diffusers
    import torch

    from tiny.hub_run import HubRun, difference, pixels
    from tiny.more_pipelines import MORE_FAMILIES, build_in_memory
    from tiny.pipelines import FAMILIES
    from triptych.engine import collation, merging
    from triptych.engine.hub import UnitAborted

pytestmark = pytest.mark.filterwarnings("ignore")

MODELS = [*FAMILIES, *MORE_FAMILIES, "shapes"]
TOLERANCE = 1e-5

PROMPTS = ("a red circle", "a blue square above two green stars", "x", "many words about a very small picture")
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
    "shapes": (64, "guidance_scale", 3.0, 1.0),
}


@pytest.fixture(scope="session")
def hub_run(model_path: Callable[[str], Path]) -> Callable[[str], HubRun]:
    """`hub_run(family)`: its pipeline under a merging hub, loaded once."""
    loaded: dict[str, HubRun] = {}

    def run(name: str) -> HubRun:
        if name not in loaded:
            fixed: dict[str, Any] = {"use_resolution_binning": False} if name in ("pixart", "sana", "shapes") else {}
            fixed |= {"num_frames": 5} if name in ("wan", "ltx") else {}
            loaded[name] = HubRun(build_in_memory(name) if name in MORE_FAMILIES else model_path(name), **fixed)
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
    assert difference([pixels(tasks[number]) for number in kept], [wanted[number] for number in kept]) <= TOLERANCE
    same_size = [picture for picture in wanted if picture.shape == wanted[0].shape]
    assert min(difference([one], [other]) for one, other in pairwise(same_size)) > 10 * TOLERANCE


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
    assert difference([pixels(task) for task in tasks], run.solo(units)) <= TOLERANCE


@pytest.mark.parametrize("name", ["qwen", "sd15", "wan"])
def test_an_abort_at_any_step_leaves_the_neighbours_untouched(name: str, hub_run: Callable[[str], HubRun]) -> None:
    run = hub_run(name)
    units = [unit_of(name, number, num_inference_steps=2) for number in (0, 2, 3)]
    wanted = run.solo(units)
    for at in range(1, 9):
        tasks = [run.task(unit) for unit in units]
        run.drive(tasks, aborts={1: at})
        assert difference([pixels(tasks[0]), pixels(tasks[2])], [wanted[0], wanted[2]]) <= TOLERANCE
        ended = isinstance(tasks[1].error, UnitAborted)
        assert ended or difference([pixels(tasks[1])], [wanted[1]]) <= TOLERANCE


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
    assert difference([pixels(task) for task in tasks], wanted) <= 10 * TOLERANCE  # DDIM divides by small numbers
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
    assert _worst_without_checks(run, units, monkeypatch) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["qwen"])
def test_the_tolerance_tells_a_missing_text_mask(
    name: str, hub_run: Callable[[str], HubRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collation, "_joined_mask", lambda masks, shapes: None)
    units = [unit_of(name, 0, prompt=PROMPTS[number]) for number in (0, 1)]
    assert _worst_without_checks(hub_run(name), units, monkeypatch) > 10 * TOLERANCE


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
        assert difference([pixels(task) for task in tasks], wanted) <= TOLERANCE
        assert [task.batch_size_mean for task in tasks] == [1.0, 1.0]
    (record,) = (record for record in caplog.records if record.name == merging.__name__)
    assert "forwards of unet.forward are not merged: a merged output differs" in record.getMessage()


def test_gradients_are_not_kept(hub_run: Callable[[str], HubRun]) -> None:
    run = hub_run("qwen")
    task = run.task(unit_of("qwen", 0))
    with torch.enable_grad():
        run.drive([task])
    assert not task.result.images.requires_grad
