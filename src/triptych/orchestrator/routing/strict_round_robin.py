"""Round robin with early binding: the n-th unit goes to the n-th replica, whatever it is busy with."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.orchestrator.replica_state import Replica
from triptych.orchestrator.routing.policy import RoutingPolicy, next_in_rotation
from triptych.orchestrator.units import Unit

__all__ = ["StrictRoundRobin"]


class StrictRoundRobin(RoutingPolicy):
    """Bind each unit on arrival to the next live replica, free or not, and let it wait for that one.

    Algorithm: a rotation over live replicas by id, one turn per unit. When the replica of a waiting unit dies or
    drains, the unit is bound again, to the next in the rotation. A unit that arrives while no replica lives, or that
    must run alone after a death, is not bound: the first replica that can take it does.

    Caveats: units wait behind long ones while other replicas idle; with mixed service times latency is several times
    that of `round_robin`. Use it where an exact assignment matters more, for example to compare with other servers.
    """

    def bind(self, unit: Unit, live: Sequence[Replica]) -> Replica:
        """The next live replica."""
        return self.choose(unit, live)

    def choose(self, unit: Unit, free: Sequence[Replica]) -> Replica:
        """The next replica, for a unit that could not be bound."""
        replica = next_in_rotation(free, self.last_id)
        self.last_id = replica.id
        return replica
