from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from core_driver import output_of
from shell_driver import Server, read, running, within_bound

from triptych.errors import ErrorCode, TriptychError
from triptych.messages import (
    Abort,
    Failure,
    Generate,
    Preview,
    ToReplica,
)
from triptych.orchestrator.events import UnitOutput, UnitPreview, UnitProgress
from triptych.wire import Frame

pytestmark = pytest.mark.anyio


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
    server.orchestrator.replica_message(replica_id, Preview(address, 0, 1, "image/png", 64, 32), [b"p"])
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


async def test_without_another_word_the_limit_is_thirty_seconds() -> None:
    server = Server(clock=lambda: 1000.0)
    server.submit()
    server.orchestrator.replica_lost(0, 1, "killed by signal 9")
    assert server.orchestrator._core.next_deadline() == 1030.0


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
