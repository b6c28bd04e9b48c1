"""When a dead replica is started again: a pure rule over times in seconds, without clock, process or sleep.

A replica that served for a while restarts at once; one that dies before it is ready, or right after, waits twice as
long each time, and is in a crash loop after too many such deaths in a row. Deaths for which a request is to blame do
not count.
"""

from __future__ import annotations

from collections import deque

__all__ = ["CRASH_LOOP_DEATHS", "FIRST_DELAY_S", "MAX_DELAY_S", "SETTLED_AFTER_S", "RestartRule"]

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 60.0
SETTLED_AFTER_S = 5.0
CRASH_LOOP_DEATHS = 8
"""Early deaths in a row that make a crash loop: about a minute of trying."""
_MOST_DEATHS = 16  # of a row; more change nothing


class RestartRule:
    """Early deaths of one replica in a row, and what they cost."""

    def __init__(self) -> None:
        self._early_deaths: deque[int] = deque(maxlen=_MOST_DEATHS)  # incarnations
        self._excused = -1  # the latest

    def delay_after_death_s(
        self, incarnation: int, *, now: float, ready_at: float | None, served: bool = False
    ) -> float:
        """Seconds until the next start of a replica that died at `now`; `ready_at` is None if it never got ready.

        `served`: it completed a unit in this life, so whatever ended it, it can start and work: the row begins anew.
        """
        if ready_at is not None and now - ready_at >= SETTLED_AFTER_S:
            self.forgive()
            return 0.0
        if served:
            self.forgive()
        if incarnation == self._excused:
            return 0.0
        self._early_deaths.append(incarnation)
        return min(FIRST_DELAY_S * 2.0 ** (len(self._early_deaths) - 1), MAX_DELAY_S)

    def excuse(self, incarnation: int) -> bool:
        """A request is to blame for this death, past or just happening; True if the present wait was for it."""
        self._excused = max(self._excused, incarnation)
        if incarnation not in self._early_deaths:
            return False
        latest = self._early_deaths[-1] == incarnation
        self._early_deaths.remove(incarnation)
        return latest

    @property
    def in_crash_loop(self) -> bool:
        """Whether it has died early too often in a row."""
        return len(self._early_deaths) >= CRASH_LOOP_DEATHS

    def forgive(self) -> None:
        """Forget earlier deaths."""
        self._early_deaths.clear()
