from __future__ import annotations

import pytest
from core_driver import CoreDriver, dispatches

from triptych.config.stage_file import ROUTING_POLICIES
from triptych.errors import ConfigError, ErrorCode
from triptych.messages import SamplingParams
from triptych.orchestrator.cost import CostModel
from triptych.orchestrator.dispatcher import MAX_SESSIONS
from triptych.orchestrator.queue import ANY
from triptych.orchestrator.routing import POLICIES, create_policy


def where(driver: CoreDriver) -> list[int]:
    return [effect.replica_id for effect in driver.sent]


def test_an_unknown_policy_names_the_good_ones() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.routing.*'fastest'.*round_robin, strict_round_robin, least_work"):
        create_policy("fastest", CostModel())


@pytest.mark.parametrize("routing", ["round_robin", "strict_round_robin", "least_work"])
@pytest.mark.parametrize("slots", [1, 3])
def test_requests_one_after_another_go_round_exactly(routing: str, slots: int) -> None:
    driver = CoreDriver(slots=[slots] * 4, routing=routing)
    for number in range(8):
        driver.submit(f"r{number}")
        driver.output(driver.address(f"r{number}"))
    assert where(driver) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_the_rotation_is_over_replicas_not_slots() -> None:
    driver = CoreDriver(slots=[2, 2, 2])
    driver.submit(n=6)
    assert where(driver) == [0, 1, 2, 0, 1, 2]


def test_round_robin_gives_the_head_of_the_queue_to_the_first_replica_with_a_free_slot() -> None:
    driver = CoreDriver(slots=[1, 1])
    for name in "abcd":
        driver.submit(name)
    driver.output(driver.address("b"))
    driver.output(driver.address("c"))
    assert dispatches(driver.sent) == [(0, "a", 0), (1, "b", 0), (1, "c", 0), (1, "d", 0)]


def test_strict_round_robin_waits_for_its_replica_while_another_idles() -> None:
    driver = CoreDriver(slots=[1, 1], routing="strict_round_robin")
    for name in "abc":
        driver.submit(name)
    assert driver.output(driver.address("b"))
    assert where(driver) == [0, 1]
    driver.output(driver.address("a"))
    assert dispatches(driver.sent)[2:] == [(0, "c", 0)]


def test_strict_round_robin_binds_again_when_the_replica_dies_or_drains() -> None:
    driver = CoreDriver(slots=[1, 1, 1], routing="strict_round_robin")
    for name in "abcdef":
        driver.submit(name)
    effects = driver.lost(0)
    assert dispatches(effects) == []
    assert {unit.lane for unit in driver.core.dispatcher.queue} <= {ANY, 1, 2}
    driver.core.replica_draining(1, 1, driver.now)
    driver.take()
    driver.output(driver.address("c"))
    assert driver.sent[-1].replica_id == 2


def test_under_strict_round_robin_a_unit_that_arrives_in_an_outage_is_taken_by_the_first_replica_back() -> None:
    driver = CoreDriver(slots=[1, 1], routing="strict_round_robin")
    driver.lost(0)
    driver.lost(1)
    driver.submit("a")
    driver.ready(1)
    assert where(driver) == [1]


def test_under_strict_round_robin_a_refused_request_spends_no_turn() -> None:
    driver = CoreDriver(slots=[1, 1], routing="strict_round_robin", max_queue_size=1)
    for request_id in ("a", "b", "c"):
        driver.submit(request_id)
    assert driver.refused("d").code is ErrorCode.QUEUE_FULL
    driver.output(driver.address("a"))
    driver.submit("e")
    assert dispatches(driver.output(driver.address("b"))) == [(1, "e", 0)]


def test_strict_round_robin_counts_only_units_that_must_wait_against_the_bound() -> None:
    driver = CoreDriver(slots=[1, 1], routing="strict_round_robin", max_queue_size=1)
    driver.submit("a", n=2)
    driver.output(driver.address("a", 1))
    driver.submit("b")
    assert len(driver.core.dispatcher.queue) == 1
    driver.submit("c")
    assert driver.sent[-1].replica_id == 1
    assert driver.refused("d").code == "queue_full"


