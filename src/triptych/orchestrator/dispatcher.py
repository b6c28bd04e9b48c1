"""Which waiting unit goes where next: queue, replicas and routing policy meet here.

Units are bound or left unbound on arrival, wait in the central queue, and leave it in order as soon as a replica can
take them. Three rules stand above the policy: a session goes back to its last replica if that has a free slot, a
unit that must run alone gets a replica without other units, and meanwhile that replica gets none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from triptych.messages import Address
from triptych.orchestrator.queue import ALONE, ANY, UnitQueue
from triptych.orchestrator.replica_state import Phase, Replica, ReplicaPool
from triptych.orchestrator.routing import RoutingPolicy
from triptych.orchestrator.units import Unit

__all__ = ["MAX_SESSIONS", "Dispatcher"]

MAX_SESSIONS = 4096
"""Sessions remembered; the one unused for longest is forgotten first."""


class Dispatcher:
    """Binds, queues and places units; knows nothing of requests' ends, messages or time."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self.queue: UnitQueue[Unit] = UnitQueue()
        self.pool = ReplicaPool()
        self._policy = policy
        self._sessions: dict[str, int] = {}

    @property
    def turn(self) -> int:
        """How far the policy's rotation is; set it back to take back what `bind` has spent."""
        return self._policy.last_id

    @turn.setter
    def turn(self, last_id: int) -> None:
        self._policy.last_id = last_id

    def bind(self, units: Sequence[Unit]) -> None:
        """Choose the lane each unit will wait in."""
        live = self.pool.accepting
        taken: Counter[int] = Counter()  # slots that units of this call will fill
        for unit in units:
            unit.lane = ALONE if unit.alone else ANY
            if unit.alone or not live:
                continue
            replica = self._policy.bind(unit, live)
            if replica is not None:
                preferred = self._session_replica(unit, self.pool.free)
                if preferred is not None and preferred.free_slots > taken[preferred.id]:
                    replica = preferred  # the unit's turn in the rotation is spent all the same
                unit.lane = replica.id
                taken[replica.id] += 1

    def startable(self, units: Sequence[Unit]) -> int:
        """How many of these bound, not yet queued units would start at once."""
        if all(unit.lane == ANY for unit in units):
            return min(len(units), sum(replica.free_slots for replica in self.pool.free))
        lanes = Counter(unit.lane for unit in units)
        return sum(min(lanes[replica.id], replica.free_slots) for replica in self.pool.free)

    def place_at_once(self, unit: Unit) -> Replica | None:
        """Place a bound unit as if it had been queued and taken, while nothing waits; None when it must wait."""
        return None if self.queue else self._place(unit, unit.lane)

    def push(self, unit: Unit) -> None:
        """Queue a bound unit under its request's priority and its own arrival number.

        Turns go by API key, without keys by `user`; all who name neither share one line.
        """
        request, spec = unit.request, unit.request.spec
        owner: Hashable = spec.user if spec.owner is None else spec.owner
        if unit.attempt > 1:
            owner = unit  # its owner's turn was spent on the first try, so that the replay waits for nobody's
        self.queue.push(
            unit,
            priority=request.priority,
            arrival=unit.arrival,
            arrived_s=request.created_at_s,
            owner=owner,
            lane=unit.lane,
        )

    def reprioritize(self, unit: Unit) -> None:
        """Move a waiting unit to where its request's present priority belongs."""
        request = unit.request
        self.queue.reprioritize(unit, priority=request.priority, arrived_s=request.created_at_s)

    def take_next(self, now: float) -> tuple[Unit, Replica] | None:
        """Take the first unit in queue order that a replica can take now out of the queue; None when there is none."""
        queue, pool = self.queue, self.pool
        if not queue:
            if pool.kept is not None:
                pool.keep(None)
            return None
        if pool.kept is not None and queue.head(ALONE) is None:
            pool.keep(None)
        for lane in queue.lanes():
            unit = queue.head(lane)
            assert unit is not None
            replica = self._place(unit, lane)
            if replica is not None:
                queue.take(unit, now)
                return unit, replica
        return None

    def occupy(self, replica: Replica, address: Address, unit: Unit) -> None:
        """A unit taken by `take_next` now holds a slot."""
        replica.units[address] = unit
        replica.exclusive = unit.alone
        self.pool.refresh(replica)
        session = unit.request.spec.session
        if session is not None:
            self._sessions.pop(session, None)
            self._sessions[session] = replica.id
            if len(self._sessions) > MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]

    def release(self, replica: Replica, address: Address) -> None:
        """The slot of a unit is free again."""
        del replica.units[address]
        replica.exclusive = False
        self.pool.refresh(replica)

    def set_phase(self, replica: Replica, phase: Phase) -> None:
        """Change what a replica takes; units that wait for one that no longer accepts are bound again."""
        replica.phase = phase
        self.pool.refresh(replica)
        if phase is not Phase.ACCEPTING:
            for unit in self.queue.lane_items(replica.id):
                self.queue.remove(unit)
                self.bind([unit])
                self.push(unit)

    def _place(self, unit: Unit, lane: int) -> Replica | None:
        pool = self.pool
        if lane == ANY:
            if not pool.free:
                return None
            return self._session_replica(unit, pool.free) or self._policy.choose(unit, pool.free)
        if lane == ALONE:
            return self._place_alone(unit)
        replica = pool.by_id[lane]
        return replica if pool.is_free(replica) else None

    def _place_alone(self, unit: Unit) -> Replica | None:
        """An idle replica; without one, the least busy takes nothing more until it is idle."""
        pool = self.pool
        idle = [replica for replica in pool.accepting if not replica.units]
        if idle:
            pool.keep(None)
            died = {replica_id for replica_id, _ in unit.deaths}
            # Elsewhere if possible: a replica that is broken itself shall not convict it.
            idle = [replica for replica in idle if replica.id not in died] or idle
            return self._session_replica(unit, idle) or self._policy.choose(unit, idle)
        if pool.kept is None:
            shared = [replica for replica in pool.accepting if not replica.exclusive]
            if shared:
                pool.keep(min(shared, key=lambda replica: replica.in_flight))
        return None

    def _session_replica(self, unit: Unit, candidates: Sequence[Replica]) -> Replica | None:
        session = unit.request.spec.session
        replica_id = None if session is None else self._sessions.get(session)
        if replica_id is None:
            return None
        return next((replica for replica in candidates if replica.id == replica_id), None)
