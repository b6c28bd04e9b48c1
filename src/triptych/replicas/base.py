"""The seam between the server and engine processes: an executor starts replicas, a listener hears of them.

`process` runs them on this machine; another executor (Ray) is another module with the same three classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from triptych.messages import FromReplica, ReplicaSpec, ToReplica
from triptych.wire import Frame

__all__ = ["Executor", "ReplicaListener", "ReplicaProcess"]


class ReplicaListener(Protocol):
    """Who hears of one incarnation of a replica; called on the event loop."""

    def on_message(self, message: FromReplica, frames: Sequence[Frame]) -> None:
        """One message, in the order sent."""

    def on_exit(self, reason: str) -> None:
        """Every process of the incarnation is gone; called once, after the last message. `reason` is one line."""


class ReplicaProcess(Protocol):
    """One incarnation of one replica."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of the replica, leader first."""

    def send(self, message: ToReplica, frames: Sequence[Frame] = ()) -> None:
        """Queue a message; never blocks; does nothing once the process is gone."""

    def kill(self) -> None:
        """End it now (SIGKILL); `on_exit` follows."""

    def dump_stacks(self) -> None:
        """Ask it to write the stacks of its threads to its log; it may be unable to."""

    def is_stopped(self) -> bool:
        """Whether the system holds it (SIGSTOP); False where that cannot be told."""


class Executor(Protocol):
    """Starts replicas."""

    async def start(self, spec: ReplicaSpec, incarnation: int, listener: ReplicaListener) -> ReplicaProcess:
        """Start one incarnation; returns once its process exists, long before it is ready. Raises OSError."""

    async def close(self) -> None:
        """Release what all replicas share (the forkserver)."""
