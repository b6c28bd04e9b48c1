"""The hub alone, with pipelines of a few lines."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

    from triptych.engine.hub import Hub, Task, UnitAborted


class Doubler(torch.nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2


class Vae(torch.nn.Module):
    def encode(self, value: torch.Tensor) -> torch.Tensor:
        return value - 1

    def decode(self, value: torch.Tensor) -> torch.Tensor:
        return value + 1


class Pipe:
    """Encodes, doubles `steps` times, decodes."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {
            "text_encoder": Doubler(),
            "transformer": Doubler(),
            "vae": Vae(),
            "tokenizer": object(),
        }

    @torch.no_grad()
    def __call__(self, value: float, steps: int) -> torch.Tensor:
        latents = self.components["text_encoder"](torch.tensor(value))
        for _ in range(steps):
            latents = self.components["transformer"](latents)
        result: torch.Tensor = self.components["vae"].decode(latents)
        return result


def run_all(hub: Hub, *tasks: Task) -> list[Task]:
    ended = [task for task in map(hub.start, tasks) if task is not None]
    while len(hub):
        ended += hub.step()
    return ended


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


@pytest.fixture
def hub(pipe: Pipe) -> Hub:
    hub = Hub()
    hub.attach(pipe)
    return hub


def test_tasks_take_turns_and_each_gets_its_own_result(hub: Hub, pipe: Pipe) -> None:
    phases: list[tuple[str, str]] = []
    first = Task(lambda: pipe(1.0, 3), on_phase=lambda phase: phases.append(("first", phase)))
    second = Task(lambda: pipe(10.0, 1), on_phase=lambda phase: phases.append(("second", phase)))
    assert run_all(hub, first, second) == [second, first]
    assert (first.result.item(), second.result.item()) == (17.0, 41.0)
    assert phases[:4] == [("first", "encode"), ("second", "encode"), ("first", "step"), ("second", "step")]
    assert phases[-1] == ("first", "decode")
    assert hub.forwards == 8
    assert hub.phase is None


def test_lower_priority_numbers_run_first_and_may_change_while_running(hub: Hub, pipe: Pipe) -> None:
    late, urgent = Task(lambda: pipe(1.0, 2), priority=5), Task(lambda: pipe(2.0, 2), priority=-5)
    assert run_all(hub, late, urgent) == [urgent, late]
    early, overtaken = Task(lambda: pipe(1.0, 2)), Task(lambda: pipe(2.0, 2))
    hub.start(early)
    hub.start(overtaken)
    overtaken.priority = -1
    assert run_all(hub) == [overtaken, early]


def test_an_abort_is_raised_in_place_of_the_next_forward(hub: Hub, pipe: Pipe) -> None:
    doomed, neighbour = Task(lambda: pipe(1.0, 5)), Task(lambda: pipe(1.0, 1))
    hub.start(doomed)
    hub.start(neighbour)
    doomed.abort_requested = True
    assert run_all(hub) == [doomed, neighbour]
    assert isinstance(doomed.error, UnitAborted)
    assert neighbour.result.item() == 5.0
    assert hub.forwards == 3


def test_a_pipeline_that_swallows_exceptions_cannot_swallow_an_abort(hub: Hub, pipe: Pipe) -> None:
    def stubborn() -> Any:
        try:
            return pipe(1.0, 5)
        except Exception:  # noqa: BLE001
            return pipe(1.0, 5)

    task = Task(stubborn)
    hub.start(task)
    task.abort_requested = True
    assert run_all(hub) == [task]
    assert isinstance(task.error, UnitAborted)


def test_an_error_of_a_forward_is_raised_where_the_pipeline_called_it(hub: Hub, pipe: Pipe) -> None:
    def careful() -> str:
        try:
            pipe.components["transformer"](None)
        except TypeError as error:
            return f"caught {error}"
        return "nothing"

    task, failing = Task(careful), Task(lambda: pipe.components["transformer"](None))
    run_all(hub, task, failing)
    assert task.result.startswith("caught unsupported operand")
    assert isinstance(failing.error, TypeError)


