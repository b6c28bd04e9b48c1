"""After which steps a unit shows partial pictures; pure, so that every engine means the same by it."""

from __future__ import annotations

__all__ = ["preview_steps"]


def preview_steps(steps: int, count: int) -> tuple[int, ...]:
    """Up to `count` of `steps` steps, evenly spread; never the last one, whose picture is the result itself."""
    places = {round((index + 1) * steps / (count + 1)) for index in range(count)}
    return tuple(sorted(step for step in places if 0 < step < steps))
