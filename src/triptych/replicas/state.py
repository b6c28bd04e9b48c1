"""Life of a replica and what the supervisor tells of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from triptych.messages import FromReplica, ModelInfo
from triptych.wire import Frame

__all__ = ["ReplicaState", "ReplicaStatus", "SupervisorListener"]


class ReplicaState(StrEnum):
    """Life of a replica, as `/v1/replicas` names it."""

    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    BACKING_OFF = "backing_off"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica as its supervisor sees it; `pids` is empty while dead, leader first otherwise.

    `wanted` is False for a replica beyond the number that an operator asked for: its absence is no loss.
    """

    id: int
    stage_id: int
    state: ReplicaState
    incarnation: int
    pids: tuple[int, ...]
    devices: tuple[str, ...]
    slots: int
    restarts: int
    last_error: str | None = None
    wanted: bool = True


class SupervisorListener(Protocol):
    """Who hears of replicas (the orchestrator); called on the event loop, in order."""

    def replica_ready(self, replica_id: int, incarnation: int, slots: int, model: ModelInfo) -> None:
        """The replica takes work."""

    def replica_draining(self, replica_id: int, incarnation: int, *, comes_back: bool) -> None:
        """The replica finishes what it has and takes no more; `comes_back`: then it is started anew.

        Told again when that is decided otherwise meanwhile.
        """

    def replica_lost(self, replica_id: int, incarnation: int, reason: str) -> None:
        """A replica that was ready is gone, with all that ran on it."""

    def replica_message(self, replica_id: int, message: FromReplica, frames: Sequence[Frame]) -> None:
        """Progress, Preview, Output, Failure or Aborted of a unit."""

    def expected_step_s(self, replica_id: int) -> float | None:
        """Expected seconds of the longest denoising step that runs on a replica; None when nothing is known."""

    def supervision_failed(self, reason: str) -> None:
        """Every replica failed its first start, or supervision has a bug: the server must end. May be called again."""