@pytest.mark.parametrize("routing", ["round_robin", "strict_round_robin", "least_work"])
def test_a_session_returns_to_its_replica_while_that_has_a_free_slot(routing: str) -> None:
    driver = CoreDriver(slots=[1, 1, 1], routing=routing)
    driver.submit("a", session="s")
    driver.output(driver.address("a"))
    driver.submit("b", session="s")
    assert where(driver) == [0, 0]
    driver.submit("c", session="s")
    assert where(driver)[2] != 0
    driver.output(driver.address("c"))
    driver.submit("d", session="s")
    assert where(driver)[3] == where(driver)[2]


def test_a_session_moves_on_when_its_replica_is_gone() -> None:
    driver = CoreDriver(slots=[1, 1])
    driver.submit("a", session="s")
    driver.output(driver.address("a"))
    driver.lost(0)
    driver.submit("b", session="s")
    assert where(driver) == [0, 1]


@pytest.mark.parametrize("routing", ["round_robin", "strict_round_robin"])
def test_the_units_of_one_session_request_still_spread_over_free_replicas(routing: str) -> None:
    driver = CoreDriver(slots=[1, 1], routing=routing)
    driver.submit("a", session="s")
    driver.output(driver.address("a"))
    driver.submit("b", session="s", n=2)
    assert len(driver.sent) == 3 or routing == "strict_round_robin"
    assert where(driver)[1] == 0


def test_sessions_are_remembered_in_bounded_number() -> None:
    driver = CoreDriver(slots=[1])
    for number in range(MAX_SESSIONS + 10):
        driver.submit(f"r{number}", session=f"s{number}")
        driver.output(driver.address(f"r{number}"))
    assert len(driver.core.dispatcher._sessions) == MAX_SESSIONS


# ---- least work


def steps(count: int) -> SamplingParams:
    return SamplingParams(prompt="x", seed=0, num_inference_steps=count)


def test_the_configuration_knows_every_policy() -> None:
    assert set(ROUTING_POLICIES) == set(POLICIES)


def test_least_work_chooses_the_replica_with_the_least_estimated_work_left() -> None:
    driver = CoreDriver(slots=[2, 2, 2], routing="least_work")
    for name, count in (("quick", 10), ("slow", 100)):
        driver.submit(f"learn {name}", params=steps(count))
        driver.output(driver.address(f"learn {name}"), inference_s=count / 10)
    driver.sent.clear()
    driver.submit("a", params=steps(100))
    driver.submit("b", params=steps(10))
    driver.submit("c", params=steps(10))
    assert where(driver) == [2, 0, 1]
    driver.submit("d", params=steps(10))
    assert where(driver)[3] == 0  # two quick ones are less than one slow one
    driver.submit("e", params=steps(10))
    assert where(driver)[4] == 1
    driver.submit("f", params=steps(10))
    assert where(driver)[5] == 2  # nobody else has a free slot


def test_least_work_sees_how_far_units_have_come() -> None:
    driver = CoreDriver(slots=[2, 2], routing="least_work")
    driver.submit("learn", params=steps(20))
    driver.output(driver.address("learn"), inference_s=10.0)
    driver.submit("a", params=steps(20))
    driver.submit("b", params=steps(20))
    driver.progress(driver.address("a"), 15)
    driver.submit("c", params=steps(20))
    assert where(driver)[-1] == driver.where(driver.address("a"))


def test_least_work_without_estimates_takes_the_least_busy_in_rotation() -> None:
    driver = CoreDriver(slots=[3, 3, 3], routing="least_work")
    for name in "abcdef":
        driver.submit(name)
    assert where(driver) == [0, 1, 2, 0, 1, 2]
    driver.failure(driver.address("b"))
    driver.submit("g")
    assert where(driver)[-1] == 1
