"""Keeps the replicas of a stage alive: starts them in parallel, restarts the dead, stops them all.

Each replica has one task that starts an incarnation, waits for its end and decides when to start the next. What an
incarnation says arrives synchronously on the event loop and goes to the listener (the orchestrator) in order, so a
result never overtakes the news that its replica is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from triptych.messages import FromReplica, Heartbeat, Ready, ReplicaSpec, StartFailed, Stop, ToReplica
from triptych.replicas.base import Executor, ReplicaProcess
from triptych.replicas.restart import RestartRule
from triptych.replicas.state import ReplicaState, ReplicaStatus, SupervisorListener
from triptych.replicas.transitions import Trigger, next_state
from triptych.wire import Frame

__all__ = ["Supervisor"]

_KILL_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Replica:
    """A place for one engine process, and the incarnation that fills it now."""

    spec: ReplicaSpec
    restart: RestartRule = field(default_factory=RestartRule)
    state: ReplicaState = ReplicaState.STARTING
    current: _Incarnation | None = None
    incarnation: int = 0
    restarts: int = 0
    failed_first_start: bool = False
    last_error: str | None = None


class _Incarnation:
    """Listens to one process of a replica; implements `replicas.base.ReplicaListener`."""

    def __init__(self, supervisor: Supervisor, replica: _Replica, number: int) -> None:
        self.supervisor = supervisor
        self.replica = replica
        self.number = number
        self.process: ReplicaProcess | None = None
        self.ready_at: float | None = None
        self.error: str | None = None
        self.loaded = asyncio.Event()  # ready, or gone
        self.exited = asyncio.Event()

    def on_message(self, message: FromReplica, frames: Sequence[Frame]) -> None:
        """Sort out what concerns the replica from what concerns a unit."""
        match message:
            case Heartbeat():
                pass
            case Ready():
                self.supervisor._became_ready(self, message)
            case StartFailed():
                self.error = message.message
                if self.process is not None:  # it is about to leave; make sure
                    self.process.kill()
            case _ if message.address.incarnation == self.number:
                self.supervisor._listener.replica_message(self.replica.spec.replica_id, message, frames)
            case _:
                logger.warning(
                    "message of another incarnation dropped",
                    extra={"replica": self.replica.spec.replica_id, "type": type(message).__name__},
                )

    def on_exit(self, reason: str) -> None:
        """The process is gone."""
        self.supervisor._exited(self, self.error or reason)
        self.loaded.set()
        self.exited.set()


class Supervisor:
    """Runs one process per `ReplicaSpec` until `stop`."""

    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        executor: Executor,
        *,
        listener: SupervisorListener,
        max_parallel_loads: int,
    ) -> None:
        self._executor = executor
        self._listener = listener
        self._replicas = {spec.replica_id: _Replica(spec) for spec in specs}
        self._loading = asyncio.Semaphore(max_parallel_loads)
        self._incarnations = itertools.count(1)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._any_was_ready = False
        self._stopping = False

    async def start(self) -> None:
        """Begin starting every replica; returns at once."""
        for replica_id, replica in self._replicas.items():
            task = asyncio.create_task(self._keep_alive(replica), name=f"replica {replica_id}")
            task.add_done_callback(_report_crash)
            self._tasks[replica_id] = task

    async def stop(self, *, timeout_s: float) -> None:
        """Let running units finish for at most `timeout_s`, then end every process and the executor."""
        # 1. Nothing starts or restarts any more; a start under way is called off and its process ends by end of file.
        self._stopping = True
        for replica in self._replicas.values():
            if replica.state is not ReplicaState.DRAINING:
                self._move(replica, Trigger.STOP_ASKED)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        # 2. Who runs is asked to finish and leave. It does so at once when idle.
        for current in self._live():
            assert current.process is not None
            current.process.send(Stop())
        await self._wait_for_exits(timeout_s)
        # 3. Who did not is killed. SIGKILL cannot be refused, but a process in uninterruptible I/O may delay it.
        for current in self._live():
            assert current.process is not None
            logger.warning(
                "replica did not stop in time; killing it", extra={"replica": current.replica.spec.replica_id}
            )
            current.process.kill()
        await self._wait_for_exits(_KILL_TIMEOUT_S)
        for current in self._live():
            logger.error("replica survives SIGKILL", extra={"replica": current.replica.spec.replica_id})
        # 4. The forkserver last: as long as it lives it reaps the children and tells their exit codes.
        await self._executor.close()

    def send(self, replica_id: int, message: ToReplica, frames: Sequence[Frame] = ()) -> None:
        """Send to the current process of a replica; without one the message is dropped, `replica_lost` tells."""
        current = self._replicas[replica_id].current
        if current is not None and current.process is not None:
            current.process.send(message, frames)

    def statuses(self) -> list[ReplicaStatus]:
        """Every replica in the order of the specs."""
        return [_status(replica) for replica in self._replicas.values()]

    # ---- one replica

    async def _keep_alive(self, replica: _Replica) -> None:
        while True:
            current = await self._run_one(replica)
            now = asyncio.get_running_loop().time()
            delay_s = replica.restart.delay_after_death_s(now=now, ready_at=current.ready_at)
            if delay_s == 0:
                self._move(replica, Trigger.DIED)
            else:
                self._move(replica, Trigger.DIED_EARLY, delay_s=delay_s)
                if current.ready_at is None:
                    self._note_failed_start(replica)
                if replica.state is ReplicaState.FAILED:
                    return
                await asyncio.sleep(delay_s)
                self._move(replica, Trigger.BACKOFF_OVER)
            replica.restarts += 1

    async def _run_one(self, replica: _Replica) -> _Incarnation:
        """Start one incarnation and see it gone."""
        async with self._loading:
            current = _Incarnation(self, replica, next(self._incarnations))
            replica.current, replica.incarnation = current, current.number
            try:
                process = await self._executor.start(replica.spec, current.number, current)
            except OSError as error:
                current.on_exit(f"could not be started: {error}")
                return current
            if not current.exited.is_set():
                current.process = process
                self._move(replica, Trigger.PROCESS_STARTED, pid=process.pids[0] if process.pids else None)
            await current.loaded.wait()
        await current.exited.wait()
        return current

    def _note_failed_start(self, replica: _Replica) -> None:
        replica.failed_first_start = True
        if self._any_was_ready or not all(other.failed_first_start for other in self._replicas.values()):
            return
        reasons = {str(other.last_error): None for other in self._replicas.values()}
        for other in self._replicas.values():
            self._move(other, Trigger.NONE_EVER_READY)
            if other is not replica:
                self._tasks[other.spec.replica_id].cancel()
        self._listener.replicas_exhausted("; ".join(reasons))

    # ---- what incarnations tell

    def _became_ready(self, current: _Incarnation, message: Ready) -> None:
        replica = current.replica
        if self._stopping or replica.state is ReplicaState.FAILED:
            return
        current.ready_at = asyncio.get_running_loop().time()
        self._any_was_ready = True
        self._move(replica, Trigger.BECAME_READY, incarnation=current.number)
        self._listener.replica_ready(replica.spec.replica_id, current.number, message.slots, message.model)
        current.loaded.set()

    def _exited(self, current: _Incarnation, reason: str) -> None:
        replica = current.replica
        if replica.current is not current:
            return
        replica.current, replica.last_error = None, reason
        level = logging.INFO if self._stopping else logging.WARNING
        logger.log(
            level,
            "replica process ended: %s",
            reason,
            extra={"replica": replica.spec.replica_id, "incarnation": current.number},
        )
        if current.ready_at is not None:
            self._listener.replica_lost(replica.spec.replica_id, current.number, reason)

    def _live(self) -> Iterator[_Incarnation]:
        for replica in self._replicas.values():
            if replica.current is not None and replica.current.process is not None:
                yield replica.current

    async def _wait_for_exits(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for current in list(self._live()):
                    await current.exited.wait()

    def _move(self, replica: _Replica, trigger: Trigger, **details: object) -> None:
        before, replica.state = replica.state, next_state(replica.state, trigger)
        logger.info(
            "replica state changed",
            extra={
                "replica": replica.spec.replica_id,
                "before": str(before),
                "after": str(replica.state),
                "trigger": str(trigger),
                **details,
            },
        )


def _status(replica: _Replica) -> ReplicaStatus:
    spec, current = replica.spec, replica.current
    return ReplicaStatus(
        id=spec.replica_id,
        stage_id=spec.stage_id,
        state=replica.state,
        incarnation=replica.incarnation,
        pids=current.process.pids if current is not None and current.process is not None else (),
        devices=spec.devices,
        slots=spec.max_num_seqs,
        restarts=replica.restarts,
        last_error=replica.last_error,
    )


def _report_crash(task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        error = task.exception()
        if error is not None:
            logger.critical("supervision of %s ended by a bug", task.get_name(), exc_info=error)
