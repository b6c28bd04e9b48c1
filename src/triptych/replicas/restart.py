"""When a dead replica is started again: a pure rule over times in seconds, without clock, process or sleep.

A replica that served for a while restarts at once; one that dies before it is ready, or right after, waits twice as
long each time, and is in a crash loop after too many such deaths in a row.
"""

from __future__ import annotations

__all__ = ["CRASH_LOOP_DEATHS", "FIRST_DELAY_S", "MAX_DELAY_S", "SETTLED_AFTER_S", "RestartRule"]

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 60.0
SETTLED_AFTER_S = 5.0
CRASH_LOOP_DEATHS = 8
"""Early deaths in a row that make a crash loop: about a minute of trying."""


class RestartRule:
    """Early deaths of one replica in a row, and what they cost."""

    def __init__(self) -> None:
        self._early_deaths = 0

    def delay_after_death_s(self, *, now: float, ready_at: float | None, served: bool = False) -> float:
        """Seconds until the next start of a replica that died at `now`; `ready_at` is None if it never got ready.

        `served`: it completed a unit in this life, so whatever ended it, it can start and work: the row begins anew.
        """
        if ready_at is not None and now - ready_at >= SETTLED_AFTER_S:
            self.forgive()
            return 0.0
        self._early_deaths = 1 if served else self._early_deaths + 1
        return min(FIRST_DELAY_S * 2.0 ** (self._early_deaths - 1), MAX_DELAY_S)

    @property
    def in_crash_loop(self) -> bool:
        """Whether it has died early too often in a row."""
        return self._early_deaths >= CRASH_LOOP_DEATHS

    def forgive(self) -> None:
        """Forget earlier deaths."""
        self._early_deaths = 0
