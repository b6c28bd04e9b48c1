"""When a dead replica starts again, on a clock moved by hand."""

from __future__ import annotations

from triptych.replicas.restart import RestartRule


def test_deaths_before_ready_back_off_from_half_a_second_doubling_to_a_minute() -> None:
    rule = RestartRule()
    delays = [rule.delay_after_death_s(now=100.0, ready_at=None) for _ in range(9)]
    assert delays == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_replica_that_served_restarts_at_once() -> None:
    assert RestartRule().delay_after_death_s(now=105.0, ready_at=100.0) == 0


def test_a_death_right_after_ready_backs_off_too() -> None:
    rule = RestartRule()
    assert rule.delay_after_death_s(now=104.9, ready_at=100.0) == 0.5
    assert rule.delay_after_death_s(now=110.0, ready_at=109.0) == 1


def test_serving_for_a_while_forgives_earlier_deaths() -> None:
    rule = RestartRule()
    for _ in range(5):
        rule.delay_after_death_s(now=1.0, ready_at=None)
    assert rule.delay_after_death_s(now=60.0, ready_at=30.0) == 0
    assert rule.delay_after_death_s(now=61.0, ready_at=None) == 0.5


def test_a_completed_unit_begins_the_row_of_early_deaths_anew() -> None:
    rule = RestartRule()
    for _ in range(5):
        rule.delay_after_death_s(now=1.0, ready_at=None)
    assert rule.delay_after_death_s(now=2.0, ready_at=1.0, served=True) == 0.5
    assert rule.delay_after_death_s(now=3.0, ready_at=None) == 1


def test_eight_early_deaths_in_a_row_are_a_crash_loop_until_forgiven() -> None:
    rule = RestartRule()
    for _ in range(7):
        rule.delay_after_death_s(now=1.0, ready_at=None)
    assert not rule.in_crash_loop
    rule.delay_after_death_s(now=1.0, ready_at=None)
    assert rule.in_crash_loop
    rule.forgive()
    assert not rule.in_crash_loop
    assert rule.delay_after_death_s(now=1.0, ready_at=None) == 0.5
