"""The asyncio shell of the orchestrator: routes submit requests, the supervisor reports replicas and their messages.

Every call goes through the pure `Core` with the present time; the effects it leaves are carried out at once on the
event loop: messages to replicas, events to streams. One timer per server wakes it for deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, assert_never

from triptych.config.parameter_errors import shown
from triptych.errors import ErrorCode, TriptychError
from triptych.messages import Abort, FromReplica, GenerationRequest, ModelInfo, ToReplica, Update
from triptych.orchestrator.admission import COME_BACK_S
from triptych.orchestrator.core import Core
from triptych.orchestrator.cost import CostModel, Estimator
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
from triptych.orchestrator.events import Readiness, ReplicaView, RequestView
from triptych.orchestrator.routing import create_policy
from triptych.orchestrator.stream import EventStream
from triptych.orchestrator.units import Request
from triptych.orchestrator.views import request_view
from triptych.replicas.state import ReplicaState, ReplicaStatus, SupervisorListener
from triptych.wire import Frame

__all__ = ["EventStream", "Orchestrator", "ReplicaControl"]

logger = logging.getLogger(__name__)

_MIN_TIMER_S = 0.001  # loop clocks count milliseconds; less would spin when a timer fires a little early


class ReplicaControl(Protocol):
    """What the orchestrator needs of the supervisor."""

    def send(self, replica_id: int, message: ToReplica, frames: Sequence[Frame] = ()) -> None:
        """Queue a message to the present incarnation; never blocks, does nothing when it is gone."""

    def excuse(self, deaths: Sequence[tuple[int, int]]) -> None:
        """A request is to blame for these deaths (replica, incarnation), not the replicas."""

    def statuses(self) -> Sequence[ReplicaStatus]:
        """Every replica in order of id."""

    def drain(self, replica_id: int) -> None:
        """Let a replica finish, end and stay away. Raises `TriptychError` (`not_found`, `conflict`)."""

    def restart(self, replica_id: int) -> None:
        """Drain a replica, then start it anew; revives a failed or drained one. Raises like `drain`."""

    def resize(self, count: int) -> None:
        """Let exactly so many replicas run. Raises `TriptychError` (`invalid_value`, `conflict`)."""


class Orchestrator(SupervisorListener):
    """Takes requests, gives event streams. All methods belong to one event loop.

    Raises `ConfigError` for an unknown `routing` name.
    """

    def __init__(
        self,
        *,
        routing: str = "round_robin",
        max_queue_size: int = 1024,
        estimator: Estimator | None = None,
        no_replica_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._core = Core(
            policy=create_policy(routing, CostModel() if estimator is None else estimator),
            max_queue_size=max_queue_size,
            no_replica_timeout_s=no_replica_timeout_s,
        )
        self._clock = clock
        self._unix_offset_s = unix_clock() - clock()
        self._replicas: ReplicaControl | None = None
        self._model: ModelInfo | None = None
        self._serving = asyncio.Event()
        self._streams: dict[str, EventStream] = {}
        self._applying = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = float("inf")
        self._idle = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure = ""

    def attach(self, replicas: ReplicaControl) -> None:
        """Say where replicas are reached; before the first of them is ready."""
        self._replicas = replicas

    async def run(self) -> None:
        """Watch deadlines until cancelled."""
        self._loop = asyncio.get_running_loop()
        try:
            self._set_timer()
            await self._loop.create_future()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_at_s, self._loop = None, float("inf"), None

    # ---- for routes

    def submit(self, request: GenerationRequest, *, outlasts_outages: bool = False) -> EventStream:
        """Accept a request. Raises `TriptychError` (`not_ready`, `draining`, `queue_full`, `deadline_exceeded`).

        While no replica lives it waits for a bounded time (`no_replica_timeout_s`), or, if it `outlasts_outages`, until
        its own deadline.
        """
        self._core.submit(request, self._clock(), outlasts_outages=outlasts_outages)
        stream = self._streams[request.id] = EventStream(request.id, self.abort)
        self._apply()
        self._set_timer()
        return stream

    def abort(
        self, request_id: str, *, code: ErrorCode = ErrorCode.REQUEST_ABORTED, message: str | None = None
    ) -> None:
        """End a request by its internal id. Raises `request_not_found`, or `conflict` when it has ended."""
        self._core.abort(request_id, TriptychError(code, message or "the request was aborted"), self._clock())
        self._apply()

    def update(self, request_id: str, *, priority: int | None = None, timeout_s: float | None = None) -> None:
        """Change priority, or the deadline to `timeout_s` seconds from now. Raises like `abort`."""
        self._core.update(request_id, priority=priority, timeout_s=timeout_s, now=self._clock())
        self._apply()
        self._set_timer()

    def live_requests(self, *, owner: str | None = None) -> list[RequestView]:
        """Requests that have not ended, oldest first; only the owner's when one is given."""
        return self._views(request for request in self._core.live.values() if _belongs(request, owner))

    def find(self, request_id: str, *, owner: str | None = None) -> RequestView:
        """One request, live or ended, by internal id or the client's. Raises `request_not_found` or `conflict`."""
        core = self._core
        core.history.forget(self._clock())
        request = core.live.get(request_id) or core.history.get(request_id)
        if request is not None and _belongs(request, owner):
            return self._views([request])[0]
        matches: list[Request] = []
        for requests in (core.live.values(), core.history):  # a live one is meant, whatever bore the name before
            matches = matches or [
                request
                for request in requests
                if request.spec.client_request_id == request_id and _belongs(request, owner)
            ]
        if not matches:
            raise TriptychError(ErrorCode.REQUEST_NOT_FOUND, f"there is no request {shown(request_id)}")
        if len(matches) > 1:
            text = f"{len(matches)} requests have the id {shown(request_id)}; name one by its internal id"
            raise TriptychError(ErrorCode.CONFLICT, text)
        return self._views(matches)[0]

    def replicas(self) -> list[ReplicaView]:
        """Every replica in order of id."""
        return [self._replica_view(status) for status in self._statuses()]

    def drain_replica(self, replica_id: int) -> ReplicaView:
        """Let a replica finish, end and stay away. Raises `TriptychError` (`not_found`, `conflict`, `draining`)."""
        self._operable().drain(replica_id)
        return self._view_of(replica_id)

    def restart_replica(self, replica_id: int) -> ReplicaView:
        """Drain a replica, then start it anew. Raises like `drain_replica`."""
        self._operable().restart(replica_id)
        return self._view_of(replica_id)

    def resize(self, count: int) -> list[ReplicaView]:
        """Let exactly so many replicas run. Raises `TriptychError` (`invalid_value`, `conflict`, `draining`)."""
        self._operable().resize(count)
        return self.replicas()

    def readiness(self) -> Readiness:
        """Whether new work is taken."""
        core = self._core
        if core.draining:
            return Readiness(False, ErrorCode.DRAINING)
        if not core.was_ready:
            return Readiness(False, ErrorCode.NOT_READY)
        if not core.dispatcher.pool.accepting:
            return Readiness(False, ErrorCode.NO_REPLICA)
        degraded = tuple(s.id for s in self._statuses() if s.wanted and s.state is not ReplicaState.READY)
        return Readiness(True, degraded=degraded)

    @property
    def model(self) -> ModelInfo | None:
        """What the first ready replica said of its model; None before."""
        return self._model

    @property
    def dropped(self) -> dict[str, int]:
        """Late and foreign messages ignored so far, by reason."""
        return dict(self._core.dropped)

    # ---- for the server's life

    def begin_drain(self) -> None:
        """From now on new work and queued units get 503 `draining`; running units go on."""
        self._core.begin_drain(self._clock())
        self._apply()

    async def drained(self) -> None:
        """Return when no unit holds a slot. Unbounded: the caller bounds it."""
        while self._in_flight():
            self._idle.clear()
            await self._idle.wait()

    def abort_all(self, code: ErrorCode) -> None:
        """End every live request with this code."""
        retry_after_s = COME_BACK_S if code is ErrorCode.DRAINING else None
        text = "the server ended the request"
        self._core.abort_all(lambda: TriptychError(code, text, retry_after_s=retry_after_s), self._clock())
        self._apply()

    async def serving(self) -> ModelInfo:
        """Return once the first replica is ready, with what it said of its model."""
        await self._serving.wait()
        assert self._model is not None
        return self._model

    async def failed(self) -> str:
        """Return the reason once the replicas cannot be kept any more: no first start succeeded, or there is a bug."""
        await self._failed.wait()
        return self._failure

    # ---- for the supervisor

    def replica_ready(self, replica_id: int, incarnation: int, slots: int, model: ModelInfo) -> None:
        """The replica takes work."""
        if self._model is None:
            self._model = model
            self._serving.set()
        self._core.replica_ready(replica_id, incarnation, slots, self._clock())
        self._apply()
        self._set_timer()

    def replica_draining(self, replica_id: int, incarnation: int, *, comes_back: bool) -> None:
        """The replica finishes what it has and takes no more."""
        self._core.replica_draining(replica_id, incarnation, self._clock(), comes_back=comes_back)
        self._apply()
        self._set_timer()

    def replica_lost(self, replica_id: int, incarnation: int, reason: str) -> None:
        """The replica is gone; its units are replayed or convicted."""
        self._core.replica_lost(replica_id, incarnation, self._clock())
        self._apply()
        self._set_timer()

    def replica_message(self, replica_id: int, message: FromReplica, frames: Sequence[Frame]) -> None:
        """One message about a unit."""
        self._core.message(replica_id, message, frames, self._clock())
        self._apply()

    def expected_step_s(self, replica_id: int) -> float | None:
        """What the watchdog allows for; None when nothing runs there or nothing is known yet."""
        core = self._core
        expected = [
            core.estimator.step_s(unit.request.work) for unit in core.dispatcher.pool.get(replica_id).units.values()
        ]
        return max((step_s for step_s in expected if step_s is not None), default=None)

    def supervision_failed(self, reason: str) -> None:
        """The replicas cannot be kept any more; the first reason counts."""
        self._failure = self._failure or reason
        self._failed.set()

    # ---- carrying out effects

    def _apply(self) -> None:
        if self._applying:  # a replica answered from within `send`; the loop below takes that too, in order
            return
        self._applying = True
        try:
            effects = self._core.effects
            while effects:
                self._carry_out(effects.popleft())
        finally:
            self._applying = False
        if not self._idle.is_set() and not self._in_flight():
            self._idle.set()

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Dispatch):
            self._control().send(effect.replica_id, effect.message, effect.frames)
        elif isinstance(effect, Publish):
            self._streams[effect.request_id].push(effect.event)
        elif isinstance(effect, Finish):
            self._streams.pop(effect.request_id).end(effect.error)
            logger.debug(
                "request ended", extra={"request": effect.request_id, "error": effect.error and effect.error.code}
            )
        elif isinstance(effect, SendAbort):
            self._control().send(effect.replica_id, Abort(effect.address))
        elif isinstance(effect, SendUpdate):
            self._control().send(effect.replica_id, Update(effect.address, effect.priority))
        elif isinstance(effect, Requeued):
            where = {"request": effect.request_id, "unit": effect.unit}
            logger.warning("unit requeued", extra={**where, "attempt": effect.attempt, "alone": effect.alone})
        elif isinstance(effect, Excuse):
            self._control().excuse(effect.deaths)
        elif isinstance(effect, Drop):
            logger.debug("message dropped", extra={"reason": effect.reason})
        else:
            assert_never(effect)

    def _control(self) -> ReplicaControl:
        if self._replicas is None:
            raise RuntimeError("attach() comes before the first replica is ready")
        return self._replicas

    def _operable(self) -> ReplicaControl:
        if self._core.draining:
            raise TriptychError(ErrorCode.DRAINING, "the server is shutting down", retry_after_s=COME_BACK_S)
        return self._control()

    # ---- timer

    def _set_timer(self) -> None:
        """Arm the timer if something is due before it fires; one that fires too early just arms the next.

        Called after what can bring a new moment: requests, and replicas that come and go; not after unit messages.
        """
        due_at_s = self._core.next_deadline()
        if due_at_s is None or due_at_s >= self._timer_at_s or self._loop is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = due_at_s
        self._timer = self._loop.call_later(max(_MIN_TIMER_S, due_at_s - self._clock()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at_s = None, float("inf")
        self._core.expire(self._clock())
        self._apply()
        self._set_timer()

    # ---- views

    def _in_flight(self) -> int:
        return sum(replica.in_flight for replica in self._core.dispatcher.pool.by_id.values())

    def _statuses(self) -> Sequence[ReplicaStatus]:
        return () if self._replicas is None else self._replicas.statuses()

    def _views(self, requests: Iterable[Request]) -> list[RequestView]:
        requests = list(requests)
        live = any(not request.finished for request in requests)
        forecast = self._core.backlog.recent_forecast(self._clock()) if live else None
        return [
            request_view(request, None if request.finished else forecast, unix_offset_s=self._unix_offset_s)
            for request in requests
        ]

    def _view_of(self, replica_id: int) -> ReplicaView:
        return next(view for view in self.replicas() if view.id == replica_id)

    def _replica_view(self, status: ReplicaStatus) -> ReplicaView:
        replica = self._core.dispatcher.pool.get(status.id)
        return ReplicaView(
            id=status.id,
            stage_id=status.stage_id,
            state=status.state,
            pid=status.pids[0] if status.pids else None,
            pids=status.pids,
            devices=status.devices,
            slots=status.slots,
            in_flight=replica.in_flight,
            completed=replica.completed,
            restarts=status.restarts,
            last_error=status.last_error,
            estimate_error=replica.estimate_error,
        )


def _belongs(request: Request, owner: str | None) -> bool:
    return owner is None or request.spec.owner == owner
