"""What every engine looks like to the replica process (and to `triptych generate`).

An engine belongs to one process. `load` and `run` are called on the device-owning thread; `submit`, `abort`,
`update` and `stop` from any thread. Results leave through `emit`, which may be called from any thread and does not
block for long: for every submitted unit exactly one of `Output`, `Failure`, `Aborted`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from triptych.messages import Abort, FromReplica, Generate, ModelInfo, ReplicaSpec, Update
from triptych.wire import Frame

__all__ = ["Emit", "Engine", "EngineFactory", "EngineStartError"]

Emit = Callable[[FromReplica, Sequence[Frame]], None]


class EngineStartError(Exception):
    """The model cannot be loaded; the message is one readable line."""


class Engine(Protocol):
    """Runs units of work on the devices of one replica."""

    @property
    def processes(self) -> tuple[int, ...]:
        """Pids of the further processes that it has started, in the order of their devices; none survives it."""

    def load(self) -> ModelInfo:
        """Load the model and warm up. Raises `EngineStartError`."""

    def run(self) -> None:
        """Serve on the calling thread until `stop`; returns when every running unit has ended."""

    def submit(self, unit: Generate, frames: Sequence[Frame]) -> None:
        """Take one unit; `frames` are the raw pixels of its inputs."""

    def abort(self, message: Abort) -> None:
        """End a unit at its next forward; unknown addresses are ignored."""

    def update(self, message: Update) -> None:
        """Change the priority of a running unit; unknown addresses are ignored."""

    def stop(self) -> None:
        """Ask `run` to return once idle."""

    def heartbeat(self) -> tuple[int, str]:
        """Forwards done since the start and the phase that runs now (`idle`, `load`, `encode`, `step`, `decode`).

        Called about every second from a thread of its own. A pair that stays the same for many times as long as ever
        before is taken for a hang.
        """


EngineFactory = Callable[[ReplicaSpec, Emit], Engine]
