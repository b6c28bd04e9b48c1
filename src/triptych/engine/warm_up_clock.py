"""Times of the small picture that a replica makes before it is ready, taken at the steps of its scheduler.

They go to the server beside the model's description, where they tell the watchdog how long a first step may take.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from triptych.messages import WarmUp

__all__ = ["WarmUpClock"]


class WarmUpClock:
    """Started where the picture is; give `on_step` to its view."""

    def __init__(self, *, device_kind: str) -> None:
        self._cuda = device_kind == "cuda"
        self._moments_s = [time.monotonic()]

    def on_step(self, scheduler: Any) -> None:
        """A step is done."""
        if self._cuda:
            torch.cuda.synchronize()  # a step has only been asked for when its scheduler returns
        self._moments_s.append(time.monotonic())

    def measured(self, work: int) -> WarmUp | None:
        """The picture of so many pixels times frames is made; None if no two steps were seen."""
        moments_s, ended_s = self._moments_s, time.monotonic()
        if len(moments_s) < 3:
            return None
        return WarmUp(
            work=float(work),
            seconds=ended_s - moments_s[0],
            step_s=moments_s[-1] - moments_s[-2],
            decode_s=ended_s - moments_s[-1],
        )
