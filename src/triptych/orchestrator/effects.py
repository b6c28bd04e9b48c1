"""What the core asks its shell to do; every method of the core leaves a list of these, in order."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.errors import TriptychError
from triptych.messages import Address, Generate
from triptych.orchestrator.events import Event
from triptych.wire import Frame

__all__ = ["Dispatch", "Drop", "Effect", "Excuse", "Finish", "Publish", "Requeued", "SendAbort", "SendUpdate"]


@dataclass(slots=True)
class Dispatch:
    """Send a unit to its replica."""

    replica_id: int
    message: Generate
    frames: tuple[Frame, ...]


@dataclass(slots=True)
class SendAbort:
    """Tell a replica to stop a unit."""

    replica_id: int
    address: Address


@dataclass(slots=True)
class SendUpdate:
    """Tell a replica the new priority of a unit."""

    replica_id: int
    address: Address
    priority: int


@dataclass(slots=True)
class Publish:
    """Hand an event to whoever reads the request's stream."""

    request_id: str
    event: Event


@dataclass(slots=True)
class Finish:
    """The request has its one end; no event follows."""

    request_id: str
    error: TriptychError | None


@dataclass(slots=True)
class Requeued:
    """A unit went back to the queue because its replica died; `attempt` is the try to come."""

    request_id: str
    unit: int
    attempt: int
    alone: bool


@dataclass(slots=True)
class Excuse:
    """A convicted unit is to blame for these deaths (replica, incarnation)."""

    deaths: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Drop:
    """A late or foreign message was ignored, and counted under this reason."""

    reason: str


Effect = Dispatch | SendAbort | SendUpdate | Publish | Finish | Requeued | Excuse | Drop
