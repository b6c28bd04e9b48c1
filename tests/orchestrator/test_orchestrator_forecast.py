from __future__ import annotations

import pytest
from core_driver import CoreDriver


def test_the_forecast_counts_positions_and_seconds_to_the_end() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("warm")
    driver.output(driver.address("warm"), inference_s=10.0)
    driver.submit("a")
    driver.submit("b", n=2)
    driver.now += 4.0
    forecast = driver.core.backlog.forecast(driver.now)
    first, second = driver.core.live["b"].units
    assert forecast.positions == {first: 0, second: 1}
    assert forecast.etas_s[driver.core.live["a"].units[0]] == pytest.approx(6.0)
    assert (forecast.etas_s[first], forecast.etas_s[second]) == (pytest.approx(16.0), pytest.approx(26.0))
    driver.progress(driver.address("a"), 5)
    forecast = driver.core.backlog.forecast(driver.now)
    assert forecast.etas_s[driver.core.live["a"].units[0]] == pytest.approx(4.0 / 5 * 15)


def test_a_forecast_does_not_stretch_between_two_signs_of_progress() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("a")
    unit = driver.core.live["a"].units[0]
    assert driver.core.backlog.forecast(driver.now).etas_s == {}
    driver.now += 10.0
    driver.progress(driver.address("a"), 1)
    driver.now += 9.0
    assert driver.core.backlog.forecast(driver.now).etas_s[unit] == pytest.approx(19 * 10.0 - 9.0)


def test_before_anything_ended_waiting_units_are_expected_to_take_as_long_as_running_ones() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("a")
    driver.submit("b")
    driver.now += 10.0
    driver.progress(driver.address("a"), 5)
    assert driver.core.backlog.forecast(driver.now).etas_s[driver.core.live["b"].units[0]] == pytest.approx(70.0)


def test_the_estimate_error_is_known_after_the_first_estimated_unit() -> None:
    driver = CoreDriver(slots=[1])
    replica = driver.core.dispatcher.pool.by_id[0]
    seen = []
    for name, seconds in (("a", 10.0), ("b", 8.0), ("c", 8.0)):
        driver.submit(name)
        driver.output(driver.address(name), inference_s=seconds)
        seen.append(replica.estimate_error)
    assert seen == [None, pytest.approx(0.25), pytest.approx(0.25, abs=0.05)]


def test_the_slot_time_counts_not_only_what_the_engine_computed() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("a")
    driver.now += 3.0
    driver.output(driver.address("a"), inference_s=2.0)
    driver.submit("b")
    assert driver.core.live["b"].units[0].expected_s == pytest.approx(3.0)
