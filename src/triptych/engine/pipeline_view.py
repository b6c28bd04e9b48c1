"""Per-unit shallow view of a loaded pipeline: shared models, private state and schedulers.

Everything a pipeline call writes on `self` lands on the view; its schedulers are deep copies that report each step, and
so are guiders, which count steps, too. Making one costs 0.1 to 0.3 ms.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from diffusers.guiders import BaseGuidance
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from triptych.engine.denoised import SchedulerStep

__all__ = ["OnStep", "ViewFactory"]

OnStep = Callable[[SchedulerStep], None]


class _StepListener:
    """Called after each step of one scheduler; copies that a pipeline makes of it (sound tracks) are silent."""

    def __init__(self, on_step: OnStep) -> None:
        self.on_step: OnStep | None = on_step

    def __deepcopy__(self, memo: dict[int, Any]) -> _StepListener:
        silent = _StepListener.__new__(_StepListener)
        silent.on_step = None
        return silent


class ViewFactory:
    """Makes views of one pipeline."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._schedulers = {
            name: scheduler
            for name, scheduler in pipe.components.items()
            if isinstance(scheduler, SchedulerMixin) or hasattr(scheduler, "set_timesteps")
        }
        self._guiders = {
            name: component for name, component in pipe.components.items() if isinstance(component, BaseGuidance)
        }
        self._reporting = {type(scheduler): _reporting(type(scheduler)) for scheduler in self._schedulers.values()}

    def view(self, on_step: OnStep) -> Any:
        """A view whose schedulers call `on_step` after each step."""
        view = copy.copy(self._pipe)
        for name, shared in self._schedulers.items():
            scheduler = copy.deepcopy(shared)
            scheduler.__class__ = self._reporting[type(shared)]
            scheduler._triptych_listener = _StepListener(on_step)
            # The pipeline's own __setattr__ would register the copy in the configuration that all views share.
            object.__setattr__(view, name, scheduler)
        for name, shared in self._guiders.items():
            object.__setattr__(view, name, copy.deepcopy(shared))
        return view


def _reporting(scheduler_class: type[Any]) -> type[Any]:
    """Subclass of the same name whose `step` tells the listener; pipelines may still inspect its signature."""

    @functools.wraps(scheduler_class.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = scheduler_class.step(self, *args, **kwargs)
        on_step = self._triptych_listener.on_step
        if on_step is not None:
            on_step(SchedulerStep(self, args, kwargs, result))
        return result

    return type(scheduler_class.__name__, (scheduler_class,), {"step": step, "__module__": scheduler_class.__module__})
