"""A pipeline under a merging hub, driven step by step: what the tests of merged forwards compare with solo runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import DiffusionPipeline

from triptych.engine.hub import Hub, Task, UnitAborted
from triptych.engine.pipeline_modes import Mode
from triptych.engine.pipeline_view import ViewFactory

Arguments = Mapping[str, Any]


class HubRun:
    """One loaded pipeline; units are keyword arguments with `seed`, and those that its call does not take are left out.

    `scheduler` in a unit is another one, `mode` a sibling of the pipeline that takes pictures.
    """

    def __init__(self, pipe: Path | Any, **fixed: Any) -> None:
        self.pipe: Any = DiffusionPipeline.from_pretrained(pipe) if isinstance(pipe, Path) else pipe
        self.pipe.set_progress_bar_config(disable=True)
        self.hub = Hub(merging=True)
        self.hub.attach(self.pipe)
        self._views = ViewFactory(self.pipe)
        self._alone: dict[str, tuple[Arguments, npt.NDArray[np.float32]]] = {}
        self._fixed = {"output_type": "np" if getattr(self.pipe, "vae", None) is None else "pt"} | fixed

    def task(self, unit: Arguments, **options: Any) -> Task:
        """The unit, ready to start."""
        arguments = dict(unit)
        mode: Mode | None = arguments.pop("mode", None)
        view = (mode.views if mode else self._views).view(lambda scheduler: None)
        if (scheduler := arguments.pop("scheduler", None)) is not None:
            object.__setattr__(view, "scheduler", scheduler.from_config(self.pipe.scheduler.config))
        arguments["generator"] = torch.Generator("cpu").manual_seed(arguments.pop("seed"))
        taken = inspect.signature(type(view).__call__).parameters
        named = {name: value for name, value in (self._fixed | arguments).items() if name in taken}
        return Task(functools.partial(view, **named), **options)

    def solo(self, units: Sequence[Arguments]) -> list[npt.NDArray[np.float32]]:
        """Each unit by itself, every forward of its own: what plain diffusers makes, to the bit. Made once."""
        for unit in units:
            if repr(unit) not in self._alone:
                task = self.task(unit, alone=True)
                self.drive([task])
                self._alone[repr(unit)] = (unit, pixels(task))  # pictures are told apart by their addresses
        return [self._alone[repr(unit)][1] for unit in units]

    def drive(
        self, tasks: Sequence[Task], *, joins: Mapping[int, int] | None = None, aborts: Mapping[int, int] | None = None
    ) -> None:
        """Run all to their ends. Task i joins before hub step `joins[i]` and is told to stop at `aborts[i]`."""
        joins, aborts, step = joins or {}, aborts or {}, 0
        waiting = dict(enumerate(tasks))
        while waiting or len(self.hub):
            for number in [number for number in waiting if joins.get(number, 0) <= step]:
                self.hub.start(waiting.pop(number))
            for number, at in aborts.items():
                if at == step:
                    tasks[number].abort_requested = True
            self.hub.step()
            step += 1


def pixels(task: Task) -> npt.NDArray[np.float32]:
    """What a task made, in 0..1; fails the test if it made nothing."""
    assert not isinstance(task.error, UnitAborted)
    if task.error is not None:
        raise task.error
    made = task.result.frames if hasattr(task.result, "frames") else task.result.images
    return np.asarray(made[0], dtype=np.float32)


def difference(made: Sequence[npt.NDArray[np.float32]], wanted: Sequence[npt.NDArray[np.float32]]) -> float:
    """Largest difference of any pixel, of a range of 1."""
    return max(float(np.abs(one - other).max()) for one, other in zip(made, wanted, strict=True))
