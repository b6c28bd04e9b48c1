"""How long waiting and running units will still take, from the estimator; computed when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.orchestrator.cost import Estimator, retry_after_s
from triptych.orchestrator.dispatcher import Dispatcher
from triptych.orchestrator.events import UnitState
from triptych.orchestrator.units import Unit

__all__ = ["Backlog", "Forecast"]

REFRESH_S = 0.25


@dataclass(frozen=True, slots=True)
class Forecast:
    """`positions`: units ahead of each waiting unit; `etas_s`: seconds to each unit's end if known; `work_s`: sum."""

    positions: dict[Unit, int]
    etas_s: dict[Unit, float]
    work_s: float


class Backlog:
    """Looks over everything that waits or runs."""

    def __init__(self, dispatcher: Dispatcher, estimator: Estimator) -> None:
        self._dispatcher = dispatcher
        self._estimator = estimator
        self._retry_after: tuple[float, float] | None = None

    def forecast(self, now: float) -> Forecast:
        """Positions and expected ends, as if units shared all slots evenly in queue order."""
        pool, queue = self._dispatcher.pool, self._dispatcher.queue
        etas_s: dict[Unit, float] = {}
        work_s = 0.0
        for replica in pool.by_id.values():
            for unit in replica.units.values():
                remaining_s = self._remaining_s(unit, now)
                if remaining_s is not None:
                    etas_s[unit] = remaining_s
                    work_s += remaining_s
        positions: dict[Unit, int] = {}
        slots = pool.slots
        for position, unit in enumerate(queue):
            positions[unit] = position
            own_s = self._estimator.estimate_s(unit.request.spec.params)
            if own_s is None:
                continue
            if slots:
                etas_s[unit] = work_s / slots + own_s
            work_s += own_s
        return Forecast(positions, etas_s, work_s)

    def retry_after_s(self, now: float) -> float:
        """Seconds worth telling a client that finds the queue full; looked up anew a few times a second at most."""
        if self._retry_after is None or now - self._retry_after[0] > REFRESH_S:
            wait_s = retry_after_s(self.forecast(now).work_s, self._dispatcher.pool.slots)
            self._retry_after = (now, wait_s)
        return self._retry_after[1]

    def _remaining_s(self, unit: Unit, now: float) -> float | None:
        if unit.state is not UnitState.RUNNING:
            return None
        elapsed_s = now - unit.dispatched_at_s
        if unit.step and unit.steps:
            return elapsed_s / unit.step * max(0, unit.steps - unit.step)
        whole_s = self._estimator.estimate_s(unit.request.spec.params)
        return None if whole_s is None else max(0.0, whole_s - elapsed_s)
