"""How long a unit will take: what `eta_s`, `retry-after`, the `least_work` policy and watchdogs ask.

Units that ended are observed, amounts of work are estimated. Each amount seen before has a robust mean of its own, so
nothing is assumed about how time grows with size; amounts never seen are scaled from the nearest one that was.
"""

from __future__ import annotations

import math
from typing import Protocol

from triptych.orchestrator.robust_mean import RobustMean
from triptych.orchestrator.work import Scaling, Work

__all__ = ["CostModel", "Estimator"]

MAX_AMOUNTS = 64
_REFIT_EVERY = 16


class Estimator(Protocol):
    """Learns times from units that ended; one per served model."""

    def observe(self, work: Work, service_s: float, step_s: float | None = None) -> None:
        """A unit of this much work held its slot so many seconds; one of its denoising steps took `step_s`."""

    def estimate_s(self, work: Work) -> float | None:
        """Expected seconds in a slot; None while nothing is known."""

    def step_s(self, work: Work) -> float | None:
        """Expected seconds of one denoising step; None while nothing is known."""


class CostModel:
    """The estimator: a table of robust means by amount of work, see `Times`."""

    def __init__(self) -> None:
        self._service = Times()
        self._step = Times()

    def observe(self, work: Work, service_s: float, step_s: float | None = None) -> None:
        """Fold in what one unit took. Times of zero say nothing and are passed over."""
        if service_s > 0:
            self._service.observe(work, service_s)
        if step_s is not None and step_s > 0:
            self._step.observe(work._replace(steps=1), step_s)

    def estimate_s(self, work: Work) -> float | None:
        """Expected seconds in a slot, or None before the first unit ended."""
        return self._service.expected(work)

    def step_s(self, work: Work) -> float | None:
        """Expected seconds of one step; while no step was measured, the service time shared out over the steps."""
        step_s = self._step.expected(work._replace(steps=1))
        if step_s is not None:
            return step_s
        service_s = self._service.expected(work)
        return None if service_s is None else service_s / work.steps


class Times:
    """Seconds by amount of work; at most `MAX_AMOUNTS` are kept, the one unseen for longest is forgotten first.

    An unknown amount is estimated by a fit over the known ones (see `Scaling`), corrected by how far the fit is off
    at the nearest of them. Fit and such guesses are kept for some observations, so a long queue is cheap to look over.
    """

    def __init__(self) -> None:
        self._known: dict[Work, RobustMean] = {}
        self._guesses: dict[Work, float] = {}
        self._scaling: Scaling | None = None
        self._since_fit = 0

    def observe(self, work: Work, seconds: float) -> None:
        """Fold in one measurement, more than zero seconds."""
        mean = self._known.pop(work, None)
        if mean is None:
            mean = RobustMean(seconds)
            if len(self._known) < _REFIT_EVERY:
                self._scaling = None
            if len(self._known) >= MAX_AMOUNTS:
                del self._known[next(iter(self._known))]
        else:
            mean.add(seconds)
        self._known[work] = mean
        self._since_fit += 1
        if self._since_fit >= _REFIT_EVERY:
            self._scaling = None

    def expected(self, work: Work) -> float | None:
        """Expected seconds, or None while no amount is known."""
        mean = self._known.get(work)
        if mean is not None:
            return mean.value
        return self._guess(work) if self._known else None

    def _guess(self, work: Work) -> float:
        if self._scaling is None:
            self._scaling = Scaling([(known, mean.value) for known, mean in self._known.items()])
            self._since_fit = 0
            self._guesses.clear()
        guess = self._guesses.get(work)
        if guess is None:
            scaled = self._scaling.seconds(work)
            nearest = min(self._known, key=lambda known: abs(math.log(self._scaled(known) / scaled)))
            guess = self._guesses[work] = scaled * self._known[nearest].value / self._scaled(nearest)
            if len(self._guesses) > MAX_AMOUNTS:
                del self._guesses[next(iter(self._guesses))]
        return guess

    def _scaled(self, work: Work) -> float:
        assert self._scaling is not None
        return self._scaling.seconds(work)
