"""Whether every client got what it is owed, told from the record of a storm alone. Pure.

Owed is exactly one answer in bounded time: the right picture, or the one error that this request asks for. Whoever was
hit by two deaths may be convicted (`poison_request`): from outside, bad luck looks like guilt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chaos_schedule import Wish

RIGHT = "right"
GONE = "gone"
Span = tuple[float, float]

BOUND_S = 45.0  # waiting for a replica ends after 30 s, and hangs are found and replaced twice in less

# What besides a death may be the one answer, by kind of wish.
_OWED = {
    "oom": {"out_of_memory"},
    "error": {"engine_error"},
    "crash": {"poison_request"},
    "hang": {"poison_request"},
    "leave": {GONE, RIGHT},
    "delete": {"request_aborted", RIGHT},
    "late": {"deadline_exceeded"},
}


@dataclass(frozen=True)
class Outcome:
    """How one wish ended: `RIGHT`, `GONE`, an error code, or what was wrong. Seconds from the storm's start."""

    wish: Wish
    result: str
    life_s: Span


def complaints(wished: Sequence[Wish], outcomes: Sequence[Outcome], deaths: Sequence[Span]) -> list[str]:
    """What went wrong, one line each; in each of `deaths` one replica was made to die."""
    answers = Counter(outcome.wish.number for outcome in outcomes)
    lines = [f"wish {wish.number}: {answers[wish.number]} answers" for wish in wished if answers[wish.number] != 1]
    for outcome in outcomes:
        wish, (began_s, ended_s) = outcome.wish, outcome.life_s
        where = f"wish {wish.number} ({wish.kind}, {began_s:.2f}..{ended_s:.2f} s)"
        if ended_s - began_s > BOUND_S:
            lines.append(f"{where}: took {ended_s - began_s:.1f} s")
        owed = _OWED.get(wish.kind, {RIGHT})
        if outcome.result in owed:
            continue
        met = sum(first_s <= ended_s and began_s <= last_s for first_s, last_s in deaths)
        if outcome.result != "poison_request" or met < 2:
            lines.append(f"{where}: {outcome.result}, owed {' or '.join(sorted(owed))}; {met} deaths meanwhile")
    return lines


def deaths_caused_by(outcomes: Sequence[Outcome]) -> list[Span]:
    """When requests killed replicas: two each, some time within the life of the request."""
    return [outcome.life_s for outcome in outcomes if outcome.wish.kind in ("crash", "hang") for _ in range(2)]
