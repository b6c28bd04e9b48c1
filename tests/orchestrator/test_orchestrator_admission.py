from __future__ import annotations

import random
import time
from types import ModuleType
from typing import Any

import pytest
from core_driver import CoreDriver, ends
from shell_driver import Server, within_bound

from triptych.errors import ErrorCode, TriptychError
from triptych.orchestrator.admission import COME_BACK_S
from triptych.orchestrator.effects import Finish


class Clients:
    """Send requests of much the same length, and again when told to."""

    def __init__(self, server: Any, *, service_s: float, spread: float = 0.15, retries: int = 2) -> None:
        self.server = server
        self.rng = random.Random(5)
        self.service_s, self.spread, self.retries = service_s, spread, retries
        self.tries: dict[str, int] = {}
        self.first_advice_s: dict[str, float] = {}
        self.gave_up: set[str] = set()

    def send(self, request_id: str) -> None:
        server = self.server
        self.tries[request_id] = self.tries.get(request_id, 0) + 1
        try:
            server.submit(request_id, self.service_s * self.rng.gauss(1.0, self.spread), steps=20)
        except TriptychError as error:
            assert error.code is ErrorCode.QUEUE_FULL
            assert error.retry_after_s is not None
            self.first_advice_s.setdefault(request_id, error.retry_after_s)
            if self.tries[request_id] > self.retries:
                self.gave_up.add(request_id)
            else:
                back_s = server.now + error.retry_after_s + self.rng.uniform(0.0, 0.05)
                server.at(back_s, lambda: self.send(request_id))


def warm(simulate: ModuleType, *, replicas: int, max_queue_size: int, service_s: float) -> tuple[Any, Clients]:
    server = simulate.VirtualServer(
        routing="round_robin", replicas=replicas, max_queue_size=max_queue_size, progress=True
    )
    clients = Clients(server, service_s=service_s)
    for number in range(8):
        server.at(service_s * number, lambda number=number: clients.send(f"warm{number}"))
    server.run()
    return server, clients


def test_who_follows_retry_after_is_admitted_and_replicas_never_run_dry(simulate: ModuleType) -> None:
    server, clients = warm(simulate, replicas=2, max_queue_size=16, service_s=0.5)
    began_s = server.now
    for number in range(200):
        clients.send(f"{number}")
    server.run()
    refused = [tries for tries in clients.tries.values() if tries > 1]
    assert len(refused) == 182
    assert refused.count(2) >= 0.9 * len(refused)  # most are admitted at the first retry
    assert not clients.gave_up
    work_s = sum(server.service_s[f"{number}"] for number in range(200))
    assert max(server.ended_s.values()) - began_s <= 1.1 * work_s / 2  # and none comes needlessly late


def test_the_first_advice_is_when_the_first_place_is_free(simulate: ModuleType) -> None:
    server, clients = warm(simulate, replicas=4, max_queue_size=4, service_s=40.0)
    began_s = server.now
    for number in range(8):
        clients.send(f"{number}")
    server.run(began_s + 10.0)
    clients.send("late")
    server.run(began_s + 80.0)
    first_end_s = min(server.ended_s[f"{number}"] for number in range(4))
    told_s = clients.first_advice_s["late"]
    assert began_s + 10.0 + told_s == pytest.approx(first_end_s, rel=0.15)


def test_retry_after_counts_what_runs_what_waits_and_who_was_told_to_come_back() -> None:
    driver = CoreDriver(slots=[1, 1], max_queue_size=8)
    driver.submit("warm")
    driver.output(driver.address("warm"), inference_s=6.0)
    driver.submit("a", n=10)
    driver.now += 2.0
    assert [driver.refused(name).retry_after_s for name in "bcdefg"] == [4.0, 4.0, 10.0, 10.0, 16.0, 16.0]
    assert driver.refused("h", n=5).retry_after_s == 34.0
    driver.now += 100.0  # nobody of them came back; 8 units still wait, overdue
    assert driver.refused("i").retry_after_s == pytest.approx(6.0, abs=1.0)


def test_retry_after_stays_within_one_and_sixty_seconds() -> None:
    driver = CoreDriver(slots=[1], max_queue_size=2)
    driver.submit("a", n=3)
    assert driver.refused("b").retry_after_s == 1.0
    driver.now += 30.0  # longer than that already, and nothing else is known
    assert driver.refused("c").retry_after_s == 30.0
    driver.progress(driver.address("a"), 1)
    driver.now += 1.0
    assert driver.refused("d").retry_after_s == 60.0


