"""What becomes of a unit whose replica died: a pure table, no state.

A unit that had not begun moves freely; one that had is replayed alone, so that a second death convicts it and
nobody beside it. The table is bounded: whatever a unit does, it ends after at most three deaths.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["MAX_DEATHS", "Verdict", "after_death"]

MAX_DEATHS = 3
"""Deaths after which a unit is poison even if no start was ever seen."""


class Verdict(StrEnum):
    """Requeue as before, requeue to run with no neighbour, or fail with `poison_request`."""

    REQUEUE = "requeue"
    REQUEUE_ALONE = "requeue_alone"
    POISON = "poison"


def after_death(*, started: bool, deaths: int, alone: bool) -> Verdict:
    """Judge a unit after the death of its replica.

    `started`: a sign of life of this try arrived; `deaths`: deaths seen, this one included; `alone`: this try ran
    under the alone rule.

    | started | alone | deaths | verdict       |
    |---------|-------|--------|---------------|
    | yes     | yes   | any    | poison        |
    | yes     | no    | any    | requeue alone |
    | no      | any   | 1      | requeue       |
    | no      | any   | 2      | requeue alone |
    | no      | any   | 3      | poison        |

    The lower rows exist because a crash can swallow the sign of life: a unit that kills its replica before it is
    heard of would otherwise go round for ever.
    """
    if started:
        return Verdict.POISON if alone else Verdict.REQUEUE_ALONE
    if deaths >= MAX_DEATHS:
        return Verdict.POISON
    return Verdict.REQUEUE if deaths == 1 else Verdict.REQUEUE_ALONE
