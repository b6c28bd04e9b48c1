"""Progress of one unit: counts steps of its own scheduler and tells at most twenty times a second.

Steps are shown as the caller counts them: `num_inference_steps`, although a second-order scheduler calls the model
almost twice as often and image-to-image runs only a part of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from triptych.engine.base import Emit
from triptych.engine.denoised import SchedulerStep
from triptych.engine.hub import Phase
from triptych.messages import Address, Progress

__all__ = ["ProgressReporter"]

_INTERVAL_S = 0.05


class ProgressReporter:
    """Emits `Progress`: always the first, every change of phase and the last step, the others throttled."""

    def __init__(self, address: Address, emit: Emit, *, steps: int, clock: Callable[[], float] = time.monotonic):
        self.step = 0
        self.steps = steps
        self.pipe: Any = None
        self._address = address
        self._emit = emit
        self._clock = clock
        self._phase: Phase | None = None
        self._calls = 0
        self._sent_at_s = 0.0

    def on_phase(self, phase: Phase) -> None:
        """The unit waits for a model of this phase; one that encodes again between steps still steps."""
        if phase == self._phase or (phase == "encode" and self.step):
            return
        self._phase = phase
        self._send()

    def on_step(self, made: SchedulerStep) -> None:
        """The unit's scheduler has made one step."""
        scheduler = made.scheduler
        self._calls += 1
        total = getattr(self.pipe, "_num_timesteps", None) or len(scheduler.timesteps)
        steps = math.ceil(total / getattr(scheduler, "order", 1))
        self.steps = min(steps, getattr(scheduler, "num_inference_steps", None) or steps)
        self.step = max(self.step, min(self.steps, self._calls * self.steps // total))
        if self.step == self.steps or self._clock() - self._sent_at_s >= _INTERVAL_S:
            self._send()

    def _send(self) -> None:
        self._sent_at_s = self._clock()
        self._emit(Progress(self._address, self.step, self.steps, self._phase or "encode"), ())
