"""Runs several unmodified pipeline calls on one thread; calls of the same model that fit together share a forward.

Each unit is a `Task`: a greenlet that runs an ordinary pipeline `__call__`. While a hub is attached, the forward of
every model of the pipeline (and `encode`/`decode` of its VAE) is a switch into the hub. `step` takes the most urgent
call that waits longest, lets `merging` run it with all that fit beside it, and resumes their tasks with the results.
Tasks join and leave between any two steps; an abort is thrown into a task in place of its next forward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from triptych.engine.deferral import Deferred
from triptych.engine.merging import Call, Merger, Model, Phase
from triptych.engine.overrides import override_of

__all__ = ["Hub", "Phase", "Task", "UnitAborted"]

_DENOISERS = ("transformer", "unet", "prior", "decoder", "controlnet")


class UnitAborted(BaseException):
    """Thrown into a task that was told to stop; not an `Exception`, so that no pipeline swallows it."""


class Task(greenlet):  # type: ignore[misc]
    """One pipeline call. After it ended, `result` holds its value or `error` what it raised (or `UnitAborted`).

    Lower `priority` runs first, and all higher ones pause meanwhile. `alone`: its forwards are shared with no other
    task. `group`: forwards are shared within a group only, for whatever changes the models (a LoRA); see
    `Hub.before_group`. `pixels`: pixels x frames of one sample, for the hub's bound. `forwards` counts denoising ones.
    """

    def __init__(
        self,
        call: Callable[[], Any],
        *,
        priority: int = 0,
        alone: bool = False,
        group: Hashable = None,
        pixels: int = 1,
        on_phase: Callable[[Phase], None] | None = None,
    ):
        super().__init__()
        self.priority = priority
        self.alone = alone
        self.group = group
        self.pixels = pixels
        self.abort_requested = False
        self.result: Any = None
        self.error: Exception | UnitAborted | None = None
        self._call = call
        self._on_phase = on_phase
        self._held: Call | None = None
        self.forwards = 0
        self._shares = 0

    @property
    def batch_size_mean(self) -> float:
        """Tasks that shared a denoising forward of this one, itself included; mean over its forwards."""
        return self._shares / self.forwards if self.forwards else 1.0

    def count_forward(self, tasks: int) -> None:
        """One more denoising forward, shared by `tasks`."""
        self.forwards += 1
        self._shares += tasks

    def run(self) -> None:
        """Body of the greenlet."""
        try:
            self.result = self._call()
        except (Exception, UnitAborted) as error:  # noqa: BLE001 - handed to the owner of the task
            self.error = error
        finally:
            self._held = None

    def value_of(self, call: Call, *, may_defer: bool) -> Any:
        """Hand a forward to the hub and sleep until its result is there; called inside the task."""
        self.tell(call.model.phase)
        held, self._held = self._held, None
        if held is not None and held.model is call.model and not held.settled:
            self._wait_for(held, call)
        elif may_defer and not self.alone and call.model.override.deferred and call.kwargs.get("return_dict") is False:
            self._held = call
            return (Deferred.of(functools.partial(self._compute, call)),)
        else:
            self._wait_for(call)
        return call.value

    def _compute(self, call: Call) -> torch.Tensor:
        if not call.settled:
            self._wait_for(call)
        (tensor,) = call.value
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def tell(self, phase: Phase) -> None:
        """The unit comes to a model of this phase."""
        if self._on_phase is not None:
            self._on_phase(phase)

    def _wait_for(self, *calls: Call) -> None:
        assert self.parent is not None
        self.parent.switch(calls)
        _raise_error_of(*calls)


def _raise_error_of(*calls: Call) -> None:
    error = next((call.error for call in calls if call.error is not None), None)
    if error is not None:
        for call in calls:
            call.error = None  # no circle through its traceback
        try:
            raise error
        finally:
            del error


class Hub:
    """Owner of the running tasks; every method but `detach` belongs to the device-owning thread.

    With `merging` off each call runs alone, as plain diffusers would run it, to the bit. `max_pixels` bounds samples x
    pixels x frames of a shared forward. `before_group`, if set, is called with the group of the tasks whose forward is
    next, whenever it is another than that of the forward before (at first: than None).
    """

    def __init__(self, *, merging: bool = False, max_pixels: int | None = None) -> None:
        self.phase: Phase | None = None
        self.before_group: Callable[[Hashable], None] | None = None
        self._merging = merging
        self._merger = Merger(max_pixels=max_pixels)
        self._group: Hashable = None
        self._waiting: dict[Task, list[Call]] = {}
        self._replaced: list[tuple[torch.nn.Module, str, Any]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def forwards(self) -> int:
        """Forwards run so far."""
        return self._merger.forwards

    def attach(self, pipe: Any) -> None:
        """Route the models of `pipe` through this hub; calls from outside a task still run directly."""
        for name, module in pipe.components.items():
            if not isinstance(module, torch.nn.Module):
                continue
            if name.startswith(_DENOISERS):
                self._replace(module, name, "forward", "step")
            elif hasattr(module, "decode"):
                home = _dtype_of(module)
                self._replace(module, name, "decode", "decode", home=home)
                if hasattr(module, "encode"):
                    self._replace(module, name, "encode", "encode", home=home)
            else:
                self._replace(module, name, "forward", "decode" if name == "safety_checker" else "encode")

    def detach(self) -> None:
        """Put back what `attach` replaced."""
        while self._replaced:
            module, method, previous = self._replaced.pop()
            if previous is None:
                module.__dict__.pop(method, None)
            else:
                module.__dict__[method] = previous

    def _replace(
        self, module: torch.nn.Module, name: str, method: str, phase: Phase, *, home: torch.dtype | None = None
    ) -> None:
        forward = getattr(module, method)
        model = Model(f"{name}.{method}", phase, forward, inspect.signature(forward), override_of(type(module)))

        @functools.wraps(forward)
        def switch(*args: Any, **kwargs: Any) -> Any:
            current = getcurrent()
            if not isinstance(current, Task):
                return forward(*args, **kwargs)
            call = Call(model, args, kwargs, current)
            # Some pipelines widen their VAE for one call. All units share it, so nothing may come in between: no
            # other's call, and no abort, after which it would stay so.
            if home is not None and _dtype_of(module) != home:
                return self._value_at_once(call, module, home)
            return current.value_of(call, may_defer=self._merging)

        # A hook (offload, cache, context parallelism) may already live in the instance: `detach` restores it.
        self._replaced.append((module, method, module.__dict__.get(method)))
        module.__dict__[method] = switch

    def _value_at_once(self, call: Call, module: torch.nn.Module, home: torch.dtype) -> Any:
        """Run a call while its task holds the thread; if it fails, bring its module back to the dtype `home`."""
        call.task.tell(call.model.phase)
        self.phase = call.model.phase
        self._run([call], call.task.group)
        if call.error is not None:
            module.to(home)
        _raise_error_of(call)
        return call.value

    # Grad mode belongs to the thread, and tasks enter and leave `no_grad` interleaved: all of them run under it.
    @torch.no_grad()
    def start(self, task: Task) -> Task | None:
        """Run a new task up to its first forward; returns it if it ended before."""
        task.parent = getcurrent()
        return self._resumed(task, task.switch())

    @torch.no_grad()
    def step(self) -> list[Task]:
        """Run one forward and resume its tasks, or only throw out aborted ones; returns the tasks that ended."""
        aborted = [task for task in self._waiting if task.abort_requested]
        if aborted:
            return self._ended(aborted, lambda task: task.throw(UnitAborted()))
        if not self._waiting:
            return []
        calls = self._choose()
        self.phase = calls[0].model.phase
        tasks = list(dict.fromkeys(call.task for call in calls))
        merged = self._run(calls, tasks[0].group)
        if self.phase == "step":
            for task in tasks:
                task.count_forward(len(tasks) if merged else 1)
        ready = [task for task in tasks if all(call.settled for call in self._waiting[task])]
        return self._ended(ready, lambda task: task.switch())

    def _choose(self) -> list[Call]:
        """The most urgent call, longest waiting first, and those of equal urgency that share its forward."""
        urgent = min(task.priority for task in self._waiting)
        calls = [
            call
            for task, waiting in self._waiting.items()
            if task.priority == urgent
            for call in waiting
            if not call.settled
        ]
        return self._merger.companions(calls[0], calls[1:]) if self._merging else calls[:1]

    def _run(self, calls: list[Call], group: Hashable) -> bool:
        """Settle the calls; returns whether they shared one forward."""
        if self.before_group is not None and group != self._group:
            try:
                self.before_group(group)
            except Exception as error:  # noqa: BLE001 - raised where the pipelines called the model
                self._group = object()  # half-way: whichever comes next is to be entered anew
                for call in calls:
                    call.settle(error=error)
                return False
            self._group = group
        return self._merger.run(calls)

    def _ended(self, tasks: list[Task], resume: Callable[[Task], tuple[Call, ...] | None]) -> list[Task]:
        for task in tasks:
            del self._waiting[task]
        return [ended for task in tasks if (ended := self._resumed(task, resume(task))) is not None]

    def _resumed(self, task: Task, calls: tuple[Call, ...] | None) -> Task | None:
        if not task.dead:
            assert calls is not None
            self._waiting[task] = list(calls)
            return None
        if not self._waiting:
            self.phase = None
        return task


def _dtype_of(module: torch.nn.Module) -> torch.dtype | None:
    return next((weights.dtype for weights in module.parameters()), None)
