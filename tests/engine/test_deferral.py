"""Deferred results: two calls in turn become one forward, and whatever a pipeline does with the first is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

    from triptych.engine.deferral import Deferred
    from triptych.engine.hub import Hub, Task, UnitAborted


class WanTransformer3DModel(torch.nn.Module):
    """A class whose override says that its calls may be deferred."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor, return_dict: bool = True) -> tuple[torch.Tensor]:
        self.seen.append(len(hidden_states))
        if (text > 100).any():
            raise ArithmeticError("too much")
        return (hidden_states * text.sum(-1, keepdim=True),)


class Pipe:
    def __init__(self) -> None:
        self.model = WanTransformer3DModel()
        self.components = {"transformer": self.model}

    def guided(self, text: float, negative: float, steps: int = 2) -> torch.Tensor:
        latents = torch.ones(1, 4)
        for _ in range(steps):
            cond = self.model(latents, torch.full((1, 2), text), return_dict=False)[0][:, :3]
            uncond = self.model(latents, torch.full((1, 2), negative), return_dict=False)[0][:, :3]
            guided = uncond + 3 * (cond - uncond)
            latents = latents + torch.cat([guided, guided[:, :1]], dim=1)
        return latents

    def plain(self, text: float, steps: int = 2) -> torch.Tensor:
        latents = torch.ones(1, 4)
        for _ in range(steps):
            latents = latents + 0.1 * self.model(latents, torch.full((1, 2), text), return_dict=False)[0]
        return latents


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


@pytest.fixture
def hub(pipe: Pipe) -> Hub:
    hub = Hub(merging=True)
    hub.attach(pipe)
    drive(hub, *(Task(lambda: pipe.guided(1.0, 0.5, 1)) for _ in range(2)))  # its forwards are checked now
    pipe.model.seen.clear()
    return hub


def drive(hub: Hub, *tasks: Task) -> None:
    for task in tasks:
        hub.start(task)
    while len(hub):
        hub.step()


def test_both_branches_of_all_units_are_one_forward_a_step(hub: Hub, pipe: Pipe) -> None:
    tasks = [Task(lambda text=text: pipe.guided(text, 0.5)) for text in (1.0, 2.0, 3.0)]
    drive(hub, *tasks)
    assert pipe.model.seen == [6, 6]
    assert [task.batch_size_mean for task in tasks] == [3.0] * 3
    for task, text in zip(tasks, (1.0, 2.0, 3.0), strict=True):
        torch.testing.assert_close(task.result, pipe.guided(text, 0.5))


def test_without_a_second_branch_the_first_use_runs_the_forward(hub: Hub, pipe: Pipe) -> None:
    tasks = [Task(lambda: pipe.plain(1.0)), Task(lambda: pipe.plain(2.0)), Task(lambda: pipe.guided(1.0, 0.5))]
    drive(hub, *tasks)
    assert pipe.model.seen == [4, 4]
    for task, wanted in zip(tasks, (pipe.plain(1.0), pipe.plain(2.0), pipe.guided(1.0, 0.5)), strict=True):
        torch.testing.assert_close(task.result, wanted)


def test_units_that_run_alone_and_hubs_that_do_not_merge_defer_nothing(hub: Hub, pipe: Pipe) -> None:
    drive(hub, Task(lambda: pipe.guided(1.0, 0.5), alone=True))
    assert pipe.model.seen == [1] * 4
    hub.detach()
    pipe.model.seen.clear()
    single = Hub()
    single.attach(pipe)
    drive(single, Task(lambda: pipe.guided(1.0, 0.5)))
    assert pipe.model.seen == [1] * 4


@pytest.mark.parametrize("run", [lambda pipe: pipe.guided(101.0, 0.5), lambda pipe: pipe.guided(0.5, 101.0)])
def test_an_error_of_either_branch_is_raised_in_its_unit(
    hub: Hub, pipe: Pipe, run: Callable[[Pipe], torch.Tensor]
) -> None:
    failing, neighbour = Task(lambda: run(pipe)), Task(lambda: pipe.guided(1.0, 0.5))
    drive(hub, failing, neighbour)
    assert isinstance(failing.error, ArithmeticError)
    torch.testing.assert_close(neighbour.result, pipe.guided(1.0, 0.5))


def test_an_abort_while_the_first_result_is_computed_ends_the_unit(hub: Hub, pipe: Pipe) -> None:
    task = Task(lambda: pipe.plain(1.0))
    hub.start(task)
    task.abort_requested = True
    assert hub.step() == [task]
    assert isinstance(task.error, UnitAborted)


@pytest.mark.parametrize(
    "use",
    [
        lambda value: value + 1,
        lambda value: torch.cat([value, value]),
        lambda value: value.shape,
        lambda value: value.chunk(2),
        lambda value: value[:, 1:][0].to(torch.float64),
        lambda value: value.float().mul_(2),
        lambda value: torch.where(value > 0, value, value),
    ],
)
def test_any_use_of_a_deferred_result_is_a_use_of_the_tensor(use: Callable[[torch.Tensor], Any]) -> None:
    tensor = torch.arange(8.0).reshape(2, 4)
    found, wanted = use(Deferred.of(tensor.clone)), use(tensor.clone())
    assert type(found) is type(wanted)
    torch.testing.assert_close(found, wanted) if not isinstance(wanted, torch.Size) else None
    assert not isinstance(wanted, torch.Size) or found == wanted


def test_slicing_computes_nothing() -> None:
    def never() -> torch.Tensor:
        raise AssertionError("computed")

    assert isinstance(Deferred.of(never)[:, :2][0], Deferred)
