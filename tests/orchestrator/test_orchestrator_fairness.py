from __future__ import annotations

import pytest
from core_driver import CoreDriver, dispatches

from triptych.orchestrator.queue import AGING_S


@pytest.mark.parametrize("field", ["user", "owner"])
def test_one_heavy_user_delays_another_by_one_turn_at_most(field: str) -> None:
    driver = CoreDriver(slots=[1])
    for number in range(50):
        driver.submit(f"heavy{number}", n=10, **{field: "heavy"})
    for number in range(20):
        driver.now += 1.0
        driver.submit(f"single{number}", **{field: "light"})
        for _ in range(2):
            driver.now += 1.0
            driver.output(driver.sent[-1].message.address)
        assert f"single{number}" in [effect.message.address.request_id for effect in driver.sent[-2:]]


def test_the_api_key_counts_before_the_user_a_client_names() -> None:
    driver = CoreDriver(slots=[1])
    for number in range(10):
        driver.submit(f"heavy{number}", owner="key", user=f"invented{number}")
    driver.submit("light", owner="other", user="invented0")
    driver.now += 1.0
    for _ in range(2):
        driver.output(driver.sent[-1].message.address)
    assert "light" in [effect.message.address.request_id for effect in driver.sent[-2:]]


def test_a_low_priority_is_dispatched_in_bounded_time_under_endless_urgent_load() -> None:
    driver = CoreDriver(slots=[1], max_queue_size=10**6)
    driver.submit("runs")
    driver.submit("patient", priority=50, user="p")
    began_s = driver.now
    for number in range(10_000):
        driver.submit(f"urgent{number}", priority=-50, user=f"u{number % 7}")
        driver.now += 1.0
        driver.output(driver.sent[-1].message.address)
        driver.submit(f"more{number}", priority=-50, user=f"v{number}")
        if driver.sent[-1].message.address.request_id == "patient":
            break
    # Passed by what arrives within 100 * AGING_S seconds and by nothing else; twice as much arrives as is served.
    assert 100 * AGING_S <= driver.now - began_s <= 2 * 100 * AGING_S


def test_a_replayed_unit_waits_for_nobodys_turn() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("a0", user="a")
    for number in range(1, 4):
        driver.submit(f"a{number}", user="a")
        driver.submit(f"b{number}", user="b")
    driver.now += 5.0
    driver.lost(0)
    assert dispatches(driver.ready(0)) == [(0, "a0", 0)]
