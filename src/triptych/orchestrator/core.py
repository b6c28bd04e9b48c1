"""The orchestrator without clock, sockets or event loop.

In: requests, what replicas say, what the supervisor says, the time. Out: `effects`, in order. Between them: admission,
units and requests as state machines, placement (see `dispatcher`), retry after a replica's death (see `retry`),
deadlines, and the rule that every accepted request ends exactly once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from triptych.errors import ErrorCode, TriptychError
from triptych.messages import (
    Aborted,
    Address,
    Failure,
    FromReplica,
    Generate,
    GenerationRequest,
    Output,
    Preview,
    Progress,
)
from triptych.orchestrator.admission import COME_BACK_S, MAX_INPUT_BYTES, Admission
from triptych.orchestrator.deadlines import Deadlines
from triptych.orchestrator.dispatcher import Dispatcher
from triptych.orchestrator.effects import (
    Dispatch,
    Drop,
    Effect,
    Excuse,
    Finish,
    Publish,
    Requeued,
    SendAbort,
    SendUpdate,
)
from triptych.orchestrator.events import UnitProgress, UnitState
from triptych.orchestrator.forecast import Backlog
from triptych.orchestrator.history import History
from triptych.orchestrator.outputs import unit_output, unit_preview
from triptych.orchestrator.replica_state import Phase, Replica
from triptych.orchestrator.retry import Verdict, after_death
from triptych.orchestrator.routing import RoutingPolicy
from triptych.orchestrator.units import Request, Trigger, Unit
from triptych.wire import Frame

__all__ = ["Core"]


class Core:
    """Methods that take `now` (clock seconds, never decreasing) may append to `effects`; the caller empties it."""

    def __init__(
        self,
        *,
        policy: RoutingPolicy,
        max_queue_size: int,
        no_replica_timeout_s: float,
        max_input_bytes: int = MAX_INPUT_BYTES,
    ) -> None:
        self.effects: deque[Effect] = deque()
        self.live: dict[str, Request] = {}
        self.history = History()
        self.dropped: Counter[str] = Counter()
        self.dispatcher = Dispatcher(policy)
        self.draining = False
        self.was_ready = False
        self.estimator = policy.estimator
        self.backlog = Backlog(self.dispatcher, self.estimator)
        self._admission = Admission(self.backlog, max_queue_size, max_input_bytes)
        self._no_replica_timeout_s = no_replica_timeout_s
        self._arrivals = 0
        self._outages = 0
        self._deadlines = Deadlines(self._is_current)

    # ---- what clients ask

    def submit(self, spec: GenerationRequest, now: float, *, outlasts_outages: bool = False) -> None:
        """Accept all units of a request, or raise `TriptychError` and accept none."""
        if spec.id in self.live or spec.id in self.history:
            raise ValueError(f"request id {spec.id} was used before")
        self._check_open(spec)
        request = Request(spec, first_arrival=self._arrivals, now=now, outlasts_outages=outlasts_outages)
        turn = self.dispatcher.turn
        self.dispatcher.bind(request.units)
        try:
            self._admission.check(request, now)
        except TriptychError:
            self.dispatcher.turn = turn  # a refused request spends none
            raise
        self._admission.hold(request)
        self._arrivals += spec.n
        self.live[spec.id] = request
        self._deadlines.push(request.deadline_s, request)
        if spec.n == 1 and (replica := self.dispatcher.place_at_once(request.units[0])) is not None:
            self._start(request.units[0], replica, now)
            return
        for unit in request.units:
            self._enqueue(unit, now)
        self._dispatch(now)

    def abort(self, request_id: str, error: TriptychError, now: float) -> None:
        """End a request with this error. Raises `request_not_found`, or `conflict` when it has ended."""
        self._end(self._live_request(request_id), error, now)
        self._dispatch(now)

    def abort_all(self, make_error: Callable[[], TriptychError], now: float) -> None:
        """End every live request, each with an error of its own."""
        for request in list(self.live.values()):
            self._end(request, make_error(), now)
        self._dispatch(now)

    def update(self, request_id: str, *, priority: int | None, timeout_s: float | None, now: float) -> None:
        """Re-sort and tell replicas (priority); move the deadline to `timeout_s` from now. Raises like `abort`."""
        request = self._live_request(request_id)
        if timeout_s is not None:
            request.timeout_s = timeout_s
            request.deadline_s = now + timeout_s
            self._deadlines.push(request.deadline_s, request)
        if priority is not None and priority != request.priority:
            request.priority = priority
            for unit in request.units:
                if unit.state is UnitState.QUEUED:
                    self.dispatcher.reprioritize(unit)
                elif unit.state is UnitState.RUNNING:
                    replica_id, address = _place_of(unit)
                    self.effects.append(SendUpdate(replica_id, address, priority))
            self._dispatch(now)

    def begin_drain(self, now: float) -> None:
        """Refuse new work and end every request that has a unit waiting; what runs goes on."""
        self.draining = True
        self._end_requests_of(self.dispatcher.queue, _draining, now)
        self._dispatch(now)

    # ---- what time brings

    def next_deadline(self) -> float | None:
        """When `expire` has something to do, as far as is known now."""
        return self._deadlines.first()

    def expire(self, now: float) -> None:
        """End requests past their deadline, and those whose patience without any replica is over."""
        while (due := self._deadlines.pop_due(now)) is not None:
            request, outage = due
            if outage:
                text = f"no replica came back within {self._no_replica_timeout_s:g} s"
                error = TriptychError(ErrorCode.NO_REPLICA, text, retry_after_s=COME_BACK_S)
            else:
                text = f"the request did not end within its timeout of {request.timeout_s:g} s"
                error = TriptychError(ErrorCode.DEADLINE_EXCEEDED, text, param="timeout")
            self._end(request, error, now)
        self._dispatch(now)

    # ---- what the supervisor says

    def replica_ready(self, replica_id: int, incarnation: int, slots: int, now: float) -> None:
        """An incarnation takes work."""
        replica = self.dispatcher.pool.get(replica_id)
        if incarnation <= replica.incarnation:
            return self._drop("stale_ready")
        if replica.phase is not Phase.ABSENT:
            self._lose(replica, now)
        replica.incarnation, replica.slots = incarnation, slots
        self.dispatcher.set_phase(replica, Phase.ACCEPTING)
        self.was_ready = True
        return self._dispatch(now)

    def replica_draining(self, replica_id: int, incarnation: int, now: float, *, comes_back: bool = False) -> None:
        """An incarnation finishes what it has and takes no more; `comes_back`: another one follows it."""
        replica = self._incarnation(replica_id, incarnation)
        if replica is None:
            return self._drop("stale_draining")
        self._stop_accepting(replica, Phase.DRAINING, now, comes_back=comes_back)
        return self._dispatch(now)

    def replica_lost(self, replica_id: int, incarnation: int, now: float) -> None:
        """An incarnation is gone; its units are judged one by one."""
        replica = self._incarnation(replica_id, incarnation)
        if replica is None:
            return self._drop("stale_loss")
        self._lose(replica, now)
        return self._dispatch(now)

    # ---- what replicas say

    def message(self, replica_id: int, message: FromReplica, frames: Sequence[Frame], now: float) -> None:
        """One message about a unit; late and foreign ones are dropped and counted."""
        if not isinstance(message, (Progress, Output, Preview, Failure, Aborted)):
            return self._drop("unexpected_message")
        replica = self._incarnation(replica_id, message.address.incarnation)
        if replica is None:
            return self._drop("stale_incarnation")
        unit = replica.units.get(message.address)
        if unit is None:
            return self._drop("stale_unit")
        if isinstance(message, Progress):
            return self._progress(unit, message, now)
        if isinstance(message, Preview):
            return self._preview(unit, message, frames)
        self.dispatcher.release(replica, message.address)
        if unit.state is UnitState.ABORTING:
            unit.fire(Trigger.RELEASE)
        elif isinstance(message, Output):
            self._output(unit, replica, message, frames, now)
        else:
            self._fail(unit, _error_of(message), now)
        return self._dispatch(now)

    def _progress(self, unit: Unit, message: Progress, now: float) -> None:
        unit.started = True
        if unit.state is UnitState.RUNNING:
            unit.progress(message.step, message.steps, now)
            self.effects.append(Publish(unit.request.id, UnitProgress(unit.index, message.step, message.steps)))

    def _preview(self, unit: Unit, message: Preview, frames: Sequence[Frame]) -> None:
        unit.started = True
        if unit.state is not UnitState.RUNNING:
            return
        if not frames or not unit.previews_sent <= message.index < unit.request.spec.previews:
            self._drop("surplus_preview")  # a replay repeats what the client has
            return
        unit.previews_sent = message.index + 1
        self.effects.append(Publish(unit.request.id, unit_preview(unit, message, frames[0])))

    def _output(self, unit: Unit, replica: Replica, message: Output, frames: Sequence[Frame], now: float) -> None:
        if not frames:
            error = TriptychError(ErrorCode.ENGINE_ERROR, f"replica {replica.id} sent an output without data")
            self._fail(unit, error, now)
            return
        request = unit.request
        # The slot was held for longer than the engine computed: encoding and the way are part of the service time.
        service_s = max(message.inference_s, now - unit.dispatched_at_s)
        self.estimator.observe(request.work, service_s, unit.step_s)
        replica.ended(service_s, unit.expected_s)
        unit.fire(Trigger.OUTPUT)
        unit.step = unit.steps = message.steps
        self.effects.append(Publish(request.id, unit_output(unit, message, frames[0])))
        request.unfinished -= 1
        if not request.unfinished:
            self._finish(request, Trigger.OUTPUT, None, now)

    # ---- shared by the above

    def _check_open(self, spec: GenerationRequest) -> None:
        if self.draining:
            raise _draining()
        if not self.was_ready:
            text = "no replica is ready yet"
            raise TriptychError(ErrorCode.NOT_READY, text, retry_after_s=COME_BACK_S)
        if spec.timeout_s <= 0:
            text = f"the deadline was already past on arrival (timeout {spec.timeout_s:g} s)"
            raise TriptychError(ErrorCode.DEADLINE_EXCEEDED, text, param="timeout")

    def _enqueue(self, unit: Unit, now: float) -> None:
        self.dispatcher.push(unit)
        if not self.dispatcher.pool.serves:
            self._bound_patience(unit.request, now)

    def _dispatch(self, now: float) -> None:
        while (placed := self.dispatcher.take_next(now)) is not None:
            self._start(*placed, now)

    def _start(self, unit: Unit, replica: Replica, now: float) -> None:
        request, spec = unit.request, unit.request.spec
        address = Address(spec.id, unit.index, unit.attempt, replica.incarnation)
        self.dispatcher.occupy(replica, address, unit)
        unit.dispatch(address, replica.id, now)
        unit.expected_s = self.estimator.estimate_s(request.work)
        request.fire(Trigger.DISPATCH)
        message = Generate(address, unit.params, spec.output, spec.inputs, spec.previews, request.priority, unit.alone)
        self.effects.append(Dispatch(replica.id, message, spec.frames))

    def _fail(self, unit: Unit, error: TriptychError, now: float) -> None:
        unit.fire(Trigger.FAILURE)
        self._end(unit.request, error, now)

    def _end(self, request: Request, error: TriptychError, now: float) -> None:
        """End a request early: waiting units leave, running ones are told to stop and hold their slot until they do."""
        for unit in request.units:
            if unit.state is UnitState.QUEUED:
                self.dispatcher.queue.remove(unit)
                unit.fire(Trigger.ABORT)
            elif unit.state is UnitState.RUNNING:
                unit.fire(Trigger.ABORT)
                self.effects.append(SendAbort(*_place_of(unit)))
        trigger = Trigger.ABORT if error.code is ErrorCode.REQUEST_ABORTED else Trigger.FAILURE
        self._finish(request, trigger, error, now)

    def _end_requests_of(self, units: Iterable[Unit], make_error: Callable[[], TriptychError], now: float) -> None:
        for request in list(dict.fromkeys(unit.request for unit in units)):
            if not request.finished:
                self._end(request, make_error(), now)

    def _finish(self, request: Request, trigger: Trigger, error: TriptychError | None, now: float) -> None:
        self._admission.let_go(request)
        request.finish(trigger, now=now)
        del self.live[request.id]
        self.history.add(request, now)
        self.effects.append(Finish(request.id, error))

    def _lose(self, replica: Replica, now: float) -> None:
        """Take everything off a dead replica first, so that nothing below speaks to it; then judge and requeue."""
        units = list(replica.units.values())
        replica.units.clear()
        replica.exclusive = False
        self._stop_accepting(replica, Phase.ABSENT, now)
        poison: list[Unit] = []
        requeued: list[Unit] = []
        for unit in units:
            if unit.state is UnitState.ABORTING:
                unit.fire(Trigger.RELEASE)
                continue
            unit.deaths.append((replica.id, replica.incarnation))
            verdict = after_death(started=unit.started, deaths=len(unit.deaths), alone=unit.alone)
            if verdict is Verdict.POISON:
                unit.fire(Trigger.FAILURE)
                poison.append(unit)
                self._excuse(unit.deaths)
                continue
            unit.requeue(alone=verdict is Verdict.REQUEUE_ALONE, now=now)
            self.dispatcher.bind([unit])
            self._enqueue(unit, now)
            self.effects.append(Requeued(unit.request.id, unit.index, unit.attempt, unit.alone))
            requeued.append(unit)
        for unit in poison:
            if not unit.request.finished:
                text = f"{len(unit.deaths)} replicas died under unit {unit.index}, the last while it ran alone"
                self._end(unit.request, TriptychError(ErrorCode.POISON_REQUEST, text), now)
        if self.draining:
            self._end_requests_of(requeued, _draining, now)

    def _excuse(self, deaths: Sequence[tuple[int, int]]) -> None:
        """Not where one replica alone had both deaths while others serve: it may be broken itself."""
        if len({replica_id for replica_id, _ in deaths}) > 1 or not self.dispatcher.pool.accepting:
            self.effects.append(Excuse(tuple(deaths)))

    def _stop_accepting(self, replica: Replica, phase: Phase, now: float, *, comes_back: bool = False) -> None:
        """From the moment that no replica serves any more, whoever waits does so for a bounded time."""
        served = self.dispatcher.pool.serves
        replica.comes_back = comes_back
        self.dispatcher.set_phase(replica, phase)
        if served and not self.dispatcher.pool.serves:
            self._outages += 1
            for request in dict.fromkeys(unit.request for unit in self.dispatcher.queue):
                self._bound_patience(request, now)

    def _bound_patience(self, request: Request, now: float) -> None:
        if not request.outlasts_outages:
            self._deadlines.push(now + self._no_replica_timeout_s, request, self._outages)

    def _is_current(self, moment: float, request: Request, outage: int) -> bool:
        if request.finished:
            return False
        if not outage:
            return moment == request.deadline_s
        if outage != self._outages or self.dispatcher.pool.serves:
            return False
        return any(unit.state is UnitState.QUEUED for unit in request.units)

    def _live_request(self, request_id: str) -> Request:
        request = self.live.get(request_id)
        if request is not None:
            return request
        if request_id in self.history:
            raise TriptychError(ErrorCode.CONFLICT, f"request {request_id} has ended")
        raise TriptychError(ErrorCode.REQUEST_NOT_FOUND, f"there is no request {request_id}")

    def _incarnation(self, replica_id: int, incarnation: int) -> Replica | None:
        replica = self.dispatcher.pool.by_id.get(replica_id)
        if replica is None or replica.incarnation != incarnation or replica.phase is Phase.ABSENT:
            return None
        return replica

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1
        self.effects.append(Drop(reason))


def _place_of(unit: Unit) -> tuple[int, Address]:
    assert unit.replica_id is not None
    assert unit.address is not None
    return unit.replica_id, unit.address


def _draining() -> TriptychError:
    return TriptychError(ErrorCode.DRAINING, "the server is shutting down", retry_after_s=COME_BACK_S)


def _error_of(message: Failure | Aborted) -> TriptychError:
    if isinstance(message, Aborted):
        return TriptychError(ErrorCode.ENGINE_ERROR, "the replica stopped the unit without being asked")
    try:
        code = ErrorCode(message.code)
    except ValueError:  # a plug-in engine's own word
        code = ErrorCode.ENGINE_ERROR
    return TriptychError(code, message.message, param=message.param)
