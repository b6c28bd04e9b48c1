"""An orchestrator between a test and replicas that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from core_driver import MODEL, make_request, output_of

from triptych.messages import (
    Aborted,
    Address,
    Generate,
    Progress,
    ToReplica,
)
from triptych.orchestrator.orchestrator import EventStream, Orchestrator
from triptych.replicas.state import ReplicaState, ReplicaStatus
from triptych.wire import Frame

BOUND_S = 10.0


class FakeReplicas:
    """Remembers what was sent; says what the test makes it say."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, ToReplica]] = []
        self.states: list[ReplicaState] = []
        self.asked: list[tuple[str, int]] = []
        self.excused: list[tuple[int, int]] = []

    def send(self, replica_id: int, message: ToReplica, frames: Sequence[Frame] = ()) -> None:
        self.sent.append((replica_id, message))

    def statuses(self) -> Sequence[ReplicaStatus]:
        return [
            ReplicaStatus(number, 0, state, 1, (100 + number,) if state is ReplicaState.READY else (), ("0",), 1, 0)
            for number, state in enumerate(self.states)
        ]

    def excuse(self, deaths: Sequence[tuple[int, int]]) -> None:
        self.excused += deaths

    def drain(self, replica_id: int) -> None:
        self.asked.append(("drain", replica_id))
        self.states[replica_id] = ReplicaState.DRAINING

    def restart(self, replica_id: int) -> None:
        self.asked.append(("restart", replica_id))

    def resize(self, count: int) -> None:
        self.asked.append(("resize", count))

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
