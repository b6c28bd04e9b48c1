from __future__ import annotations

import asyncio

import pytest
from core_driver import MODEL
from shell_driver import Server, within_bound

from triptych.errors import ConfigError, ErrorCode, TriptychError
from triptych.messages import (
    Aborted,
    Address,
    Update,
)
from triptych.orchestrator.cost import CostModel
from triptych.orchestrator.events import RequestStatus, UnitState
from triptych.orchestrator.orchestrator import Orchestrator
from triptych.orchestrator.work import Work
from triptych.replicas.state import ReplicaState

pytestmark = pytest.mark.anyio


# ---- requests and views


async def test_update_reaches_the_replica_of_a_running_unit() -> None:
    server = Server()
    server.submit()
    server.orchestrator.update("a", priority=-3, timeout_s=9.0)
    assert server.sent(Update) == [Update(server.fake.generate("a")[1], -3)]
    view = server.orchestrator.find("a")
    assert (view.priority, view.timeout_s) == (-3, 9.0)


async def test_views_show_state_position_and_expected_end() -> None:
    now = [50.0]
    server = Server(clock=lambda: now[0], unix_clock=lambda: 1_700_000_000.0)
    server.submit("warm")
    server.output("warm")
    server.submit("a", client_request_id="mine")
    server.submit("b", n=2, owner="key-1")
    now[0] += 0.25
    server.progress(10)
    first, second = server.orchestrator.live_requests()
    assert (first.status, first.client_request_id, first.created_at) == ("running", "mine", 1_700_000_000.0)
    [unit] = first.units
    assert (unit.state, unit.replica, unit.step, unit.steps, unit.queue_position) == ("running", 0, 10, 20, None)
    assert unit.eta_s == pytest.approx(0.25)
    assert (second.status, second.finished_at) == (RequestStatus.QUEUED, None)
    assert [unit.queue_position for unit in second.units] == [0, 1]
    assert [unit.eta_s for unit in second.units] == [pytest.approx(1.25), pytest.approx(2.25)]
    server.output("a")
    ended = server.orchestrator.find("mine")
    assert (ended.status, ended.finished_at) == ("completed", 1_700_000_000.25)
    assert (ended.units[0].state, ended.units[0].eta_s) == (UnitState.COMPLETED, None)


async def test_find_takes_either_id_and_refuses_ambiguity_and_strangers() -> None:
    server = Server([4])
    orchestrator = server.orchestrator
    server.submit("a", client_request_id="x", owner="k1")
    server.submit("b", client_request_id="x", owner="k2")
    assert orchestrator.find("a").id == "a"
    assert orchestrator.find("x", owner="k2").id == "b"
    with pytest.raises(TriptychError) as several:
        orchestrator.find("x")
    assert several.value.code is ErrorCode.CONFLICT
    for request_id, owner in (("a", "k2"), ("zzz", None)):
        with pytest.raises(TriptychError) as unknown:
            orchestrator.find(request_id, owner=owner)
        assert unknown.value.code is ErrorCode.REQUEST_NOT_FOUND
    assert [view.id for view in orchestrator.live_requests(owner="k1")] == ["a"]


async def test_abort_with_a_code_of_its_own_and_of_unknown_requests() -> None:
    server = Server()
    stream = server.submit()
    server.orchestrator.abort("a", message="deleted by its owner")
    with pytest.raises(TriptychError, match="deleted by its owner"):
        await within_bound(stream.outputs())
    assert server.orchestrator.find("a").status == "aborted"
    for request_id, code in (("a", ErrorCode.CONFLICT), ("b", ErrorCode.REQUEST_NOT_FOUND)):
        with pytest.raises(TriptychError) as raised:
            server.orchestrator.abort(request_id)
        assert raised.value.code is code


