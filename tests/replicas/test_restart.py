"""When a dead replica starts again, on a clock moved by hand."""

from __future__ import annotations

from triptych.replicas.restart import RestartRule


def test_deaths_before_ready_back_off_from_half_a_second_doubling_to_a_minute() -> None:
    rule = RestartRule()
    delays = [rule.delay_after_death_s(n, now=100.0, ready_at=None) for n in range(9)]
    assert delays == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_replica_that_served_restarts_at_once() -> None:
    assert RestartRule().delay_after_death_s(1, now=105.0, ready_at=100.0) == 0


def test_a_death_right_after_ready_backs_off_too() -> None:
    rule = RestartRule()
    assert rule.delay_after_death_s(1, now=104.9, ready_at=100.0) == 0.5
    assert rule.delay_after_death_s(2, now=110.0, ready_at=109.0) == 1


def test_serving_for_a_while_forgives_earlier_deaths() -> None:
    rule = RestartRule()
    for number in range(5):
        rule.delay_after_death_s(number, now=1.0, ready_at=None)
    assert rule.delay_after_death_s(5, now=60.0, ready_at=30.0) == 0
    assert rule.delay_after_death_s(6, now=61.0, ready_at=None) == 0.5


def test_a_completed_unit_begins_the_row_of_early_deaths_anew() -> None:
    rule = RestartRule()
    for number in range(5):
        rule.delay_after_death_s(number, now=1.0, ready_at=None)
    assert rule.delay_after_death_s(5, now=2.0, ready_at=1.0, served=True) == 0.5
    assert rule.delay_after_death_s(6, now=3.0, ready_at=None) == 1


def test_eight_early_deaths_in_a_row_are_a_crash_loop_until_forgiven() -> None:
    rule = RestartRule()
    for number in range(7):
        rule.delay_after_death_s(number, now=1.0, ready_at=None)
    assert not rule.in_crash_loop
    rule.delay_after_death_s(7, now=1.0, ready_at=None)
    assert rule.in_crash_loop
    rule.forgive()
    assert not rule.in_crash_loop
    assert rule.delay_after_death_s(8, now=1.0, ready_at=None) == 0.5


def test_a_replica_that_cannot_come_back_for_days_is_tried_every_minute() -> None:
    rule = RestartRule()
    delays = [rule.delay_after_death_s(number, now=1.0, ready_at=None) for number in range(3000)]
    assert set(delays[7:]) == {60.0}


def test_a_death_that_a_request_is_to_blame_for_is_no_early_death() -> None:
    rule = RestartRule()
    assert rule.delay_after_death_s(1, now=1.0, ready_at=None) == 0.5
    assert not rule.excuse(2)
    assert rule.delay_after_death_s(2, now=2.0, ready_at=1.9) == 0
    assert rule.delay_after_death_s(3, now=3.0, ready_at=None) == 1


def test_a_death_excused_afterwards_leaves_the_row_and_ends_the_wait_that_it_caused() -> None:
    rule = RestartRule()
    for number in range(1, 9):
        rule.delay_after_death_s(number, now=1.0, ready_at=None)
    assert not rule.excuse(4)
    assert not rule.in_crash_loop
    assert rule.excuse(8)
    assert rule.delay_after_death_s(9, now=1.0, ready_at=None) == 32
