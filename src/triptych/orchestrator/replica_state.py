"""What the orchestrator knows of replicas: who takes units now, and what runs where.

The pool keeps two lists in order of id: `accepting` (up, not draining) and `free` (accepting, with a free slot, and
not kept for a unit that must run alone). Routing policies choose from them.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import StrEnum
from operator import attrgetter

from triptych.messages import Address
from triptych.orchestrator.units import Unit

__all__ = ["Phase", "Replica", "ReplicaPool"]

_by_id = attrgetter("id")
_ERROR_WEIGHT = 1 / 16


class Phase(StrEnum):
    """Absent (not ready yet, or lost), accepting work, or finishing what it has."""

    ABSENT = "absent"
    ACCEPTING = "accepting"
    DRAINING = "draining"


class Replica:
    """One replica through all its incarnations; `units` holds what its present incarnation runs, by address.

    `estimate_error` is the mean absolute error of expected service times, as a fraction of the true ones, over
    recent units; None before the first that had an estimate.
    """

    __slots__ = (
        "comes_back",
        "completed",
        "estimate_error",
        "exclusive",
        "id",
        "incarnation",
        "phase",
        "slots",
        "units",
    )

    def __init__(self, replica_id: int) -> None:
        self.id = replica_id
        self.incarnation = -1
        self.phase = Phase.ABSENT
        self.comes_back = False  # while draining: it is started anew afterwards
        self.slots = 0
        self.units: dict[Address, Unit] = {}
        self.exclusive = False
        self.completed = 0
        self.estimate_error: float | None = None

    def ended(self, service_s: float, expected_s: float | None) -> None:
        """A unit ended with an output after so many seconds; compare with what was expected at its dispatch."""
        self.completed += 1
        if expected_s is None or service_s <= 0:
            return
        error = abs(expected_s - service_s) / service_s
        before = error if self.estimate_error is None else self.estimate_error
        self.estimate_error = before + (error - before) * _ERROR_WEIGHT

    @property
    def in_flight(self) -> int:
        """Dispatched units, aborted ones that still hold their slot included."""
        return len(self.units)

    @property
    def free_slots(self) -> int:
        """Slots without a unit."""
        return self.slots - len(self.units)


class ReplicaPool:
    """All replicas ever seen. Whoever changes a replica calls `refresh` after it."""

    def __init__(self) -> None:
        self.by_id: dict[int, Replica] = {}
        self.accepting: list[Replica] = []
        self.free: list[Replica] = []
        self.kept: Replica | None = None  # takes nothing more until a waiting unit can have it alone

    def get(self, replica_id: int) -> Replica:
        """The replica of this id, made on first sight."""
        replica = self.by_id.get(replica_id)
        if replica is None:
            replica = self.by_id[replica_id] = Replica(replica_id)
        return replica

    def refresh(self, replica: Replica) -> None:
        """Bring both lists up to date with one replica."""
        accepting = replica.phase is Phase.ACCEPTING
        if not accepting and self.kept is replica:
            self.kept = None
        free = accepting and len(replica.units) < replica.slots and not replica.exclusive and replica is not self.kept
        _place(self.accepting, replica, accepting)
        _place(self.free, replica, free)

    def is_free(self, replica: Replica) -> bool:
        """Whether an ordinary unit may go there now."""
        at = bisect_left(self.free, replica.id, key=_by_id)
        return at < len(self.free) and self.free[at] is replica

    def keep(self, replica: Replica | None) -> None:
        """Keep this replica, and no other, for the next unit that must run alone."""
        before, self.kept = self.kept, replica
        for changed in (before, replica):
            if changed is not None:
                self.refresh(changed)

    @property
    def serves(self) -> bool:
        """Whether it is worth waiting: a replica takes work, or finishes what it has and is then started anew."""
        if self.accepting:
            return True
        return any(replica.phase is Phase.DRAINING and replica.comes_back for replica in self.by_id.values())

    @property
    def slots(self) -> int:
        """Slots of all replicas that accept work."""
        return sum(replica.slots for replica in self.accepting)


def _place(replicas: list[Replica], replica: Replica, present: bool) -> None:
    at = bisect_left(replicas, replica.id, key=_by_id)
    found = at < len(replicas) and replicas[at] is replica
    if present and not found:
        replicas.insert(at, replica)
    elif found and not present:
        del replicas[at]
