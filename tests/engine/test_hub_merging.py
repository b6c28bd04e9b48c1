"""Which calls the hub lets share a forward, and that trouble in a shared forward stays with the unit it belongs to."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

    from triptych.engine import merging
    from triptych.engine.hub import Hub, Task, UnitAborted


class Model(torch.nn.Module):
    """Adds the timestep; `seen` are the batch sizes of its forwards, `trouble` what some inputs raise."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.trouble: Callable[[torch.Tensor], None] = lambda hidden_states: None

    def forward(self, hidden_states: torch.Tensor, timestep: Any = 0, return_dict: bool = False) -> Any:
        self.seen.append(len(hidden_states))
        self.trouble(hidden_states)
        steps = torch.as_tensor(timestep).reshape(-1, 1)
        return (hidden_states + steps,)


class Pipe:
    def __init__(self) -> None:
        self.model = Model()
        self.components = {"transformer": self.model}

    def __call__(self, value: float, steps: int, width: int = 3) -> torch.Tensor:
        latents = torch.full((1, width), value)
        for step in range(steps):
            latents = self.model(latents, timestep=torch.tensor(float(step)), return_dict=False)[0]
        return latents


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


def hub_of(pipe: Pipe, **options: Any) -> Hub:
    """A merging hub with its model already checked."""
    hub = Hub(merging=True, **options)
    hub.attach(pipe)
    limit, hub._merger._max_pixels = hub._merger._max_pixels, None
    drive(hub, *(Task(lambda: pipe(0.0, 1)) for _ in range(2)))
    hub._merger._max_pixels = limit
    pipe.model.seen.clear()
    return hub


def drive(hub: Hub, *tasks: Task) -> list[Task]:
    ended = [task for task in map(hub.start, tasks) if task is not None]
    while len(hub):
        ended += hub.step()
    return ended


def values(*tasks: Task) -> list[float]:
    return [task.result[0, 0].item() for task in tasks]


def test_calls_that_fit_share_a_forward_whatever_their_steps(pipe: Pipe) -> None:
    hub = hub_of(pipe)
    tasks = [Task(lambda value=value: pipe(value, 2 + int(value))) for value in (0.0, 1.0, 2.0)]
    drive(hub, *tasks)
    assert values(*tasks) == [1.0, 4.0, 8.0]
    assert pipe.model.seen == [3, 3, 2, 1]
    assert [task.batch_size_mean for task in tasks] == [3.0, 8 / 3, 9 / 4]


def test_other_sizes_and_groups_and_units_that_run_alone_have_forwards_of_their_own(pipe: Pipe) -> None:
    hub = hub_of(pipe)
    drive(hub, Task(lambda: pipe(0.0, 1)), Task(lambda: pipe(0.0, 1, width=4)))
    assert pipe.model.seen == [1, 1]
    pipe.model.seen.clear()
    drive(hub, Task(lambda: pipe(0.0, 1), group="style"), Task(lambda: pipe(0.0, 1)), Task(lambda: pipe(0.0, 1)))
    assert pipe.model.seen == [1, 2]
    pipe.model.seen.clear()
    drive(hub, Task(lambda: pipe(0.0, 1)), Task(lambda: pipe(0.0, 1), alone=True), Task(lambda: pipe(0.0, 1)))
    assert pipe.model.seen == [2, 1]


def test_the_owner_is_told_before_the_forward_of_another_group(pipe: Pipe) -> None:
    hub, told = hub_of(pipe), []
    hub.before_group = lambda group: told.append((group, len(pipe.model.seen)))
    drive(hub, Task(lambda: pipe(0.0, 2)), Task(lambda: pipe(0.0, 2), group="style"))
    assert told == [("style", 1), (None, 2), ("style", 3)]


def test_a_group_that_cannot_be_entered_fails_its_own_units_and_is_left_before_the_next_forward(pipe: Pipe) -> None:
    entered: list[object] = []

    def enter(group: object) -> None:
        entered.append(group)
        if group == "style":
            raise KeyError(group)

    hub = hub_of(pipe)
    hub.before_group = enter
    bad, good = Task(lambda: pipe(0.0, 2), group="style"), Task(lambda: pipe(0.0, 2))
    drive(hub, bad, good)
    assert isinstance(bad.error, KeyError)
    assert values(good) == [1.0]
    assert entered == ["style", None]


