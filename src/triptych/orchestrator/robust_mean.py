"""A running mean that one wild value does not wreck and that follows a lasting change."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

__all__ = ["RobustMean"]

WINDOW = 32
_SPREADS = 6.0
_LEAST_LIMIT = 0.25


class RobustMean:
    """Mean of the last `window` values after clipping them to around their median.

    A value counts as at most six mean deviations (measured without the most extreme sixteenth on either side, at
    least one value) or a quarter of the median away from it, whichever is more. So two outliers in a window move the
    mean by a few per cent, while a true mixture (four quick ones for every slow one) keeps its mean nearly unchanged.
    In a window that is a quarter full or more only every fourth value brings `value` up to date, which is what costs.
    """

    __slots__ = ("_added", "_ordered", "_recent", "_window", "value")

    def __init__(self, first: float, *, window: int = WINDOW) -> None:
        self._window = window
        self._added = 1
        self._recent = deque([first])
        self._ordered = [first]
        self.value = first

    def add(self, value: float) -> None:
        """Fold in one value; the oldest beyond the window is forgotten."""
        if len(self._recent) == self._window:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._recent.append(value)
        insort(self._ordered, value)
        self._added += 1
        if self._added * 4 < self._window or self._added % 4 == 0:
            self.value = _clipped_mean(self._ordered)


def _clipped_mean(ordered: list[float]) -> float:
    count = len(ordered)
    middle = (count - 1) // 2
    median = ordered[middle]
    cut = max(1, count // 16) if count > 1 else 0
    below, above = ordered[cut:middle], ordered[middle : count - cut]
    kept = len(below) + len(above)
    spread = (sum(above) - sum(below) - median * (len(above) - len(below))) / kept if kept else 0.0
    limit = max(_SPREADS * spread, _LEAST_LIMIT * median)
    low, high = median - limit, median + limit
    first, last = bisect_left(ordered, low), bisect_right(ordered, high)
    return (first * low + sum(ordered[first:last]) + (count - last) * high) / count
