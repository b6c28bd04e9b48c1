"""Whatever clients, replicas and time do, in any order: the promises of the core hold after every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from core_driver import CoreDriver, output_of
from fair_order import FairOrder
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from triptych.errors import ErrorCode, TriptychError
from triptych.messages import Aborted, Address, Failure, Preview, Progress
from triptych.orchestrator.effects import (
    Dispatch,
    Drop,
    Effect,
    Excuse,
    Finish,
    Publish,
    Requeued,
    SendAbort,
    SendUpdate,
)
from triptych.orchestrator.events import UnitOutput, UnitPreview, UnitState
from triptych.orchestrator.queue import ALONE, ANY
from triptych.orchestrator.replica_state import Phase
from triptych.orchestrator.retry import MAX_DEATHS

REPLICAS = 3
MAX_QUEUE = 6
pick = st.integers(0, 10**6)


class OrchestratorMachine(RuleBasedStateMachine):
    """Keeps its own books of slots, incarnations and ends, from the effects alone, and compares."""

    routing = "round_robin"

    def __init__(self) -> None:
        super().__init__()
        self.driver = CoreDriver(routing=self.routing, max_queue_size=MAX_QUEUE)
        self.core = self.driver.core
        self.slots: dict[int, int] = {}  # of replicas that are up
        self.closed: set[int] = set()  # draining replicas
        self.returning: set[int] = set()  # those of them that are started anew afterwards
        self.running: dict[Address, tuple[int, bool]] = {}  # replica, alone
        self.told_to_stop: set[Address] = set()
        self.stale: list[tuple[int, Address]] = []
        self.attempts: dict[tuple[str, int], int] = {}
        self.accepted: dict[str, int] = {}
        self.outputs: Counter[str] = Counter()
        self.previews: set[tuple[str, int, int]] = set()
        self.ended: dict[str, str | None] = {}
        self.lasting: set[str] = set()  # requests that outlast outages
        self.suspects: set[str] = set()  # requests that lost a replica while alone, or too many of them
        self.deaths: Counter[tuple[str, int]] = Counter()
        self.order = FairOrder()

    @initialize(slots=st.lists(st.integers(1, 3), min_size=1, max_size=REPLICAS))
    def begin(self, slots: list[int]) -> None:
        for replica_id, count in enumerate(slots):
            self.ready(replica_id, count)

    # ---- books

    def absorb(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Dispatch):
                self.book_dispatch(effect)
            elif isinstance(effect, SendAbort | SendUpdate):
                assert self.running[effect.address][0] == effect.replica_id
                assert self.is_alive(effect.replica_id, effect.address)
                if isinstance(effect, SendAbort):
                    assert effect.address not in self.told_to_stop
                    self.told_to_stop.add(effect.address)
            elif isinstance(effect, Publish):
                self.book_event(effect)
            elif isinstance(effect, Finish):
                self.book_end(effect)
            elif isinstance(effect, Requeued):
                assert effect.request_id not in self.ended
                unit = (effect.request_id, effect.unit)
                assert effect.attempt == self.attempts[unit] + 1
                if not effect.alone:
                    self.order.requeue(unit)
            else:
                assert isinstance(effect, Drop | Excuse)

    def is_alive(self, replica_id: int, address: Address) -> bool:
        return replica_id in self.slots and self.driver.incarnations[replica_id] == address.incarnation

    def book_dispatch(self, effect: Dispatch) -> None:
        address, message = effect.message.address, effect.message
        assert self.is_alive(effect.replica_id, address)
        assert effect.replica_id not in self.closed
        assert address.request_id not in self.ended
        neighbours = [alone for replica, alone in self.running.values() if replica == effect.replica_id]
        assert len(neighbours) < self.slots[effect.replica_id]
        assert not any(neighbours)
        assert not (message.alone and neighbours)
        unit = (address.request_id, address.unit)
        assert address.attempt == self.attempts.get(unit, 0) + 1
        if self.routing != "strict_round_robin" and not message.alone:
            assert self.order.next() == unit
            self.order.dispatch(unit, self.driver.now)
        self.attempts[unit] = address.attempt
        assert message.params.seed == 7 + address.unit
        self.running[address] = (effect.replica_id, message.alone)

    def book_event(self, effect: Publish) -> None:
        assert effect.request_id not in self.ended
        if isinstance(effect.event, UnitOutput):
            self.outputs[effect.request_id] += 1
        if isinstance(effect.event, UnitPreview):
            key = (effect.request_id, effect.event.unit, effect.event.index)
            assert key not in self.previews
            self.previews.add(key)

    def book_end(self, effect: Finish) -> None:
        assert effect.request_id in self.accepted
        assert effect.request_id not in self.ended
        self.ended[effect.request_id] = effect.error.code if effect.error else None
        self.order.end(effect.request_id)
        if effect.error is None:
            assert self.outputs[effect.request_id] == self.accepted[effect.request_id]
        elif effect.error.code is ErrorCode.POISON_REQUEST:
            assert effect.request_id in self.suspects
        elif effect.error.code is ErrorCode.NO_REPLICA:
            assert not set(self.slots) - (self.closed - self.returning)
            assert effect.request_id not in self.lasting

    def free_slot(self, address: Address) -> None:
        replica_id, _ = self.running.pop(address)
        self.told_to_stop.discard(address)
        self.stale.append((replica_id, address))

    def some_running(self, number: int) -> Address:
        return list(self.running)[number % len(self.running)]

    def answer(self, address: Address, message: Any) -> None:
        replica_id = self.running[address][0]
        self.free_slot(address)
        self.absorb(self.driver.say(message, frames=[b"x"], replica_id=replica_id))

    # ---- clients

    @rule(
        n=st.integers(1, 4),
        priority=st.integers(-1, 1),
        session=st.sampled_from([None, None, "s", "t"]),
        user=st.sampled_from([None, "u", "v"]),
        timeout_s=st.sampled_from([0.0, 20.0, 600.0, 600.0]),
        previews=st.integers(0, 2),
        lasting=st.booleans(),
    )
    def submit(
        self,
        n: int,
        priority: int,
        session: str | None,
        user: str | None,
        timeout_s: float,
        previews: int,
        lasting: bool,
    ) -> None:
        request_id = f"r{len(self.accepted)}"
        waiting = len(self.core.dispatcher.queue)
        fields: dict[str, Any] = {"n": n, "priority": priority, "session": session, "user": user}
        fields |= {"timeout_s": timeout_s, "previews": previews}
        self.accepted[request_id] = n
        try:
            effects = self.driver.submit(request_id, outlasts_outages=lasting, **fields)
        except TriptychError as error:
            del self.accepted[request_id]
            assert not self.core.effects
            assert error.code in ("not_ready", "draining", "queue_full", "deadline_exceeded")
            if error.code == "queue_full":
                assert waiting + n > MAX_QUEUE
                assert error.should_retry is False or (error.retry_after_s or 0) >= 1
        else:
            self.order.accept(request_id, n, priority, user, self.driver.now)
            if lasting:
                self.lasting.add(request_id)
            self.absorb(effects)
            assert len(self.core.dispatcher.queue) <= max(MAX_QUEUE, waiting)

    @precondition(lambda self: self.core.live)
    @rule(number=pick)
    def abort(self, number: int) -> None:
        self.absorb(self.driver.abort(list(self.core.live)[number % len(self.core.live)]))

    @precondition(lambda self: self.core.live)
    @rule(number=pick, priority=st.sampled_from([None, -2, 0, 2]), timeout_s=st.sampled_from([None, None, 5.0, 100.0]))
    def update(self, number: int, priority: int | None, timeout_s: float | None) -> None:
        request_id = list(self.core.live)[number % len(self.core.live)]
        if priority is not None:
            self.order.priorities[request_id] = priority
        self.absorb(self.driver.update(request_id, priority=priority, timeout_s=timeout_s))

    # ---- replicas

    @rule(replica_id=st.integers(0, REPLICAS - 1), slots=st.integers(1, 3))
    def ready(self, replica_id: int, slots: int) -> None:
        if replica_id in self.slots:
            self.bury(replica_id)  # the loss went unannounced
        self.slots[replica_id] = slots
        self.closed.discard(replica_id)
        self.returning.discard(replica_id)
        self.absorb(self.driver.ready(replica_id, slots))

    @precondition(lambda self: self.slots)
    @rule(number=pick)
    def lost(self, number: int) -> None:
        replica_id = sorted(self.slots)[number % len(self.slots)]
        self.bury(replica_id)
        self.absorb(self.driver.lost(replica_id))

    def bury(self, replica_id: int) -> None:
        del self.slots[replica_id]
        self.closed.discard(replica_id)
        self.returning.discard(replica_id)
        for address, (where, alone) in list(self.running.items()):
            if where == replica_id:
                unit = (address.request_id, address.unit)
                self.deaths[unit] += 1
                if alone or self.deaths[unit] >= MAX_DEATHS:
                    self.suspects.add(address.request_id)
                self.free_slot(address)

    @precondition(lambda self: set(self.slots) - self.closed)
    @rule(number=pick, comes_back=st.booleans())
    def drain_replica(self, number: int, comes_back: bool) -> None:
        open_ids = sorted(set(self.slots) - self.closed)
        replica_id = open_ids[number % len(open_ids)]
        self.closed.add(replica_id)
        if comes_back:
            self.returning.add(replica_id)
        incarnation = self.driver.incarnations[replica_id]
        self.core.replica_draining(replica_id, incarnation, self.driver.now, comes_back=comes_back)
        self.absorb(self.driver.take())

    @precondition(lambda self: self.running)
    @rule(number=pick, step=st.integers(0, 20))
    def progress(self, number: int, step: int) -> None:
        address = self.some_running(number)
        replica_id = self.running[address][0]
        self.absorb(self.driver.say(Progress(address, step, 20), replica_id=replica_id))
        preview = Preview(address, step % 3, step, "image/png", 64, 32)
        self.absorb(self.driver.say(preview, frames=[b"p"], replica_id=replica_id))

    @precondition(lambda self: self.running)
    @rule(number=pick)
    def output(self, number: int) -> None:
        address = self.some_running(number)
        self.answer(address, output_of(address))

    @precondition(lambda self: self.running)
    @rule(number=pick)
    def failure(self, number: int) -> None:
        address = self.some_running(number)
        self.answer(address, Failure(address, "out_of_memory", "no room"))

    @precondition(lambda self: self.told_to_stop)
    @rule(number=pick)
    def aborted(self, number: int) -> None:
        address = sorted(self.told_to_stop, key=repr)[number % len(self.told_to_stop)]
        self.answer(address, Aborted(address))

    @precondition(lambda self: self.stale)
    @rule(number=pick)
    def late_message(self, number: int) -> None:
        replica_id, address = self.stale[number % len(self.stale)]
        [effect] = self.driver.say(output_of(address), frames=[b"x"], replica_id=replica_id)
        assert isinstance(effect, Drop)

    # ---- time

    @rule(seconds=st.sampled_from([0.5, 3.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.absorb(self.driver.pass_time(seconds))
        due = self.core.next_deadline()
        assert due is None or due > self.driver.now

    @precondition(lambda self: len(self.accepted) > 8)
    @rule()
    def begin_drain(self) -> None:
        self.core.begin_drain(self.driver.now)
        self.absorb(self.driver.take())
        assert len(self.core.dispatcher.queue) == 0

    # ---- promises

    @invariant()
    def slots_are_held_by_exactly_what_runs(self) -> None:
        pool = self.core.dispatcher.pool
        held = {address: replica.id for replica in pool.by_id.values() for address in replica.units}
        assert held == {address: replica_id for address, (replica_id, _) in self.running.items()}
        for replica in pool.by_id.values():
            assert replica.in_flight <= replica.slots
            assert (replica.phase is not Phase.ABSENT) == (replica.id in self.slots)

    @invariant()
    def every_accepted_request_is_live_or_has_ended(self) -> None:
        assert set(self.accepted) == set(self.core.live) | set(self.ended)
        assert not set(self.core.live) & set(self.ended)
        for request in self.core.live.values():
            for unit in request.units:
                waits = unit in self.core.dispatcher.queue
                assert waits == (unit.state is UnitState.QUEUED)
                assert (unit.address in self.running) == (unit.state is UnitState.RUNNING)

    @invariant()
    def nothing_waits_while_a_slot_it_may_use_is_free(self) -> None:
        queue, kept = self.core.dispatcher.queue, self.core.dispatcher.pool.kept
        load = Counter(replica_id for replica_id, _ in self.running.values())
        lonely = {replica_id for replica_id, alone in self.running.values() if alone}
        accepting = set(self.slots) - self.closed
        usable = {replica_id for replica_id in accepting - lonely if load[replica_id] < self.slots[replica_id]}
        if kept is not None:
            assert queue.head(ALONE) is not None
            assert kept.id in accepting
            usable.discard(kept.id)
        if queue.head(ANY) is not None:
            assert not usable
        if queue.head(ALONE) is not None:
            assert all(load[replica_id] for replica_id in accepting)
        assert all(lane not in usable for lane in queue.lanes())
        assert not (queue and self.core.draining)

    @invariant()
    def the_forecast_rehearses_what_will_happen(self) -> None:
        core = self.core
        before = len(core.dispatcher.queue)
        forecast = core.backlog.forecast(self.driver.now)
        assert sorted(forecast.positions.values()) == list(range(before)) == list(range(len(core.dispatcher.queue)))
        assert all(eta_s >= 0 for eta_s in forecast.etas_s.values())
        if before and self.routing != "strict_round_robin" and core.dispatcher.queue.lanes() == [ANY]:
            first = next(iter(forecast.positions))
            assert (first.request.id, first.index) == self.order.next()

    def teardown(self) -> None:
        """Let everything come to an end: one healthy replica, every unit answered."""
        if not self.accepted:
            return
        if 0 not in self.slots or 0 in self.closed:
            self.ready(0, 1)
        for _ in range(2000):
            if not self.running:
                break
            address = next(iter(self.running))
            self.answer(address, Aborted(address) if address in self.told_to_stop else output_of(address))
        assert not self.running
        assert not self.core.live
        assert set(self.ended) == set(self.accepted)
        assert self.core.next_deadline() is None


class LeastWorkOrchestratorMachine(OrchestratorMachine):
    routing = "least_work"


class StrictOrchestratorMachine(OrchestratorMachine):
    routing = "strict_round_robin"


@pytest.mark.parametrize("machine", [OrchestratorMachine, LeastWorkOrchestratorMachine, StrictOrchestratorMachine])
@pytest.mark.parametrize("seed", range(8))
def test_the_promises_hold_on_a_long_walk(machine: type[OrchestratorMachine], seed: int) -> None:
    """Deeper than hypothesis goes: a thousand steps with the weights of a busy, failing server."""
    rng = random.Random(seed)
    walk = machine()
    walk.begin([rng.randint(1, 3) for _ in range(REPLICAS)])
    calls: list[tuple[float, Callable[[], object], Callable[[int], None]]] = [
        (
            10,
            lambda: True,
            lambda _: walk.submit(
                rng.randint(1, 4),
                rng.randint(-1, 1),
                rng.choice([None, "s"]),
                rng.choice([None, "u", "v"]),
                90.0,
                2,
                rng.random() < 0.2,
            ),
        ),
        (12, lambda: walk.running, lambda number: walk.progress(number, rng.randint(0, 20))),
        (12, lambda: walk.running, walk.output),
        (1, lambda: walk.running, walk.failure),
        (6, lambda: walk.told_to_stop, walk.aborted),
        (2, lambda: walk.core.live, walk.abort),
        (2, lambda: walk.core.live, lambda number: walk.update(number, rng.randint(-2, 2), rng.choice([None, 60.0]))),
        (3, lambda: walk.slots, walk.lost),
        (0.5, lambda: set(walk.slots) - walk.closed, lambda number: walk.drain_replica(number, rng.random() < 0.5)),
        (3, lambda: True, lambda _: walk.ready(rng.randrange(REPLICAS), rng.randint(1, 3))),
        (2, lambda: walk.stale, walk.late_message),
        (4, lambda: True, lambda _: walk.time_passes(rng.choice([0.5, 3.0]))),
        (0.1, lambda: True, lambda _: walk.time_passes(31.0)),
    ]
    weights = [weight for weight, _, _ in calls]
    for _ in range(1000):
        _, possible, call = rng.choices(calls, weights)[0]
        if possible():
            call(rng.randrange(10**6))
            walk.slots_are_held_by_exactly_what_runs()
            walk.every_accepted_request_is_live_or_has_ended()
            walk.nothing_waits_while_a_slot_it_may_use_is_free()
    assert None in walk.ended.values()
    walk.teardown()


_bounded = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    # Shrinking a failure takes minutes, longer than a test may; add Stage.shrink to read one.
    phases=(Stage.explicit, Stage.reuse, Stage.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

TestOrchestratorMachine = OrchestratorMachine.TestCase
TestOrchestratorMachine.settings = _bounded
TestStrictOrchestratorMachine = StrictOrchestratorMachine.TestCase
TestStrictOrchestratorMachine.settings = _bounded