def test_while_no_replica_lives_the_advice_is_a_restart() -> None:
    driver = CoreDriver(slots=[1], max_queue_size=1)
    driver.submit("a")
    driver.lost(0)
    assert driver.refused("b").retry_after_s == COME_BACK_S


def test_bound_units_leave_at_their_own_replicas_pace() -> None:
    driver = CoreDriver(slots=[1, 1], routing="strict_round_robin", max_queue_size=2)
    driver.submit("warm")
    driver.output(driver.address("warm"), inference_s=8.0)
    driver.submit("a", n=2)
    driver.now += 5.0
    driver.submit("b", n=2)
    assert [driver.refused(name).retry_after_s for name in "cde"] == [3.0, 3.0, 11.0]


def test_a_request_that_could_never_fit_is_told_not_to_retry() -> None:
    driver = CoreDriver(slots=[2], max_queue_size=3)
    error = driver.refused(n=6)
    assert (error.code, error.should_retry, error.retry_after_s, error.param) == (
        ErrorCode.QUEUE_FULL,
        False,
        None,
        "n",
    )
    assert "at most 5" in error.message
    driver.submit(n=5)


@pytest.mark.anyio
async def test_three_hundred_at_once_are_refused_or_answered_in_order_and_refusal_is_quick() -> None:
    server = Server([1, 1], max_queue_size=16)
    server.submit("warm")
    server.output("warm")
    streams, refusals_s = {}, []
    for number in range(300):
        began_s = time.process_time()
        try:
            streams[f"{number}"] = server.submit(f"{number}")
        except TriptychError as error:
            refusals_s.append(time.process_time() - began_s)
            assert error.code is ErrorCode.QUEUE_FULL
    assert list(streams) == [f"{number}" for number in range(18)]
    assert sorted(refusals_s)[len(refusals_s) // 2] < 0.005
    for request_id, stream in streams.items():
        server.output(request_id)
        await within_bound(stream.outputs())
    assert server.orchestrator.live_requests() == []


def test_deadlines_cover_waiting_and_running_and_forbid_the_retry() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("runs", timeout_s=10.0)
    driver.submit("waits", timeout_s=4.0)
    driver.submit("next")
    effects = [*driver.pass_time(4.0), *driver.pass_time(6.0)]
    assert ends(effects) == [("waits", "deadline_exceeded"), ("runs", "deadline_exceeded")]
    errors = [effect.error for effect in effects if isinstance(effect, Finish)]
    assert [(error.status, error.should_retry) for error in errors if error] == [(504, False)] * 2
    # The slot is free as soon as the replica has stopped, one step later.
    assert [effect.message.address.request_id for effect in driver.sent] == ["runs"]
    driver.aborted(driver.address("runs"))
    assert driver.sent[-1].message.address.request_id == "next"


def test_input_pictures_are_bounded_in_bytes_until_their_requests_end() -> None:
    driver = CoreDriver(slots=[1], max_input_bytes=1000)
    driver.submit("warm")
    driver.output(driver.address("warm"), inference_s=8.0)
    driver.submit("a", frames=(bytes(300), bytes(200)))
    driver.submit("b", frames=(bytes(400),), n=2)
    driver.now += 2.0
    refusal = driver.refused("c", frames=(bytes(101),))
    assert (refusal.code, refusal.retry_after_s) == (ErrorCode.QUEUE_FULL, 6.0)
    for number in ("900 bytes", "1000 bytes", "101 bytes"):
        assert number in refusal.message
    driver.submit("d", frames=(bytes(100),))
    driver.submit("without pictures")
    assert driver.refused("c", frames=(bytes(1),)).code is ErrorCode.QUEUE_FULL
    driver.abort("b")
    driver.submit("c", frames=(bytes(400),))
    driver.output(driver.address("a"))
    driver.failure(driver.address("d"))
    driver.submit("e", frames=(bytes(600),))


def test_a_request_whose_pictures_exceed_the_bound_is_taken_when_no_others_are_held() -> None:
    driver = CoreDriver(slots=[1], max_input_bytes=100)
    driver.submit("large", frames=(bytes(5000),))
    assert driver.refused("other", frames=(bytes(1),)).code is ErrorCode.QUEUE_FULL
    driver.output(driver.address("large"))
    driver.submit("other", frames=(bytes(1),))
    assert driver.refused("large again", frames=(bytes(5000),)).retry_after_s is not None
