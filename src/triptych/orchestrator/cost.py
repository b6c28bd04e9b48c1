"""How long a unit will take: the hook behind `eta_s`, `retry-after` and cost-aware routing.

Outputs are observed, parameters are estimated. The first implementation knows only a running mean.
"""

from __future__ import annotations

from typing import Protocol

from triptych.messages import SamplingParams

__all__ = ["Estimator", "RunningMean", "retry_after_s"]

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class Estimator(Protocol):
    """Learns service times from outputs."""

    def observe(self, params: SamplingParams, inference_s: float) -> None:
        """One unit with these parameters took so many seconds in its replica."""

    def estimate_s(self, params: SamplingParams) -> float | None:
        """Expected seconds in a replica; None while nothing is known."""


class RunningMean:
    """Mean over all units, whatever their parameters; after `window` units older ones fade exponentially."""

    def __init__(self, *, window: int = 64) -> None:
        self._window = window
        self._count = 0
        self._mean_s = 0.0

    def observe(self, params: SamplingParams, inference_s: float) -> None:
        """Fold one service time into the mean."""
        self._count = min(self._count + 1, self._window)
        self._mean_s += (inference_s - self._mean_s) / self._count

    def estimate_s(self, params: SamplingParams) -> float | None:
        """The mean, or None before the first output."""
        return self._mean_s if self._count else None


def retry_after_s(work_s: float, slots: int) -> float:
    """Wait worth telling a client when `work_s` seconds of work lie before `slots` slots; within 1..60 s."""
    if slots == 0:
        return MAX_RETRY_AFTER_S
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, work_s / slots))
