"""What a route hears of its request, and what `/v1/requests` and `/v1/replicas` show.

The orchestrator hands a route an event stream: any number of `UnitProgress` and `UnitPreview`, one `UnitOutput` per
unit in the order they finish, then the end; a failure ends the stream early by raising `TriptychError`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from triptych.replicas.state import ReplicaState
from triptych.wire import Frame

__all__ = [
    "Event",
    "Readiness",
    "ReplicaView",
    "RequestStatus",
    "RequestView",
    "UnitMetrics",
    "UnitOutput",
    "UnitPreview",
    "UnitProgress",
    "UnitState",
    "UnitView",
]


class UnitState(StrEnum):
    """Life of a unit: queued, running, aborting (told to stop, slot still held), then one end."""

    QUEUED = "queued"
    RUNNING = "running"
    ABORTING = "aborting"
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"


class RequestStatus(StrEnum):
    """Life of a request: queued until its first unit is dispatched, then running, then one end."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"


class UnitMetrics(msgspec.Struct, frozen=True):
    """The `metrics` object of one output; times in seconds, memory in MB.

    `queue_s` is the time spent waiting for a slot, over all tries; `attempts` is 1 unless a replica died under it.
    """

    replica: int
    queue_s: float
    inference_s: float
    steps: int
    batch_size_mean: float
    peak_memory_mb: float
    attempts: int


class UnitProgress(msgspec.Struct, frozen=True):
    """Step `step` of `steps` of unit `unit` is done."""

    unit: int
    step: int
    steps: int


class UnitPreview(msgspec.Struct, frozen=True):
    """Encoded partial picture `index` of unit `unit`; sizes in pixels."""

    unit: int
    index: int
    mime: str
    data: Frame
    width: int
    height: int


class UnitOutput(msgspec.Struct, frozen=True):
    """Encoded result of unit `unit`; sizes in pixels, `encode_s` seconds of encoding after the inference."""

    unit: int
    seed: int
    mime: str
    data: Frame
    width: int
    height: int
    num_frames: int
    fps: int
    metrics: UnitMetrics
    encode_s: float = 0.0


Event = UnitProgress | UnitPreview | UnitOutput


@dataclass(frozen=True, slots=True)
class UnitView:
    """One entry of `units` in `/v1/requests/{id}`.

    `replica` is None while queued; `queue_position` counts units ahead in the queue and is None when not queued;
    `eta_s` is the expected time to the unit's end in seconds, None when unknown or ended.
    """

    index: int
    state: UnitState
    replica: int | None
    step: int
    steps: int
    queue_position: int | None
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request as `/v1/requests` shows it; times are Unix seconds."""

    id: str
    client_request_id: str | None
    model: str
    owner: str | None
    created_at: float
    finished_at: float | None
    status: RequestStatus
    priority: int
    timeout_s: float
    units: tuple[UnitView, ...]


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica as `/v1/replicas` shows it; `pid` is None while dead.

    `estimate_error` is how far expected service times were off lately: mean absolute error as a fraction of the true
    time, None before anything was estimated.
    """

    id: int
    stage_id: int
    state: ReplicaState
    pid: int | None
    pids: tuple[int, ...]
    devices: tuple[str, ...]
    slots: int
    in_flight: int
    completed: int
    restarts: int
    last_error: str | None = None
    estimate_error: float | None = None


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether work is taken; `reason` is an error code when not, `degraded` names replicas that are not ready."""

    ready: bool
    reason: str | None = None
    degraded: tuple[int, ...] = field(default=())
