from __future__ import annotations

import pytest

from triptych.orchestrator.retry import MAX_DEATHS, Verdict, after_death


@pytest.mark.parametrize(
    ("started", "alone", "deaths", "verdict"),
    [
        (False, False, 1, Verdict.REQUEUE),
        (False, False, 2, Verdict.REQUEUE_ALONE),
        (False, True, 2, Verdict.REQUEUE_ALONE),
        (False, True, MAX_DEATHS, Verdict.POISON),
        (True, False, 1, Verdict.REQUEUE_ALONE),
        (True, False, 2, Verdict.REQUEUE_ALONE),
        (True, True, 2, Verdict.POISON),
        (True, True, 3, Verdict.POISON),
    ],
)
def test_the_table(started: bool, alone: bool, deaths: int, verdict: Verdict) -> None:
    assert after_death(started=started, deaths=deaths, alone=alone) is verdict


def test_whatever_happens_a_unit_ends_after_a_bounded_number_of_deaths() -> None:
    for pattern in range(2**MAX_DEATHS):
        alone = False
        for deaths in range(1, MAX_DEATHS + 1):
            verdict = after_death(started=bool(pattern >> deaths - 1 & 1), deaths=deaths, alone=alone)
            if verdict is Verdict.POISON:
                break
            alone = verdict is Verdict.REQUEUE_ALONE
        assert verdict is Verdict.POISON
