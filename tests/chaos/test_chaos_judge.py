"""What the judge lets pass and what not."""

from __future__ import annotations

import pytest
from chaos_judge import BOUND_S, GONE, RIGHT, Outcome, complaints, deaths_caused_by
from chaos_schedule import Wish

LIFE_S = (10.0, 11.0)


def one(kind: str, result: str, *, life_s: tuple[float, float] = LIFE_S) -> Outcome:
    return Outcome(Wish(1, kind, "a wish"), result, life_s)


def judged(outcome: Outcome, deaths: list[tuple[float, float]] | None = None) -> list[str]:
    return complaints([outcome.wish], [outcome], deaths or [])


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("plain", RIGHT),
        ("several", RIGHT),
        ("oom", "out_of_memory"),
        ("error", "engine_error"),
        ("crash", "poison_request"),
        ("hang", "poison_request"),
        ("leave", GONE),
        ("leave", RIGHT),
        ("delete", "request_aborted"),
        ("delete", RIGHT),
        ("late", "deadline_exceeded"),
    ],
)
def test_what_is_owed_passes(kind: str, result: str) -> None:
    assert judged(one(kind, result)) == []


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("plain", "wrong picture: {}"),
        ("plain", "no_replica"),
        ("plain", "engine_error"),
        ("plain", GONE),
        ("oom", RIGHT),
        ("late", RIGHT),
        ("crash", "no answer"),
    ],
)
def test_anything_else_is_complained_of_by_number_and_kind(kind: str, result: str) -> None:
    (line,) = judged(one(kind, result))
    assert line.startswith(f"wish 1 ({kind}, 10.00..11.00 s): {result}, owed ")


def test_a_wish_without_an_answer_or_with_two_is_complained_of() -> None:
    wish = Wish(1, "plain", "a wish")
    assert complaints([wish], [], []) == ["wish 1: 0 answers"]
    assert complaints([wish], [one("plain", RIGHT)] * 2, []) == ["wish 1: 2 answers"]


def test_an_answer_beyond_the_bound_is_complained_of_although_it_is_right() -> None:
    (line,) = judged(one("plain", RIGHT, life_s=(1.0, 1.5 + BOUND_S)))
    assert "took 45.5 s" in line


def test_a_conviction_is_excused_by_two_deaths_meanwhile_and_by_no_fewer() -> None:
    convicted = one("plain", "poison_request")
    assert judged(convicted, [(10.5, 10.6), (9.0, 12.0)]) == []
    assert "1 deaths meanwhile" in judged(convicted, [(10.5, 10.6), (11.1, 12.0)])[0]
    assert "0 deaths meanwhile" in judged(convicted, [(9.0, 9.9)])[0]
    assert judged(one("plain", "engine_error"), [(10.5, 10.6), (9.0, 12.0)]) != []


def test_a_request_that_kills_replicas_causes_two_deaths_in_its_life() -> None:
    outcomes = [one("plain", RIGHT), one("crash", "poison_request"), one("hang", "poison_request", life_s=(2.0, 9.0))]
    assert deaths_caused_by(outcomes) == [LIFE_S, LIFE_S, (2.0, 9.0), (2.0, 9.0)]
