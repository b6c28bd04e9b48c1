"""Least outstanding work: of the replicas with a free slot, the one that will be done with what it has first."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.orchestrator.replica_state import Replica
from triptych.orchestrator.routing.policy import RoutingPolicy, next_in_rotation
from triptych.orchestrator.units import Unit

__all__ = ["LeastWork"]


class LeastWork(RoutingPolicy):
    """Choose the free replica with the least estimated work outstanding, at the moment a unit starts.

    Algorithm: the work of a replica is the sum over its running units of the service time expected at their dispatch
    times the part of their steps that is still to do; while nothing is known about a unit it counts as one second.
    Among replicas with equally little work the next in the rotation is taken. Like `round_robin` it is late binding
    from one central queue, so no unit waits while a slot is free.

    Caveats: with one slot per replica every free replica is idle, and this is `round_robin`. It matters with several
    slots, where units that run side by side slow each other down. Estimates are as good as `estimate_error` in
    `/v1/replicas` says; aborted units count until their replica has let go of them.
    """

    def choose(self, unit: Unit, free: Sequence[Replica]) -> Replica:
        """The free replica with the least work."""
        least = min(work_s := [_outstanding_s(replica) for replica in free])
        replica = next_in_rotation([r for r, work in zip(free, work_s, strict=True) if work <= least], self.last_id)
        self.last_id = replica.id
        return replica


def _outstanding_s(replica: Replica) -> float:
    return sum(
        (1.0 if unit.expected_s is None else unit.expected_s) * (1 - unit.step / unit.steps if unit.steps else 1.0)
        for unit in replica.units.values()
    )
