"""When a dead replica is started again: a pure rule over times in seconds, without clock, process or sleep.

A replica that served for a while restarts at once; one that dies before it is ready, or right after, waits twice as
long each time.
"""

from __future__ import annotations

__all__ = ["FIRST_DELAY_S", "MAX_DELAY_S", "SETTLED_AFTER_S", "RestartRule"]

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 60.0
SETTLED_AFTER_S = 5.0


class RestartRule:
    """Deaths of one replica in a row, and what they cost."""

    def __init__(self) -> None:
        self._next_delay_s = FIRST_DELAY_S

    def delay_after_death_s(self, *, now: float, ready_at: float | None) -> float:
        """Seconds until the next start of a replica that died at `now`; `ready_at` is None if it never got ready."""
        if ready_at is not None and now - ready_at >= SETTLED_AFTER_S:
            self._next_delay_s = FIRST_DELAY_S
            return 0.0
        delay = self._next_delay_s
        self._next_delay_s = min(2 * delay, MAX_DELAY_S)
        return delay