def test_a_task_that_needs_no_forward_ends_at_its_start(hub: Hub) -> None:
    task = Task(lambda: "done")
    assert hub.start(task) is task
    assert task.result == "done"
    assert len(hub) == 0


def test_calls_from_outside_a_task_run_directly(hub: Hub, pipe: Pipe) -> None:
    assert pipe(1.0, 1).item() == 5.0
    assert hub.forwards == 0


def test_detach_restores_forwards_and_hooks_that_lived_in_the_instance(pipe: Pipe) -> None:
    hooked = pipe.components["transformer"]
    hook = lambda value: value * 100  # noqa: E731
    hooked.__dict__["forward"] = hook
    before = {name: dict(module.__dict__) for name, module in pipe.components.items() if name != "tokenizer"}
    hub = Hub()
    hub.attach(pipe)
    task = Task(lambda: pipe(1.0, 1))
    run_all(hub, task)
    assert task.result.item() == 201.0, "the hook is still in force below the hub"
    hub.detach()
    assert hooked.__dict__["forward"] is hook
    assert {name: dict(module.__dict__) for name, module in pipe.components.items() if name != "tokenizer"} == before


def test_gradients_stay_off_in_tasks_and_come_back_outside(hub: Hub, pipe: Pipe) -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(torch.is_grad_enabled())
        pipe(1.0, 1)
        seen.append(torch.is_grad_enabled())

    with torch.enable_grad():
        run_all(hub, Task(look), Task(look))
        assert torch.is_grad_enabled()
    assert seen == [False] * 4


def test_a_copied_pipeline_shares_the_hub(hub: Hub, pipe: Pipe) -> None:
    view = copy.copy(pipe)
    task = Task(lambda: view(1.0, 2))
    run_all(hub, task)
    assert (task.result.item(), hub.forwards) == (9.0, 4)


class NarrowVae(torch.nn.Module):
    """Shared by all units, in half precision; `seen` are the dtypes it decoded in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float16))
        self.seen: list[torch.dtype] = []

    def decode(self, value: torch.Tensor) -> torch.Tensor:
        assert value.dtype == self.weight.dtype
        self.seen.append(value.dtype)
        if value == 13:
            raise ArithmeticError("thirteen")
        return value * self.weight


class WideningPipe:
    """Widens its VAE for the decoding and narrows it again, as SDXL does."""

    def __init__(self) -> None:
        self.vae = NarrowVae()
        self.components: dict[str, Any] = {"transformer": Doubler(), "vae": self.vae}

    def __call__(self, value: float, *, wide: bool) -> torch.Tensor:
        latents = self.components["transformer"](torch.tensor(value, dtype=torch.float16))
        if wide:
            self.vae.to(torch.float32)
            latents = latents.float()
        result: torch.Tensor = self.vae.decode(latents)
        if wide:
            self.vae.to(torch.float16)
        return result


def test_a_vae_that_a_unit_widens_for_one_call_is_narrow_again_for_its_neighbours() -> None:
    hub, pipe = Hub(), WideningPipe()
    hub.attach(pipe)
    phases: list[str] = []
    wide = Task(lambda: pipe(1.0, wide=True), on_phase=phases.append)
    narrow, failing = Task(lambda: pipe(2.0, wide=False)), Task(lambda: pipe(6.5, wide=True))
    run_all(hub, wide, narrow, failing)
    assert (wide.result.item(), narrow.result.item()) == (2.0, 4.0)
    assert isinstance(failing.error, ArithmeticError)
    assert pipe.vae.weight.dtype == torch.float16
    assert sorted(map(str, pipe.vae.seen)) == ["torch.float16", "torch.float32", "torch.float32"]
    assert phases == ["step", "decode"]
    assert hub.forwards == 6


def test_an_abort_before_the_decoding_leaves_a_vae_as_it_was() -> None:
    hub, pipe = Hub(), WideningPipe()
    hub.attach(pipe)
    doomed = Task(
        lambda: pipe(1.0, wide=True), on_phase=lambda phase: setattr(doomed, "abort_requested", phase == "decode")
    )
    run_all(hub, doomed)
    after = Task(lambda: pipe(2.0, wide=False))
    run_all(hub, after)
    assert after.result.item() == 4.0