def test_the_bound_on_pixels_cuts_a_group_and_all_get_their_turn(pipe: Pipe) -> None:
    hub = hub_of(pipe, max_pixels=250)
    tasks = [Task(lambda value=value: pipe(value, 2), pixels=100) for value in (0.0, 1.0, 2.0)]
    drive(hub, *tasks, huge := Task(lambda: pipe(5.0, 1), pixels=1000))
    assert values(*tasks, huge) == [1.0, 2.0, 3.0, 5.0]
    assert max(pipe.model.seen) == 2
    assert pipe.model.seen[:3] == [2, 1, 1]


def test_a_more_urgent_unit_pauses_the_others_and_they_resume_to_the_same_result(pipe: Pipe) -> None:
    hub = hub_of(pipe)
    first = Task(lambda: pipe(1.0, 4))
    hub.start(first)
    hub.step()
    urgent = Task(lambda: pipe(2.0, 3), priority=-1)
    assert drive(hub, urgent) == [urgent, first]
    assert values(first, urgent) == [7.0, 5.0]
    assert pipe.model.seen == [1] * 7


def test_an_abort_reaches_a_paused_unit_at_once(pipe: Pipe) -> None:
    hub = hub_of(pipe)
    paused, urgent = Task(lambda: pipe(1.0, 4)), Task(lambda: pipe(2.0, 3), priority=-1)
    hub.start(paused)
    hub.start(urgent)
    paused.abort_requested = True
    assert hub.step() == [paused]
    assert isinstance(paused.error, UnitAborted)
    assert pipe.model.seen == []
    assert drive(hub) == [urgent]


def test_missing_memory_in_a_shared_forward_fails_only_the_unit_that_cannot_fit_alone(pipe: Pipe) -> None:
    hub = hub_of(pipe)

    def trouble(hidden_states: torch.Tensor) -> None:
        if len(hidden_states) > 2 or hidden_states[0, 0] >= 50:
            raise torch.OutOfMemoryError("out of memory")

    pipe.model.trouble = trouble
    tasks = [Task(lambda value=value: pipe(value, 3)) for value in (0.0, 1.0, 2.0, 50.0)]
    drive(hub, *tasks)
    assert values(*tasks[:3]) == [3.0, 4.0, 5.0]
    assert isinstance(tasks[3].error, torch.OutOfMemoryError)
    assert pipe.model.seen[:5] == [4, 1, 1, 1, 1]
    checked = (2, 1, 1)  # by now they are at different steps
    assert pipe.model.seen[5:] == [2, *checked, 2], "later forwards stay below what did not fit"


def test_an_error_in_a_shared_forward_meets_only_the_unit_it_belongs_to(
    pipe: Pipe, caplog: pytest.LogCaptureFixture
) -> None:
    hub = hub_of(pipe)

    def trouble(hidden_states: torch.Tensor) -> None:
        if (hidden_states == 50).any():
            raise ArithmeticError("fifty")

    pipe.model.trouble = trouble
    tasks = [Task(lambda value=value: pipe(value, 2)) for value in (0.0, 50.0, 1.0)]
    drive(hub, *tasks)
    assert values(tasks[0], tasks[2]) == [1.0, 2.0]
    assert isinstance(tasks[1].error, ArithmeticError)
    assert pipe.model.seen == [3, 1, 1, 1, 2], "merging goes on afterwards"
    assert not caplog.records


def test_a_forward_that_fails_only_when_shared_is_not_shared_again(
    pipe: Pipe, caplog: pytest.LogCaptureFixture
) -> None:
    hub = hub_of(pipe)

    def trouble(hidden_states: torch.Tensor) -> None:
        if len(hidden_states) > 1:
            raise ValueError("one at a time")

    pipe.model.trouble = trouble
    tasks = [Task(lambda value=value: pipe(value, 2)) for value in (0.0, 1.0)]
    drive(hub, *tasks)
    assert values(*tasks) == [1.0, 2.0]
    assert pipe.model.seen == [2, 1, 1, 1, 1]
    assert "forwards of transformer.forward are not merged: ValueError: one at a time" in caplog.text


class OneTimestep(Model):
    """Takes the first timestep for all samples."""

    def forward(self, hidden_states: torch.Tensor, timestep: Any = 0, return_dict: bool = False) -> Any:
        return super().forward(hidden_states, torch.as_tensor(timestep).reshape(-1)[0], return_dict)


