"""How long waiting and running units will still take, from the estimator; computed when somebody asks.

The queue is rehearsed: a copy of it is emptied in its own order into the slots of the live replicas, each of which is
free when what runs there is expected to end. So positions, ends and departures come from the code that dispatches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from triptych.orchestrator.cost import Estimator
from triptych.orchestrator.dispatcher import Dispatcher
from triptych.orchestrator.events import UnitState
from triptych.orchestrator.replica_state import Replica
from triptych.orchestrator.units import Unit

__all__ = ["Backlog", "Forecast", "Rehearsal"]

_first = itemgetter(0)

_REFRESH_S = 0.25

_OVERDUE = 0.05
"""What a unit that outlives its estimate is expected to need still, as a part of the time it has run."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """`positions`: units ahead of each waiting unit; `etas_s`: seconds to each unit's end if known."""

    positions: dict[Unit, int]
    etas_s: dict[Unit, float]


class Backlog:
    """Looks over everything that waits or runs. A unit that must run alone counts as any other."""

    def __init__(self, dispatcher: Dispatcher, estimator: Estimator) -> None:
        self.dispatcher = dispatcher
        self.estimator = estimator
        self._recent: tuple[float, int, Forecast] | None = None

    def recent_forecast(self, now: float) -> Forecast:
        """Like `forecast`, but what runs may be seen as it was a moment ago: for whoever asks again and again."""
        version = self.dispatcher.queue.version
        if self._recent is None or self._recent[0] < now - _REFRESH_S or self._recent[1] != version:
            self._recent = (now, version, self.forecast(now))
        return self._recent[2]

    def forecast(self, now: float) -> Forecast:
        """Positions and expected ends of everything, if nothing else arrives."""
        etas_s: dict[Unit, float] = {}
        for replica in self.dispatcher.pool.by_id.values():
            for unit in replica.units.values():
                remaining_s = self.remaining_s(unit, now)
                if remaining_s is not None:
                    etas_s[unit] = remaining_s
        positions: dict[Unit, int] = {}
        for position, (unit, starts_s, own_s) in enumerate(Rehearsal(self, now)):
            positions[unit] = position
            if starts_s is not None and own_s is not None:
                etas_s[unit] = starts_s + own_s - now
        return Forecast(positions, etas_s)

    def remaining_s(self, unit: Unit, now: float) -> float | None:
        """Expected seconds until the unit ends: from its own pace once it steps, else from the estimator."""
        if unit.state is not UnitState.RUNNING:
            return None
        if 0 < unit.step < unit.steps:
            pace_s = (unit.progressed_at_s - unit.dispatched_at_s) / unit.step
            return max(0.0, pace_s * (unit.steps - unit.step) - (now - unit.progressed_at_s))
        elapsed_s = now - unit.dispatched_at_s
        whole_s = unit.expected_s
        if whole_s is None:
            whole_s = self.estimator.estimate_s(unit.request.work)
        return None if whole_s is None else max(whole_s - elapsed_s, _OVERDUE * elapsed_s)

    def expected_by_pace_s(self) -> float | None:
        """Mean seconds that running units will have taken, by their own steps: all there is before any has ended."""
        running = (unit for replica in self.dispatcher.pool.accepting for unit in replica.units.values())
        wholes_s = [(u.progressed_at_s - u.dispatched_at_s) / u.step * u.steps for u in running if u.step]
        return sum(wholes_s) / len(wholes_s) if wholes_s else None

    def free_at_s(self, replica: Replica, now: float) -> list[float]:
        """When each slot of a replica can take a unit. An aborted unit leaves at once; one of unknown length is
        taken to be half done."""
        ends = []
        for unit in replica.units.values():
            remaining_s = self.remaining_s(unit, now)
            if remaining_s is None:
                remaining_s = now - unit.dispatched_at_s if unit.state is UnitState.RUNNING else 0.0
            ends.append(now + remaining_s)
        if replica.exclusive:
            return ends * replica.slots
        return ends + [now] * replica.free_slots


class Rehearsal:
    """Iterator over (waiting unit, when it starts, its expected seconds), in queue order; None where unknown.

    Units of unknown length are taken to need no time.
    """

    def __init__(self, backlog: Backlog, now: float) -> None:
        pool = backlog.dispatcher.pool
        self._backlog = backlog
        self._queue = backlog.dispatcher.queue.copy()
        self._slots = {replica.id: sorted(backlog.free_at_s(replica, now)) for replica in pool.accepting}
        self._fallback_s = backlog.expected_by_pace_s()
        self._known = 0  # units of known length so far, and their lengths together
        self._known_s = 0.0
        self._now = now

    def __iter__(self) -> Iterator[tuple[Unit, float | None, float | None]]:
        return self

    def __next__(self) -> tuple[Unit, float | None, float | None]:
        unit = self._queue.first()
        if unit is None:
            raise StopIteration
        own_s = self._backlog.estimator.estimate_s(unit.request.work)
        if own_s is None:
            own_s = self._fallback_s
        if own_s is not None:
            self._known += 1
            self._known_s += own_s
        starts_s = self.occupy(own_s or 0.0, lane=unit.lane)
        self._queue.take(unit, self._now if starts_s is None else starts_s)
        return unit, starts_s, own_s

    def occupy(self, seconds: float, *, lane: int) -> float | None:
        """Fill the slot that is free first, of one replica or of any; None without slots."""
        if not self._slots:
            return None
        slots = self._slots.get(lane) or min(self._slots.values(), key=_first)
        starts_s = slots[0]
        heapq.heapreplace(slots, starts_s + seconds)
        return starts_s

    def mean_s(self) -> float:
        """Expected seconds of a unit like those seen so far; 0 when unknown."""
        return self._known_s / self._known if self._known else 0.0
