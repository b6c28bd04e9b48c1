"""Round robin with late binding: the default policy."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.orchestrator.replica_state import Replica
from triptych.orchestrator.routing.policy import RoutingPolicy, next_in_rotation
from triptych.orchestrator.units import Unit

__all__ = ["RoundRobin"]


class RoundRobin(RoutingPolicy):
    """Rotate over replicas that have a free slot, at the moment a unit starts.

    Algorithm: the next replica after the last one chosen, by id, that has a free slot; the rotation is over replicas,
    not slots. With free replicas and one request after another this is exactly 0, 1, .., n-1, 0, 1, ... Under load
    it is one central queue: the first replica with a free slot takes the head, so no unit waits behind a long one
    while another replica idles.

    Caveats: it does not look at how busy the other slots of a replica are.
    """

    def choose(self, unit: Unit, free: Sequence[Replica]) -> Replica:
        """The next free replica in the rotation."""
        replica = next_in_rotation(free, self.last_id)
        self.last_id = replica.id
        return replica
