"""Requests and units as explicit state machines: an enum, a table of transitions, the last trigger kept.

A request is cut into n units; unit i uses seed + i. Both outlive their end for a while, as history, without prompt
and pictures. Changes of state happen here and nowhere else; an illegal one raises.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from triptych.messages import Address, GenerationRequest, SamplingParams
from triptych.orchestrator.events import RequestStatus, UnitState
from triptych.orchestrator.queue import ANY
from triptych.orchestrator.work import work_of

__all__ = ["REQUEST_TRANSITIONS", "UNIT_TRANSITIONS", "IllegalTransition", "Request", "Trigger", "Unit"]


class Trigger(StrEnum):
    """What moves a unit or a request."""

    DISPATCH = "dispatch"
    OUTPUT = "output"
    FAILURE = "failure"
    ABORT = "abort"
    RELEASE = "release"  # the replica let go of an aborted unit: Aborted, Output, Failure or death
    REQUEUE = "requeue"


class IllegalTransition(Exception):
    """A bug: this trigger has no meaning in this state."""


UNIT_TRANSITIONS: dict[tuple[UnitState, Trigger], UnitState] = {
    (UnitState.QUEUED, Trigger.DISPATCH): UnitState.RUNNING,
    (UnitState.QUEUED, Trigger.ABORT): UnitState.ABORTED,
    (UnitState.RUNNING, Trigger.OUTPUT): UnitState.COMPLETED,
    (UnitState.RUNNING, Trigger.FAILURE): UnitState.FAILED,
    (UnitState.RUNNING, Trigger.ABORT): UnitState.ABORTING,
    (UnitState.RUNNING, Trigger.REQUEUE): UnitState.QUEUED,
    (UnitState.ABORTING, Trigger.RELEASE): UnitState.ABORTED,
}

REQUEST_TRANSITIONS: dict[tuple[RequestStatus, Trigger], RequestStatus] = {
    (RequestStatus.QUEUED, Trigger.DISPATCH): RequestStatus.RUNNING,
    (RequestStatus.QUEUED, Trigger.FAILURE): RequestStatus.FAILED,
    (RequestStatus.QUEUED, Trigger.ABORT): RequestStatus.ABORTED,
    (RequestStatus.RUNNING, Trigger.DISPATCH): RequestStatus.RUNNING,
    (RequestStatus.RUNNING, Trigger.OUTPUT): RequestStatus.COMPLETED,
    (RequestStatus.RUNNING, Trigger.FAILURE): RequestStatus.FAILED,
    (RequestStatus.RUNNING, Trigger.ABORT): RequestStatus.ABORTED,
}


class Unit:
    """One output of one request. Times are readings of the caller's clock in seconds."""

    __slots__ = (
        "address",
        "alone",
        "arrival",
        "attempt",
        "deaths",
        "dispatched_at_s",
        "expected_s",
        "first_step",
        "first_step_at_s",
        "index",
        "lane",
        "previews_sent",
        "progressed_at_s",
        "queue_s",
        "queued_at_s",
        "replica_id",
        "request",
        "started",
        "state",
        "step",
        "steps",
        "trigger",
    )

    def __init__(self, request: Request, index: int, arrival: int, now: float) -> None:
        self.request = request
        self.index = index
        self.arrival = arrival
        self.state = UnitState.QUEUED
        self.trigger: Trigger | None = None
        self.lane = ANY
        self.attempt = 1
        self.deaths: list[tuple[int, int]] = []  # (replica, incarnation) that died under it
        self.alone = False
        self.started = False
        self.replica_id: int | None = None
        self.address: Address | None = None
        self.queued_at_s = now
        self.dispatched_at_s = now
        self.expected_s: float | None = None  # in a slot, as estimated at dispatch
        self.queue_s = 0.0
        self.step = 0
        self.steps = 0
        self.first_step = 0  # the first one heard of
        self.first_step_at_s = now
        self.progressed_at_s = now
        self.previews_sent = 0

    @property
    def params(self) -> SamplingParams:
        """Parameters with this unit's own seed."""
        params = self.request.spec.params
        return msgspec.structs.replace(params, seed=params.seed + self.index) if self.index else params

    def fire(self, trigger: Trigger) -> None:
        """Change state. Raises `IllegalTransition`."""
        try:
            self.state = UNIT_TRANSITIONS[self.state, trigger]
        except KeyError:
            raise IllegalTransition(
                f"unit {self.index} of {self.request.id}: {trigger} while {self.state} (after {self.trigger})"
            ) from None
        self.trigger = trigger

    @property
    def step_s(self) -> float | None:
        """Mean seconds between the steps heard of in this try; None before the second."""
        steps = self.step - self.first_step
        return (self.progressed_at_s - self.first_step_at_s) / steps if self.first_step and steps > 0 else None

    def progress(self, step: int, steps: int, now: float) -> None:
        """So many of so many steps are done."""
        self.step, self.steps, self.progressed_at_s = step, steps, now
        if step and not self.first_step:
            self.first_step, self.first_step_at_s = step, now

    def dispatch(self, address: Address, replica_id: int, now: float) -> None:
        """To running, on this replica under this address."""
        self.fire(Trigger.DISPATCH)
        self.address, self.replica_id = address, replica_id
        self.dispatched_at_s = now
        self.queue_s += now - self.queued_at_s

    def requeue(self, *, alone: bool, now: float) -> None:
        """Back to queued for the next attempt, with the arrival number it had."""
        self.fire(Trigger.REQUEUE)
        self.attempt += 1
        self.alone = alone
        self.started = False
        self.address = self.replica_id = None
        self.queued_at_s = now
        self.step = self.steps = self.first_step = 0


class Request:
    """One accepted request and its units; `outlasts_outages`: only its deadline ends its wait for a replica."""

    __slots__ = (
        "created_at_s",
        "deadline_s",
        "finished_at_s",
        "id",
        "outlasts_outages",
        "priority",
        "spec",
        "status",
        "timeout_s",
        "trigger",
        "unfinished",
        "units",
        "work",
    )

    def __init__(
        self, spec: GenerationRequest, *, first_arrival: int, now: float, outlasts_outages: bool = False
    ) -> None:
        self.id = spec.id
        self.spec = spec
        self.outlasts_outages = outlasts_outages
        self.status = RequestStatus.QUEUED
        self.trigger: Trigger | None = None
        self.priority = spec.priority
        self.timeout_s = spec.timeout_s
        self.created_at_s = now
        self.deadline_s = now + spec.timeout_s
        self.finished_at_s: float | None = None
        self.unfinished = spec.n
        self.work = work_of(spec.params)
        self.units = [Unit(self, index, first_arrival + index, now) for index in range(spec.n)]

    @property
    def input_bytes(self) -> int:
        """What its input pictures take in memory until its end."""
        return sum(map(len, self.spec.frames))

    @property
    def finished(self) -> bool:
        """Whether the client has its answer; aborted units may still hold their slots."""
        return self.finished_at_s is not None

    def fire(self, trigger: Trigger) -> None:
        """Change state. Raises `IllegalTransition`."""
        try:
            self.status = REQUEST_TRANSITIONS[self.status, trigger]
        except KeyError:
            raise IllegalTransition(f"request {self.id}: {trigger} while {self.status}") from None
        self.trigger = trigger

    def finish(self, trigger: Trigger, *, now: float) -> None:
        """To its one end; lets go of prompt and input pictures."""
        self.fire(trigger)
        self.finished_at_s = now
        seed = self.spec.params.seed
        self.spec = msgspec.structs.replace(
            self.spec, params=SamplingParams(prompt="", seed=seed), inputs=(), frames=()
        )
