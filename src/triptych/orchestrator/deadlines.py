"""When to look at a request again: its deadline, and the end of its patience while no replica lives.

A heap of moments. An entry is not removed when its request ends; stale ones are skipped at the head, and the heap is
rebuilt when they outnumber the rest, so it stays in proportion to the live requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from triptych.orchestrator.units import Request

__all__ = ["Deadlines"]

_Entry = tuple[float, int, Request, int]

_SLACK = 64


class Deadlines:
    """Moments (clock seconds) with a request and an outage number, 0 for the request's own deadline.

    `is_current(moment, request, outage)` tells whether an entry still means something.
    """

    def __init__(self, is_current: Callable[[float, Request, int], bool]) -> None:
        self._is_current = is_current
        self._heap: list[_Entry] = []
        self._serial = count()
        self._rebuild_at = _SLACK

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, moment: float, request: Request, outage: int = 0) -> None:
        """Remember a moment."""
        heapq.heappush(self._heap, (moment, next(self._serial), request, outage))
        if len(self._heap) > self._rebuild_at:
            self._heap = [entry for entry in self._heap if self._is_current(entry[0], entry[2], entry[3])]
            heapq.heapify(self._heap)
            self._rebuild_at = 2 * len(self._heap) + _SLACK

    def first(self) -> float | None:
        """The earliest moment that still means something."""
        heap = self._heap
        while heap:
            moment, _, request, outage = heap[0]
            if self._is_current(moment, request, outage):
                return moment
            heapq.heappop(heap)
        return None

    def pop_due(self, now: float) -> tuple[Request, int] | None:
        """Take one moment that has come; None when there is none."""
        moment = self.first()
        if moment is None or moment > now:
            return None
        _, _, request, outage = heapq.heappop(self._heap)
        return request, outage