async def test_replicas_and_readiness() -> None:
    server = Server([])
    orchestrator = server.orchestrator
    assert (orchestrator.readiness().ready, orchestrator.readiness().reason) == (False, "not_ready")
    assert orchestrator.model is None
    server.fake.states = [ReplicaState.READY, ReplicaState.STARTING]
    orchestrator.replica_ready(0, 1, 1, MODEL)
    readiness = orchestrator.readiness()
    assert (readiness.ready, readiness.reason, readiness.degraded) == (True, None, (1,))
    assert orchestrator.model is MODEL
    server.submit()
    server.output()
    server.submit("b")
    first, second = orchestrator.replicas()
    assert (first.pid, first.pids, first.in_flight, first.completed) == (100, (100,), 1, 1)
    assert (second.pid, second.pids, second.in_flight) == (None, (), 0)
    orchestrator.replica_draining(0, 1, comes_back=True)
    assert orchestrator.readiness().reason == "no_replica"
    orchestrator.replica_lost(0, 1, "stopped")
    assert orchestrator.readiness().reason == "no_replica"


async def test_the_expected_step_of_a_replica_is_that_of_its_slowest_unit() -> None:
    now = [50.0]
    server = Server([1], clock=lambda: now[0])
    orchestrator = server.orchestrator
    server.submit("learn")
    assert orchestrator.expected_step_s(0) is None
    for step in (1, 5, 20):
        now[0] += 2.0
        server.progress(step, "learn")
    server.output("learn")
    assert orchestrator.expected_step_s(0) is None
    server.submit("a")
    assert orchestrator.expected_step_s(0) == pytest.approx(4.0 / 19)
    orchestrator.abort("a")
    assert orchestrator.expected_step_s(0) == pytest.approx(4.0 / 19)
    server.confirm_abort("a")
    assert orchestrator.expected_step_s(0) is None


async def test_estimate_errors_are_shown_and_views_are_reused_for_a_moment() -> None:
    now = [50.0]
    server = Server([1], clock=lambda: now[0])
    for name in ("a", "b"):
        server.submit(name)
        now[0] += 1.5
        server.output(name)
    assert server.orchestrator.replicas()[0].estimate_error == pytest.approx(0.0)
    server.submit("c")
    server.submit("d")
    first = server.orchestrator.find("d").units[0]
    now[0] += 0.2
    assert server.orchestrator.find("d").units[0] == first
    now[0] += 0.2
    later = server.orchestrator.find("d").units[0]
    assert (first.queue_position, later.queue_position) == (0, 0)
    assert (first.eta_s, later.eta_s) == (pytest.approx(3.0), pytest.approx(2.6))
    server.submit("e", priority=-5)
    assert server.orchestrator.find("d").units[0].queue_position == 1


async def test_late_messages_are_counted() -> None:
    server = Server()
    server.orchestrator.replica_message(0, Aborted(Address("gone", 0, 1, 1)), ())
    assert server.orchestrator.dropped == {"stale_unit": 1}


async def test_failed_returns_the_first_reason_once_the_replicas_cannot_be_kept() -> None:
    orchestrator = Orchestrator()
    waiting = asyncio.create_task(orchestrator.failed())
    await asyncio.sleep(0)
    assert not waiting.done()
    orchestrator.supervision_failed("no such model")
    orchestrator.supervision_failed("another")
    assert await within_bound(waiting) == "no such model"


async def test_an_unknown_routing_name_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="round_robin"):
        Orchestrator(routing="fastest")


async def test_the_estimator_is_a_hook() -> None:
    class Learned(CostModel):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def observe(self, work: Work, service_s: float, step_s: float | None = None) -> None:
            self.seen.append(service_s)

    learned = Learned()
    server = Server(estimator=learned)
    server.submit()
    server.output()
    assert learned.seen == [1.0]


async def test_operators_reach_the_supervisor_until_the_server_drains() -> None:
    server = Server((1, 1))
    orchestrator = server.orchestrator
    assert orchestrator.drain_replica(1).state is ReplicaState.DRAINING
    assert orchestrator.restart_replica(1).id == 1
    assert [view.id for view in orchestrator.resize(2)] == [0, 1]
    assert server.fake.asked == [("drain", 1), ("restart", 1), ("resize", 2)]
    orchestrator.begin_drain()
    for ask in (orchestrator.drain_replica, orchestrator.restart_replica, orchestrator.resize):
        with pytest.raises(TriptychError) as caught:
            ask(1)
        assert caught.value.code is ErrorCode.DRAINING
    assert len(server.fake.asked) == 3
