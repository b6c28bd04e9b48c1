from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from core_driver import MODEL, make_request, output_of

from triptych.errors import ConfigError, ErrorCode, TriptychError
from triptych.messages import (
    Abort,
    Aborted,
    Address,
    Failure,
    Generate,
    Preview,
    Progress,
    SamplingParams,
    ToReplica,
    Update,
)
from triptych.orchestrator.cost import RunningMean
from triptych.orchestrator.events import RequestStatus, UnitOutput, UnitPreview, UnitProgress, UnitState
from triptych.orchestrator.orchestrator import EventStream, Orchestrator
from triptych.replicas.state import ReplicaState, ReplicaStatus
from triptych.wire import Frame

BOUND_S = 10.0
pytestmark = pytest.mark.anyio


class FakeReplicas:
    """Remembers what was sent; says what the test makes it say."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, ToReplica]] = []
        self.states: list[ReplicaState] = []

    def send(self, replica_id: int, message: ToReplica, frames: Sequence[Frame] = ()) -> None:
        self.sent.append((replica_id, message))

    def statuses(self) -> Sequence[ReplicaStatus]:
        return [
            ReplicaStatus(number, 0, state, 1, (100 + number,) if state is ReplicaState.READY else (), ("0",), 1, 0)
            for number, state in enumerate(self.states)
        ]

    def generate(self, request_id: str, unit: int = 0) -> tuple[int, Address]:
        for replica_id, message in reversed(self.sent):
            if not isinstance(message, Generate):
                continue
            if (message.address.request_id, message.address.unit) == (request_id, unit):
                return replica_id, message.address
        raise AssertionError(f"unit {unit} of {request_id} was not dispatched")


class Server:
    """An orchestrator with fake replicas that are ready."""

    def __init__(self, slots: Sequence[int] = (1,), **options: Any) -> None:
        self.fake = FakeReplicas()
        self.orchestrator = Orchestrator(**options)
        self.orchestrator.attach(self.fake)
        for number, count in enumerate(slots):
            self.fake.states.append(ReplicaState.READY)
            self.orchestrator.replica_ready(number, 1, count, MODEL)

    def submit(self, request_id: str = "a", **fields: Any) -> EventStream:
        return self.orchestrator.submit(make_request(request_id, **fields))

    def output(self, request_id: str = "a", unit: int = 0, data: bytes = b"png") -> None:
        replica_id, address = self.fake.generate(request_id, unit)
        self.orchestrator.replica_message(replica_id, output_of(address), [data])

    def progress(self, step: int, request_id: str = "a", unit: int = 0) -> None:
        replica_id, address = self.fake.generate(request_id, unit)
        self.orchestrator.replica_message(replica_id, Progress(address, step, 20), ())

    def confirm_abort(self, request_id: str = "a", unit: int = 0) -> None:
        replica_id, address = self.fake.generate(request_id, unit)
        self.orchestrator.replica_message(replica_id, Aborted(address), ())

    def sent(self, kind: type) -> list[Any]:
        return [message for _, message in self.fake.sent if isinstance(message, kind)]


@asynccontextmanager
async def running(orchestrator: Orchestrator) -> AsyncIterator[None]:
    task = asyncio.create_task(orchestrator.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def within_bound(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, BOUND_S)


async def read(stream: EventStream) -> list[Any]:
    return [event async for event in stream]


# ---- streams


async def test_a_plain_request_gives_its_outputs_and_wakes_its_reader_once() -> None:
    server = Server([1, 1])
    stream = server.submit(n=2)
    reader = asyncio.create_task(stream.outputs())
    await asyncio.sleep(0)
    waiter = stream._waiter
    server.progress(1)
    server.output(unit=1, data=b"second")
    await asyncio.sleep(0)
    assert stream._waiter is waiter
    server.output(unit=0, data=b"first")
    outputs = await within_bound(reader)
    assert [output.data for output in outputs] == [b"first", b"second"]
    assert server.orchestrator.live_requests() == []


async def test_events_come_in_order_and_the_stream_ends() -> None:
    server = Server([2])
    stream = server.submit(n=2, previews=1)
    server.progress(1)
    replica_id, address = server.fake.generate("a")
    server.orchestrator.replica_message(replica_id, Preview(address, 0, 1, "image/png"), [b"p"])
    server.output(unit=0)
    server.progress(3, unit=1)
    server.output(unit=1)
    events = await within_bound(read(stream))
    assert [type(event) for event in events] == [UnitProgress, UnitPreview, UnitOutput, UnitProgress, UnitOutput]
    assert [event.unit for event in events] == [0, 0, 0, 1, 1]
    assert [output.unit for output in await stream.outputs()] == [0, 1]


async def test_progress_for_a_slow_reader_is_only_the_latest_of_each_unit() -> None:
    server = Server([2])
    stream = server.submit(n=2)
    for step in range(1000):
        server.progress(step, unit=step % 2)
    assert len(stream._pending) == 2
    server.output(unit=0)
    server.output(unit=1)
    events = await within_bound(read(stream))
    assert events[:2] == [UnitProgress(0, 998, 20), UnitProgress(1, 999, 20)]
    assert len(events) == 4


async def test_a_waiting_reader_is_woken_by_the_next_event() -> None:
    server = Server()
    stream = server.submit()
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    server.progress(5)
    assert await within_bound(reader) == UnitProgress(0, 5, 20)
    with pytest.raises(RuntimeError, match="one reader"):
        await within_bound(asyncio.gather(anext(stream), anext(stream)))


async def test_a_failure_raises_after_the_events_before_it() -> None:
    server = Server()
    stream = server.submit()
    server.progress(5)
    replica_id, address = server.fake.generate("a")
    failure = Failure(address, "invalid_value", "12 is no multiple of 8", "width")
    server.orchestrator.replica_message(replica_id, failure, ())
    assert await within_bound(anext(stream)) == UnitProgress(0, 5, 20)
    with pytest.raises(TriptychError, match="12 is no multiple of 8") as raised:
        await within_bound(anext(stream))
    assert (raised.value.code, raised.value.param) == (ErrorCode.INVALID_VALUE, "width")
    with pytest.raises(TriptychError):
        await within_bound(stream.outputs())


async def test_a_cancelled_reader_can_be_followed_by_another() -> None:
    server = Server()
    stream = server.submit()
    reader = asyncio.create_task(stream.outputs())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    server.output()
    assert len(await within_bound(stream.outputs())) == 1


async def test_closing_a_stream_aborts_its_request_and_closing_again_does_nothing() -> None:
    server = Server()
    stream = server.submit()
    stream.close()
    stream.close()
    assert [abort.address for abort in server.sent(Abort)] == [server.fake.generate("a")[1]]
    assert server.orchestrator.live_requests() == []
    with pytest.raises(TriptychError) as raised:
        await within_bound(stream.outputs())
    assert raised.value.code is ErrorCode.REQUEST_ABORTED
    assert server.orchestrator.replicas()[0].in_flight == 1
    server.confirm_abort()
    assert server.orchestrator.replicas()[0].in_flight == 0


async def test_closing_a_finished_stream_does_nothing() -> None:
    server = Server()
    stream = server.submit()
    server.output()
    stream.close()
    assert server.sent(Abort) == []


async def test_a_replica_that_answers_from_within_send_is_served_in_order() -> None:
    server = Server([1, 1])

    def answer_at_once(replica_id: int, message: ToReplica, frames: Sequence[Frame] = ()) -> None:
        if isinstance(message, Generate):
            server.orchestrator.replica_message(replica_id, output_of(message.address), [b"now"])

    server.fake.send = answer_at_once  # type: ignore[method-assign]
    assert len(await within_bound(server.submit(n=5).outputs())) == 5


# ---- time


async def test_the_deadline_fires_by_itself() -> None:
    server = Server()
    async with running(server.orchestrator):
        stream = server.submit(timeout_s=0.02)
        with pytest.raises(TriptychError) as raised:
            await within_bound(stream.outputs())
    assert raised.value.code is ErrorCode.DEADLINE_EXCEEDED
    assert len(server.sent(Abort)) == 1


async def test_an_earlier_deadline_re_arms_the_timer_and_one_from_before_run_counts() -> None:
    server = Server([1, 1, 1])
    early = server.submit("early", timeout_s=0.02)
    async with running(server.orchestrator):
        late = server.submit("late", timeout_s=300.0)
        server.orchestrator.update("late", timeout_s=0.05)
        for stream in (early, late):
            with pytest.raises(TriptychError, match="timeout"):
                await within_bound(stream.outputs())


async def test_no_replica_within_the_limit_is_503() -> None:
    server = Server(no_replica_timeout_s=0.02)
    async with running(server.orchestrator):
        stream = server.submit()
        server.orchestrator.replica_lost(0, 1, "killed by signal 9")
        with pytest.raises(TriptychError) as raised:
            await within_bound(stream.outputs())
    assert raised.value.code is ErrorCode.NO_REPLICA


async def test_the_timer_sleeps_while_nothing_is_due() -> None:
    server = Server()
    async with running(server.orchestrator):
        assert server.orchestrator._timer is None
        for number in range(50):
            stream = server.submit(f"r{number}")
            timer = server.orchestrator._timer
            server.output(f"r{number}")
            await within_bound(stream.outputs())
            assert server.orchestrator._timer is timer
    assert server.orchestrator._timer is None


# ---- drain


async def test_the_drain_lets_running_units_finish_and_then_returns() -> None:
    server = Server()
    running_stream, queued_stream = server.submit("a"), server.submit("b")
    server.orchestrator.begin_drain()
    with pytest.raises(TriptychError) as queued:
        await within_bound(queued_stream.outputs())
    assert queued.value.code is ErrorCode.DRAINING
    with pytest.raises(TriptychError):
        server.submit("c")
    assert server.orchestrator.readiness().reason == "draining"
    drained = asyncio.create_task(server.orchestrator.drained())
    await asyncio.sleep(0)
    assert not drained.done()
    server.output("a")
    await within_bound(drained)
    assert len(await within_bound(running_stream.outputs())) == 1
    await within_bound(server.orchestrator.drained())


async def test_after_the_drain_time_abort_all_ends_the_rest() -> None:
    server = Server([1, 1])
    streams = [server.submit("a"), server.submit("b")]
    server.orchestrator.begin_drain()
    server.orchestrator.abort_all(ErrorCode.DRAINING)
    for stream in streams:
        with pytest.raises(TriptychError) as raised:
            await within_bound(stream.outputs())
        assert raised.value.retry_after_s is not None
    drained = asyncio.create_task(server.orchestrator.drained())
    server.confirm_abort("a")
    server.confirm_abort("b")
    await within_bound(drained)


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
    orchestrator.replica_draining(0, 1)
    assert orchestrator.readiness().reason == "no_replica"
    orchestrator.replica_lost(0, 1, "stopped")
    assert orchestrator.readiness().reason == "no_replica"


async def test_late_messages_are_counted() -> None:
    server = Server()
    server.orchestrator.replica_message(0, Aborted(Address("gone", 0, 1, 1)), ())
    assert server.orchestrator.dropped == {"stale_unit": 1}


async def test_exhausted_returns_the_reason_once_no_replica_could_start() -> None:
    orchestrator = Orchestrator()
    waiting = asyncio.create_task(orchestrator.exhausted())
    await asyncio.sleep(0)
    assert not waiting.done()
    orchestrator.replicas_exhausted("replica 0: no such model")
    assert await within_bound(waiting) == "replica 0: no such model"


async def test_an_unknown_routing_name_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="round_robin"):
        Orchestrator(routing="fastest")


async def test_the_estimator_is_a_hook() -> None:
    class Learned(RunningMean):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def observe(self, params: SamplingParams, inference_s: float) -> None:
            self.seen.append(inference_s)

    learned = Learned()
    server = Server(estimator=learned)
    server.submit()
    server.output()
    assert learned.seen == [1.0]
