"""One replica and the process that fills its place now, as the supervisor keeps them.

An incarnation hears what its process says, keeps its watch fed, and passes on what concerns units. What follows from
it (states, restarts, kills) is the supervisor's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from triptych.messages import (
    Aborted,
    Failure,
    FromReplica,
    Generate,
    Heartbeat,
    ModelInfo,
    Output,
    Ready,
    ReplicaSpec,
    StartFailed,
    Stop,
    ToReplica,
)
from triptych.replicas.base import ReplicaProcess
from triptych.replicas.restart import RestartRule
from triptych.replicas.state import ReplicaState, ReplicaStatus
from triptych.replicas.watchdog import Watch
from triptych.wire import Frame

__all__ = ["AfterExit", "Incarnation", "IncarnationOwner", "Replica"]


class AfterExit(Enum):
    """What follows the end of the process: the restart rule decides, or an operator has."""

    RECOVER = auto()
    REST = auto()
    RESTART = auto()


@dataclass(eq=False, slots=True)
class Replica:
    """A place for one engine process, and the incarnation that fills it now."""

    spec: ReplicaSpec
    restart: RestartRule = field(default_factory=RestartRule)
    state: ReplicaState = ReplicaState.STARTING
    current: Incarnation | None = None
    after_exit: AfterExit = AfterExit.RECOVER
    woken: asyncio.Event = field(default_factory=asyncio.Event)  # ends a back-off early
    incarnation: int = 0
    restarts: int = 0
    failed_first_start: bool = False
    wanted: bool = True
    last_error: str | None = None

    @property
    def runs(self) -> bool:
        """Whether it serves or comes back by itself: it has not failed, and nobody has drained it for good."""
        rests = self.state is ReplicaState.DRAINING and self.after_exit is AfterExit.REST
        return not rests and self.state is not ReplicaState.FAILED

    def status(self) -> ReplicaStatus:
        """As others see it."""
        current = self.current
        process = None if current is None else current.process
        return ReplicaStatus(
            id=self.spec.replica_id,
            stage_id=self.spec.stage_id,
            state=self.state,
            incarnation=self.incarnation,
            pids=() if current is None or process is None else current.pids or process.pids,
            devices=self.spec.devices,
            slots=self.spec.max_num_seqs,
            restarts=self.restarts,
            last_error=self.last_error,
            wanted=self.wanted,
        )


class IncarnationOwner(Protocol):
    """What an incarnation tells the supervisor."""

    def became_ready(self, current: Incarnation, message: Ready) -> None:
        """It takes work."""

    def unit_message(self, current: Incarnation, message: FromReplica, frames: Sequence[Frame]) -> None:
        """It speaks of a unit."""

    def exited(self, current: Incarnation, reason: str) -> None:
        """Its process is gone."""


class Incarnation:
    """Listens to one process of a replica; implements `replicas.base.ReplicaListener`."""

    def __init__(
        self, owner: IncarnationOwner, replica: Replica, number: int, watch: Watch, clock: Callable[[], float]
    ) -> None:
        """`clock` reads the time that `watch` goes by."""
        self.replica = replica
        self.number = number
        self.watch = watch
        self.process: ReplicaProcess | None = None
        self.model: ModelInfo | None = None
        self.pids: tuple[int, ...] = ()  # as the replica tells them once it is ready: leader first, then followers
        self.ready_at: float | None = None
        self.served = False  # has completed a unit
        self.condemned = False  # about to be killed by the watchdog
        self.error: str | None = None
        self.bug: Exception | None = None  # what went wrong while its end was told
        self.loaded = asyncio.Event()  # ready, or gone
        self.exited = asyncio.Event()
        self._owner = owner
        self._clock = clock

    def on_message(self, message: FromReplica, frames: Sequence[Frame]) -> None:
        """Sort out what concerns the replica from what concerns a unit."""
        match message:
            case Heartbeat():
                self.watch.heard(message.steps, message.phase, self._clock())
            case Ready():
                self.watch.ready(self._clock(), message.model.warm_up)
                self.model = message.model
                self.pids = message.pids
                self._owner.became_ready(self, message)
            case StartFailed():
                self.error = message.message
                if self.process is not None:  # it is about to leave; make sure
                    self.process.kill()
            case _:
                if isinstance(message, Output | Failure | Aborted):
                    self.watch.ended(message.address, self._clock())
                    self.served = self.served or isinstance(message, Output)
                self._owner.unit_message(self, message, frames)

    def on_exit(self, reason: str) -> None:
        """The process is gone."""
        try:
            self._owner.exited(self, self.error or reason)
        except Exception as error:  # noqa: BLE001 - raised again by the task that keeps this replica
            self.bug = error
        self.loaded.set()
        self.exited.set()

    def send(self, message: ToReplica, frames: Sequence[Frame] = ()) -> None:
        """Queue a message to the process, if it exists."""
        if self.process is None:
            return
        if isinstance(message, Generate):
            self.watch.sent(message.address, self._work(message), self._clock())
        self.process.send(message, frames)

    def leave(self) -> None:
        """Let running units finish, then end."""
        self.watch.leave(self._clock())
        self.send(Stop())

    def _work(self, message: Generate) -> float:
        """Pixels times frames of a unit."""
        params, model = message.params, self.model
        width = params.width or (model.default_width if model else 1)
        height = params.height or (model.default_height if model else 1)
        return float(width * height * (params.num_frames or (model.default_num_frames if model else 1)))
