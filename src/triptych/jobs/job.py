"""One video job: what was asked, how far it is, what came of it. Immutable; every change is a new value.

Its status only moves forward: queued, in_progress, then completed or failed. That holds over restarts of the server,
too: an interrupted job runs again as the same job, with the same seed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from triptych.errors import ErrorCode, TriptychError
from triptych.messages import GenerationRequest
from triptych.orchestrator.events import UnitMetrics

__all__ = ["EARLIER", "IdempotencyKey", "Job", "JobFailure", "JobStatus", "VideoFile", "new_job_id"]


class JobStatus(StrEnum):
    """Life of a job, in OpenAI's words."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"


_BEFORE_THE_END = (JobStatus.QUEUED, JobStatus.IN_PROGRESS)

EARLIER: Mapping[JobStatus, tuple[JobStatus, ...]] = {
    JobStatus.QUEUED: (),
    JobStatus.IN_PROGRESS: (JobStatus.QUEUED,),
    JobStatus.COMPLETED: _BEFORE_THE_END,
    JobStatus.FAILED: _BEFORE_THE_END,
}
"""From which status each one may be reached."""


class JobFailure(msgspec.Struct, frozen=True):
    """Why a job failed; `code` is from the closed list."""

    code: ErrorCode
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: TriptychError) -> JobFailure:
        """The failure that this error tells of."""
        return cls(error.code, error.message, error.param)


class VideoFile(msgspec.Struct, frozen=True):
    """What a completed job made; sizes in pixels and bytes."""

    size_bytes: int
    width: int
    height: int
    num_frames: int
    fps: int
    metrics: UnitMetrics


class IdempotencyKey(msgspec.Struct, frozen=True):
    """The client's key of the request that made a job, and a digest of that request."""

    key: str
    digest: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One job; times are Unix seconds.

    `request` is without its input pictures, which the store keeps apart until the job has ended. `patient` jobs wait
    in the queue as long as it takes, and their timeout counts from their start. `interruptions` counts the servers that
    ended while the job was in progress.
    """

    id: str
    request: GenerationRequest
    created_at: float
    status: JobStatus = JobStatus.QUEUED
    patient: bool = True
    interruptions: int = 0
    ended_at: float | None = None
    expires_at: float | None = None
    failure: JobFailure | None = None
    video: VideoFile | None = None
    idempotency: IdempotencyKey | None = None
    ignored_parameters: tuple[str, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.ended_at is not None


def new_job_id() -> str:
    """A unique id; ids sort by the time they were made, so that a page of jobs can start behind one that is gone."""
    return f"video_{time.time_ns() // 1000:014x}{secrets.token_hex(9)}"
