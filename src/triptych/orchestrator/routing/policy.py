"""What a routing policy is: a small class that picks a replica for a unit.

The dispatcher decides when a unit may start and which replicas can take it; a policy only chooses among them. Both
sequences it gets are in order of replica id and never empty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from triptych.orchestrator.cost import Estimator
from triptych.orchestrator.replica_state import Replica
from triptych.orchestrator.units import Unit

__all__ = ["RoutingPolicy", "next_in_rotation"]

_by_id = attrgetter("id")


class RoutingPolicy(ABC):
    """Base of all policies. `estimator` tells expected service seconds of a unit's parameters.

    `last_id` is the replica chosen last in a rotation: all that a policy may remember of earlier choices, so that the
    turns of a refused request can be taken back.
    """

    last_id = -1

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator

    def bind(self, unit: Unit, live: Sequence[Replica]) -> Replica | None:
        """Replica that the unit must wait for, decided on arrival; None (as here) leaves it to `choose`."""
        return None

    @abstractmethod
    def choose(self, unit: Unit, free: Sequence[Replica]) -> Replica:
        """Replica for an unbound unit that starts now, out of those with a free slot."""


def next_in_rotation(replicas: Sequence[Replica], last_id: int) -> Replica:
    """First replica with an id above `last_id`, else the first of all."""
    at = bisect_right(replicas, last_id, key=_by_id)
    return replicas[at] if at < len(replicas) else replicas[0]
