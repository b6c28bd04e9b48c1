"""Whether there is room for a request, and when a refused one is worth sending again.

Room is bounded twice: units that wait, and bytes of input pictures, which a request holds until its end.
The advice counts departures: a refused request fits once enough units have left the queue for its own. Places are
handed out once: whoever was refused before and is still to come back counts as if it waited, so that three hundred
clients refused at once are told three hundred different moments instead of one.
"""

from __future__ import annotations

import heapq
import math

from triptych.errors import ErrorCode, TriptychError
from triptych.orchestrator.forecast import Backlog, Rehearsal
from triptych.orchestrator.queue import ANY
from triptych.orchestrator.units import Request

__all__ = ["COME_BACK_S", "MAX_INPUT_BYTES", "Admission"]

COME_BACK_S = 5.0
"""`retry-after` while no replica takes work: one restarts within seconds."""
MAX_INPUT_BYTES = 1024**3
"""What decoded input pictures of all requests together take in memory, unless said otherwise."""
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0

_REFRESH_S = 0.25


class Admission:
    """The bounds of the queue, in units, and of input pictures, in bytes; all of a request or nothing of it."""

    def __init__(self, backlog: Backlog, max_queue_size: int, max_input_bytes: int) -> None:
        self._backlog = backlog
        self._max_queue_size = max_queue_size
        self._max_input_bytes = max_input_bytes
        self._input_bytes = 0
        self._departures: _Departures | None = None
        self._promises: list[tuple[float, int]] = []  # heap of (when refused units may come back, how many)
        self._promised = 0

    def check(self, request: Request, now: float) -> None:
        """Raise `queue_full` with a time worth waiting; units that would start at once need no room in the queue."""
        self._check_units(request, now)
        self._check_inputs(request, now)

    def hold(self, request: Request) -> None:
        """An accepted request holds its input pictures."""
        self._input_bytes += request.input_bytes

    def let_go(self, request: Request) -> None:
        """It is about to end."""
        self._input_bytes -= request.input_bytes

    def _check_units(self, request: Request, now: float) -> None:
        dispatcher, limit, n = self._backlog.dispatcher, self._max_queue_size, len(request.units)
        waiting = len(dispatcher.queue)
        if waiting + n <= limit or waiting + n - dispatcher.startable(request.units) <= limit:
            return
        text = f"the queue is full: {waiting} units wait, the limit is {limit}, the request has {n}"
        most = limit + sum(replica.slots for replica in dispatcher.pool.by_id.values())
        if n > most:
            text = f"the request has {n} units; the queue holds {limit}, so at most {most} at once could ever start"
            raise TriptychError(ErrorCode.QUEUE_FULL, text, param="n", should_retry=False)
        wait_s = self._wait_s(max(1, waiting + n - limit), n, now)
        raise TriptychError(ErrorCode.QUEUE_FULL, text, retry_after_s=wait_s)

    def _check_inputs(self, request: Request, now: float) -> None:
        """A request that nobody shares the room with is accepted, however large its pictures are."""
        held, limit, own = self._input_bytes, self._max_input_bytes, request.input_bytes
        if not own or not held or held + own <= limit:
            return
        text = (
            f"input pictures of other requests take {held} bytes, the limit is {limit} bytes, "
            f"those of this request take {own} bytes"
        )
        dispatcher = self._backlog.dispatcher
        units = len(dispatcher.queue) + sum(replica.in_flight for replica in dispatcher.pool.by_id.values())
        leaving = math.ceil((held + own - limit) * units / held)  # as if all of them held as much
        wait_s = self._wait_s(max(1, leaving), len(request.units), now)
        raise TriptychError(ErrorCode.QUEUE_FULL, text, retry_after_s=wait_s)

    def _wait_s(self, leaving: int, n: int, now: float) -> float:
        """Whole seconds, as HTTP tells them, until `leaving` units have left the queue and n more can enter."""
        while self._promises and self._promises[0][0] <= now:
            self._promised -= heapq.heappop(self._promises)[1]
        departures = self._departures
        if departures is None or departures.made_s < now - _REFRESH_S:
            departures = self._departures = _Departures(self._backlog, now)
        departs_s = departures.when(leaving + self._promised)
        if departs_s is None:
            return COME_BACK_S
        if departs_s - now > MAX_RETRY_AFTER_S:
            return MAX_RETRY_AFTER_S  # there may be no room by then: nothing is promised, so promises stay bounded
        wait_s = float(math.ceil(max(MIN_RETRY_AFTER_S, departs_s - now)))
        heapq.heappush(self._promises, (now + wait_s, n))
        self._promised += n
        return wait_s


class _Departures:
    """Moments at which units will leave the queue, looked up as far as anybody asks."""

    def __init__(self, backlog: Backlog, now: float) -> None:
        self.made_s = now
        self._dispatcher = backlog.dispatcher
        self._taken_before = backlog.dispatcher.queue.turns
        self._rehearsal = Rehearsal(backlog, now)
        self._moments_s: list[float] = []
        if any(lane >= 0 for lane in backlog.dispatcher.queue.lanes()):  # bound units do not leave in queue order
            self._moments_s = sorted(starts_s for _, starts_s, _ in self._rehearsal if starts_s is not None)

    def when(self, number: int) -> float | None:
        """When the number-th unit from now leaves; no further than it matters. None while no replica takes work."""
        index = self._dispatcher.queue.turns - self._taken_before + number - 1
        moments_s = self._moments_s
        while len(moments_s) <= index:
            if moments_s and moments_s[-1] > self.made_s + MAX_RETRY_AFTER_S + _REFRESH_S:
                return moments_s[-1]
            entry = next(self._rehearsal, None)
            starts_s = entry[1] if entry is not None else self._phantom()
            if starts_s is None:
                return None
            moments_s.append(starts_s)
        return moments_s[index]

    def _phantom(self) -> float | None:
        """A unit that is not here yet, like those that are."""
        return self._rehearsal.occupy(max(self._rehearsal.mean_s(), 1e-3), lane=ANY)
