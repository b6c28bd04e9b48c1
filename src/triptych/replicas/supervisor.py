"""Keeps the replicas of a stage alive: starts them in parallel, replaces the dead and the hung, stops them all.

Each replica has one task that starts an incarnation, waits for its end and decides when to start the next. What an
incarnation says arrives synchronously on the event loop and goes to the listener (the orchestrator) in order, so a
result never overtakes the news that its replica is ready. Operators may drain, restart and resize.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence

from triptych.config.parameters import shown
from triptych.errors import ErrorCode, TriptychError
from triptych.messages import FromReplica, Ready, ReplicaSpec, ToReplica
from triptych.replicas.base import Executor
from triptych.replicas.incarnation import AfterExit, Incarnation, Replica
from triptych.replicas.state import ReplicaState, ReplicaStatus, SupervisorListener
from triptych.replicas.transitions import Trigger, next_state
from triptych.replicas.watchdog import PhaseTimes, ServedTime, Watch, WatchdogLimits
from triptych.wire import Frame

__all__ = ["Supervisor"]

_KILL_TIMEOUT_S = 5.0
_WATCH_INTERVAL_S = 0.5
_DUMP_S = 0.5  # what a hung replica gets to write its stacks

logger = logging.getLogger(__name__)


class Supervisor:
    """Runs one process per `ReplicaSpec` until `stop`; implements `replicas.incarnation.IncarnationOwner`."""

    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        executor: Executor,
        *,
        listener: SupervisorListener,
        max_parallel_loads: int,
        limits: WatchdogLimits | None = None,
    ) -> None:
        self._executor = executor
        self._listener = listener
        self._replicas = {spec.replica_id: Replica(spec) for spec in specs}
        self._loading = asyncio.Semaphore(max_parallel_loads)
        self._incarnations = itertools.count(1)
        self._times = PhaseTimes(limits or WatchdogLimits())
        self._served = ServedTime(0.0, interval_s=_WATCH_INTERVAL_S)
        self._watchdog: asyncio.Task[None] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[asyncio.Task[None]] = set()
        self._any_was_ready = False
        self._stopping = False

    async def start(self) -> None:
        """Begin starting every replica; returns at once."""
        self._watchdog = asyncio.create_task(self._watch(), name="watchdog")
        self._watchdog.add_done_callback(self._report_bug)
        for replica in self._replicas.values():
            self._launch(replica)

    async def stop(self, *, timeout_s: float) -> None:
        """Let running units finish for at most `timeout_s`, then end every process and the executor."""
        # 1. Nothing starts or restarts any more; a start under way is called off and its process ends by end of file.
        self._stopping = True
        for replica in self._replicas.values():
            if replica.state is not ReplicaState.DRAINING:
                self._move(replica, Trigger.STOP_ASKED)
        tasks = [*self._tasks.values(), *self._cancelled, *([self._watchdog] if self._watchdog else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # 2. Who runs is asked to finish and leave. It does so at once when idle.
        for current in self._live():
            current.leave()
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
        if current is not None:
            current.send(message, frames)

    def statuses(self) -> list[ReplicaStatus]:
        """Every replica in the order of the specs."""
        return [replica.status() for replica in self._replicas.values()]

    def excuse(self, deaths: Sequence[tuple[int, int]]) -> None:
        """A request is to blame for these deaths (replica, incarnation): who waits because of one starts now."""
        for replica_id, incarnation in deaths:
            replica = self._replicas[replica_id]
            if replica.restart.excuse(incarnation) and replica.state is ReplicaState.BACKING_OFF:
                replica.woken.set()

    # ---- what operators ask

    def drain(self, replica_id: int) -> None:
        """Take no more, finish what runs, end the process and stay away until `restart`.

        Raises `TriptychError`: `not_found`, or `conflict` for a replica that has failed and before `start`.
        """
        replica = self._asked(replica_id)
        if replica.state is ReplicaState.FAILED:
            raise TriptychError(ErrorCode.CONFLICT, f"replica {replica_id} has failed; a restart revives it")
        self._leave(replica, AfterExit.REST)

    def restart(self, replica_id: int) -> None:
        """Drain, then a new process; revives a failed or drained replica. Raises like `drain`."""
        replica = self._asked(replica_id)
        replica.wanted = True
        self._revive(replica)

    def resize(self, count: int) -> None:
        """Let exactly `count` replicas run: drain those with the highest ids, or start those with the lowest.

        One that has failed does not run: it is started like those that rest.
        Raises `TriptychError`: `invalid_value` outside 1 to the number of replicas, `conflict` before `start`.
        """
        most = len(self._replicas)
        if not 1 <= count <= most:
            text = f"count must be 1 to {most}, which is what the devices of this stage are cut for, got {shown(count)}"
            raise TriptychError(ErrorCode.INVALID_VALUE, text, param="count")
        self._check_started()
        running = [replica for replica in self._replicas.values() if replica.runs]
        resting = [replica for replica in self._replicas.values() if not replica.runs]
        for replica in running[count:]:
            self._leave(replica, AfterExit.REST)
        for replica in resting[: max(0, count - len(running))]:
            self._revive(replica)
        for replica in self._replicas.values():
            replica.wanted = replica.runs

    def _asked(self, replica_id: int) -> Replica:
        replica = self._replicas.get(replica_id)
        if replica is None:
            known = ", ".join(map(str, self._replicas))
            raise TriptychError(ErrorCode.NOT_FOUND, f"there is no replica {replica_id}; there are {known}")
        self._check_started()
        return replica

    def _check_started(self) -> None:
        if not self._tasks or self._stopping:
            raise TriptychError(ErrorCode.CONFLICT, "the replicas are not running: the server starts or stops")

    def _revive(self, replica: Replica) -> None:
        replica.restart.forgive()
        task = self._tasks[replica.spec.replica_id]
        if replica.state is ReplicaState.STARTING:
            return
        if replica.state is ReplicaState.BACKING_OFF:
            self._move(replica, Trigger.RESTART_ASKED)
            replica.woken.set()
        elif task.done() or task in self._cancelled:
            self._move(replica, Trigger.RESTART_ASKED)
            replica.restarts += 1
            self._launch(replica)
        else:
            self._leave(replica, AfterExit.RESTART)

    def _leave(self, replica: Replica, after_exit: AfterExit) -> None:
        """Take a replica out of service; `after_exit` says for how long."""
        before, current, decided = replica.state, replica.current, replica.after_exit
        replica.after_exit = after_exit
        if before is ReplicaState.DRAINING:
            if current is not None and current.ready_at is not None and decided is not after_exit:
                self._tell_draining(current)
            return
        self._move(replica, Trigger.DRAIN_ASKED)
        if current is not None and before is ReplicaState.READY:
            # The orchestrator first: nothing may follow the message that ends the process.
            self._tell_draining(current)
            current.leave()
        elif current is not None and current.process is not None:
            current.process.kill()  # it is loading, so no unit is lost
        elif before not in (ReplicaState.READY, ReplicaState.WARMING):
            replica.current = None  # no process yet, or none any more
            self._cancel(replica)
        # Otherwise it died in this moment: its task sees `after_exit` next.

    def _tell_draining(self, current: Incarnation) -> None:
        replica = current.replica
        comes_back = replica.after_exit is AfterExit.RESTART
        self._listener.replica_draining(replica.spec.replica_id, current.number, comes_back=comes_back)

    # ---- one replica

    def _launch(self, replica: Replica) -> None:
        replica.after_exit = AfterExit.RECOVER
        task = asyncio.create_task(self._keep_alive(replica), name=f"replica {replica.spec.replica_id}")
        task.add_done_callback(self._report_bug)
        self._tasks[replica.spec.replica_id] = task

    def _cancel(self, replica: Replica) -> None:
        task = self._tasks[replica.spec.replica_id]
        task.cancel()
        self._cancelled.add(task)
        task.add_done_callback(self._cancelled.discard)

    async def _keep_alive(self, replica: Replica) -> None:
        while True:
            current = await self._run_one(replica)
            if replica.after_exit is AfterExit.RECOVER:
                if not await self._recover(replica, current):
                    return
            else:
                if replica.state is not ReplicaState.DRAINING:
                    self._move(replica, Trigger.DRAIN_ASKED)
                if replica.after_exit is AfterExit.REST:
                    return
                replica.after_exit = AfterExit.RECOVER
                self._move(replica, Trigger.RESTART_ASKED)
            replica.restarts += 1

    async def _run_one(self, replica: Replica) -> Incarnation:
        """Start one incarnation and see it gone."""
        async with self._loading:
            watch = Watch(self._times, self._read_served())
            current = Incarnation(self, replica, next(self._incarnations), watch, self._read_served)
            replica.current, replica.incarnation = current, current.number
            try:
                process = await self._executor.start(replica.spec, current.number, current)
            except OSError as error:
                current.on_exit(f"could not be started: {error}")
                return current
            except asyncio.CancelledError:
                if replica.current is current:
                    replica.current = None
                raise
            if not current.exited.is_set():
                current.process = process
                self._move(replica, Trigger.PROCESS_STARTED, pid=process.pids[0] if process.pids else None)
            await current.loaded.wait()
        await current.exited.wait()
        if current.bug is not None:
            raise current.bug
        return current

    async def _recover(self, replica: Replica, current: Incarnation) -> bool:
        """After an unasked death: return when it is time for the next start; False if there shall be none."""
        rule, now = replica.restart, asyncio.get_running_loop().time()
        delay_s = rule.delay_after_death_s(current.number, now=now, ready_at=current.ready_at, served=current.served)
        if delay_s == 0:
            self._move(replica, Trigger.DIED)
            return True
        # The last one that could serve goes on trying, however often it dies.
        if rule.in_crash_loop and any(other.state is ReplicaState.READY for other in self._others(replica)):
            logger.error(
                "replica is in a crash loop and is given up until somebody restarts it: %s",
                replica.last_error,
                extra={"replica": replica.spec.replica_id},
            )
            self._move(replica, Trigger.CRASH_LOOP)
            return False
        self._move(replica, Trigger.DIED_EARLY, delay_s=delay_s)
        if current.ready_at is None:
            self._note_failed_start(replica)
        if replica.state is ReplicaState.FAILED:
            return False
        replica.woken.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await replica.woken.wait()
        if replica.state is ReplicaState.BACKING_OFF:
            self._move(replica, Trigger.BACKOFF_OVER)
        return True

    def _note_failed_start(self, replica: Replica) -> None:
        replica.failed_first_start = True
        if self._any_was_ready or not all(other.failed_first_start for other in self._replicas.values()):
            return
        reasons = {str(other.last_error): None for other in self._replicas.values()}
        for other in self._replicas.values():
            if other.state is not ReplicaState.DRAINING:
                self._move(other, Trigger.NONE_EVER_READY)
            if other is not replica:
                self._cancel(other)
        self._listener.supervision_failed("no replica could start: " + "; ".join(reasons))

    def _others(self, replica: Replica) -> Iterator[Replica]:
        return (other for other in self._replicas.values() if other is not replica)

    # ---- the watchdog

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._served = ServedTime(loop.time(), interval_s=_WATCH_INTERVAL_S)
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now = self._served.tick(loop.time())
            for current in list(self._live()):
                assert current.process is not None
                if not current.condemned:
                    step_s = self._listener.expected_step_s(current.replica.spec.replica_id)
                    stopped = current.process.is_stopped
                    reason = current.watch.verdict(now, is_stopped=stopped, expected_step_s=step_s)
                    if reason is not None:
                        self._replace_hung(current, reason)

    def _replace_hung(self, current: Incarnation, reason: str) -> None:
        assert current.process is not None
        replica_id = current.replica.spec.replica_id
        logger.error("replica is killed: %s", reason, extra={"replica": replica_id, "incarnation": current.number})
        current.condemned, current.error = True, reason
        if current.replica.state is ReplicaState.READY:
            self._listener.replica_draining(replica_id, current.number, comes_back=False)
        current.process.dump_stacks()
        asyncio.get_running_loop().call_later(_DUMP_S, current.process.kill)

    def _read_served(self) -> float:
        return self._served.read(asyncio.get_running_loop().time())

    # ---- replicas.incarnation.IncarnationOwner

    def became_ready(self, current: Incarnation, message: Ready) -> None:
        """It takes work, unless it was told to end meanwhile."""
        replica = current.replica
        if replica.state in (ReplicaState.DRAINING, ReplicaState.FAILED):
            return
        current.ready_at = asyncio.get_running_loop().time()
        self._any_was_ready = True
        self._move(replica, Trigger.BECAME_READY, incarnation=current.number)
        self._listener.replica_ready(replica.spec.replica_id, current.number, message.slots, message.model)
        current.loaded.set()

    def unit_message(self, current: Incarnation, message: FromReplica, frames: Sequence[Frame]) -> None:
        """The listener checks the address; foreign ones are dropped and counted there."""
        self._listener.replica_message(current.replica.spec.replica_id, message, frames)

    def exited(self, current: Incarnation, reason: str) -> None:
        """It is gone, and what ran on it."""
        replica = current.replica
        if replica.current is not current:
            return
        asked = self._stopping or replica.state is ReplicaState.DRAINING
        replica.current = None
        if not asked or current.error is not None:
            replica.last_error = reason
        logger.log(
            logging.INFO if asked else logging.WARNING,
            "replica process ended: %s",
            reason,
            extra={"replica": replica.spec.replica_id, "incarnation": current.number},
        )
        if current.ready_at is not None:
            self._listener.replica_lost(replica.spec.replica_id, current.number, reason)

    # ---- shared by the above

    def _live(self) -> Iterator[Incarnation]:
        for replica in self._replicas.values():
            if replica.current is not None and replica.current.process is not None:
                yield replica.current

    async def _wait_for_exits(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for current in list(self._live()):
                    await current.exited.wait()

    def _report_bug(self, task: asyncio.Task[None]) -> None:
        """Without its task a replica would stay down for ever and nobody would know: the server ends instead."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.critical("supervision ended by a bug", exc_info=error, extra={"task": task.get_name()})
        text = f"a bug in the supervisor ({task.get_name()}): {type(error).__name__}: {error}"
        self._listener.supervision_failed(" ".join(text.split()))

    def _move(self, replica: Replica, trigger: Trigger, **details: object) -> None:
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