def test_a_check_with_equal_timesteps_does_not_vouch_for_different_ones(
    pipe: Pipe, caplog: pytest.LogCaptureFixture
) -> None:
    pipe.model = pipe.components["transformer"] = OneTimestep()
    hub = hub_of(pipe)
    first, second = Task(lambda: pipe(1.0, 4)), Task(lambda: pipe(2.0, 4))
    hub.start(first)
    hub.step()
    drive(hub, second)
    assert values(first, second) == [7.0, 8.0]
    assert "forwards of transformer.forward are not merged" in caplog.text


def test_a_model_is_checked_with_different_timesteps_once(pipe: Pipe) -> None:
    hub = hub_of(pipe)
    for _ in range(2):
        first, second = Task(lambda: pipe(1.0, 3)), Task(lambda: pipe(2.0, 3))
        hub.start(first)
        hub.step()
        drive(hub, second)
        assert values(first, second) == [4.0, 5.0]
    assert pipe.model.seen == [1, *(2, 1, 1), 2, 1, 1, 2, 2, 1]


def test_a_wrong_value_beside_a_right_zero_is_told_too(pipe: Pipe, caplog: pytest.LogCaptureFixture) -> None:
    hub = Hub(merging=True)
    hub.attach(pipe)

    def trouble(hidden_states: torch.Tensor) -> None:
        hidden_states += len(hidden_states) - 1

    pipe.model.trouble = trouble
    tasks = [Task(lambda: pipe(0.0, 1)) for _ in range(2)]
    drive(hub, *tasks)
    assert values(*tasks) == [0.0, 0.0]
    assert "forwards of transformer.forward are not merged" in caplog.text


@pytest.mark.parametrize(("trouble", "merged_later"), [(torch.OutOfMemoryError("no room"), True), (TypeError(), False)])
def test_a_check_that_cannot_be_made_costs_no_unit(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch, trouble: Exception, merged_later: bool
) -> None:
    def compare(merged: object, separate: object) -> None:
        monkeypatch.undo()
        raise trouble

    monkeypatch.setattr(merging, "_difference", compare)
    hub = Hub(merging=True)
    hub.attach(pipe)
    tasks = [Task(lambda value=value: pipe(value, 3)) for value in (1.0, 2.0)]
    drive(hub, *tasks)
    assert values(*tasks) == [4.0, 5.0]
    assert (pipe.model.seen[-1] == 2) is merged_later


def test_arguments_that_cannot_be_looked_at_are_for_a_forward_alone(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(*args: object, **options: object) -> None:
        raise RuntimeError("no room on the host")

    hub = hub_of(pipe)
    monkeypatch.setattr(merging, "gather", gather)
    tasks = [Task(lambda value=value: pipe(value, 1)) for value in (1.0, 2.0)]
    drive(hub, *tasks)
    assert values(*tasks) == [1.0, 2.0]
    assert pipe.model.seen == [1, 1]


def test_values_that_are_no_numbers_stay_with_their_unit(pipe: Pipe) -> None:
    hub = hub_of(pipe)
    good, bad = Task(lambda: pipe(1.0, 2)), Task(lambda: pipe(float("nan"), 2))
    drive(hub, good, bad)
    assert values(good) == [2.0]
    assert bad.result.isnan().all()
    assert pipe.model.seen == [2, 2]


def test_memory_is_flat_over_hundreds_of_units_with_aborts_and_failures(pipe: Pipe) -> None:
    hub = hub_of(pipe)

    def trouble(hidden_states: torch.Tensor) -> None:
        if (hidden_states == 7).any():
            raise ArithmeticError("seven")

    pipe.model.trouble = trouble

    def some(count: int) -> int:
        for number in range(count):
            tasks = [Task(lambda value=value: pipe(value, 3)) for value in (1.0, 7.0 if number % 3 else 2.0, 3.0)]
            for task in tasks:
                hub.start(task)
            hub.step()
            tasks[2].abort_requested = number % 2 == 0
            drive(hub)
        del tasks, task
        gc.collect()
        return sum(issubclass(type(kept), torch.Tensor | Task | merging.Call) for kept in gc.get_objects())

    few = some(5)
    assert some(170) == few
