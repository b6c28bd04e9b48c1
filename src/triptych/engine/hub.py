"""Runs several unmodified pipeline calls on one thread, one forward at a time.

Each unit is a `Task`: a greenlet that runs an ordinary pipeline `__call__`. While a hub is attached, the forward of
every model of the pipeline (and `encode`/`decode` of its VAE) is a switch into the hub, which chooses whose call runs
next, runs it, and resumes that task with the result. An abort is thrown into the task in place of its next forward.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from greenlet import getcurrent, greenlet

__all__ = ["Hub", "Phase", "Task", "UnitAborted"]

Phase = Literal["encode", "step", "decode"]

_DENOISERS = ("transformer", "unet", "prior", "decoder", "controlnet")


class UnitAborted(BaseException):
    """Thrown into a task that was told to stop; not an `Exception`, so that no pipeline swallows it."""


@dataclass(slots=True)
class _Call:
    """A forward that a task waits for."""

    phase: Phase
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Task(greenlet):  # type: ignore[misc]
    """One pipeline call. After it ended, `result` holds its value or `error` what it raised (or `UnitAborted`)."""

    def __init__(self, call: Callable[[], Any], *, priority: int = 0, on_phase: Callable[[Phase], None] | None = None):
        super().__init__()
        self.priority = priority
        self.abort_requested = False
        self.result: Any = None
        self.error: Exception | UnitAborted | None = None
        self._call = call
        self._on_phase = on_phase
        self._pending: _Call | None = None

    def run(self) -> None:
        """Body of the greenlet."""
        try:
            self.result = self._call()
        except (Exception, UnitAborted) as error:  # noqa: BLE001 - handed to the owner of the task
            self.error = error

    def wait_for(self, call: _Call) -> Any:
        """Hand a forward to the hub and sleep until its result is there; called inside the task."""
        if self._on_phase is not None:
            self._on_phase(call.phase)
        assert self.parent is not None
        return self.parent.switch(call)


class Hub:
    """Owner of the running tasks; every method but `detach` belongs to the device-owning thread."""

    def __init__(self) -> None:
        self.forwards = 0
        self.phase: Phase | None = None
        self._waiting: deque[Task] = deque()
        self._replaced: list[tuple[torch.nn.Module, str, Any]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def attach(self, pipe: Any) -> None:
        """Route the models of `pipe` through this hub; calls from outside a task still run directly."""
        for name, module in pipe.components.items():
            if not isinstance(module, torch.nn.Module):
                continue
            if name.startswith(_DENOISERS):
                self._replace(module, "forward", "step")
            elif hasattr(module, "decode"):
                self._replace(module, "decode", "decode")
                if hasattr(module, "encode"):
                    self._replace(module, "encode", "encode")
            else:
                self._replace(module, "forward", "decode" if name == "safety_checker" else "encode")

    def detach(self) -> None:
        """Put back what `attach` replaced."""
        while self._replaced:
            module, name, previous = self._replaced.pop()
            if previous is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = previous

    def _replace(self, module: torch.nn.Module, name: str, phase: Phase) -> None:
        forward = getattr(module, name)

        @functools.wraps(forward)
        def switch(*args: Any, **kwargs: Any) -> Any:
            current = getcurrent()
            if isinstance(current, Task):
                return current.wait_for(_Call(phase, forward, args, kwargs))
            return forward(*args, **kwargs)

        # A hook (offload, cache, context parallelism) may already live in the instance: `detach` restores it.
        self._replaced.append((module, name, module.__dict__.get(name)))
        module.__dict__[name] = switch

    # Grad mode belongs to the thread, and tasks enter and leave `no_grad` interleaved: all of them run under it.
    @torch.no_grad()
    def start(self, task: Task) -> Task | None:
        """Run a new task up to its first forward; returns it if it ended before."""
        task.parent = getcurrent()
        return self._settle(task, task.switch())

    @torch.no_grad()
    def step(self) -> Task | None:
        """Run the forward of one waiting task and resume it; returns the task if it ended."""
        task = self._choose()
        call, task._pending = task._pending, None
        assert call is not None
        if task.abort_requested:
            return self._settle(task, task.throw(UnitAborted()))
        self.phase = call.phase
        try:
            value = call.forward(*call.args, **call.kwargs)
        except Exception as error:  # noqa: BLE001 - raised where the pipeline called the model
            del call
            return self._settle(task, task.throw(error))
        finally:
            self.forwards += 1
        del call
        return self._settle(task, task.switch(value))

    def _choose(self) -> Task:
        """Most urgent task, longest waiting first. Each call runs alone: calls that fit together are grouped here."""
        task = min(self._waiting, key=lambda waiting: waiting.priority)
        self._waiting.remove(task)
        return task

    def _settle(self, task: Task, call: _Call | None) -> Task | None:
        if task.dead:
            if not self._waiting:
                self.phase = None
            return task
        task._pending = call
        self._waiting.append(task)
        return None
