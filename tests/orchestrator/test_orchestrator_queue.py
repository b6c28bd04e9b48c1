from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from triptych.orchestrator.queue import AGING_S, ALONE, ANY, UnitQueue


class Arrivals:
    """Pushes with arrival numbers and a clock."""

    def __init__(self) -> None:
        self.queue: UnitQueue[str] = UnitQueue()
        self.now = 1000.0
        self.count = 0

    def push(self, item: str, *, owner: str | None = None, priority: int = 0, lane: int = ANY) -> None:
        self.queue.push(item, priority=priority, arrival=self.count, arrived_s=self.now, owner=owner, lane=lane)
        self.count += 1

    def take(self, seconds: float = 1.0) -> str:
        """Time passes, then the first item is started."""
        self.now += seconds
        item = self.queue.first()
        assert item is not None
        self.queue.take(item, self.now)
        return item

    def take_all(self, seconds: float = 1.0) -> list[str]:
        return [self.take(seconds) for _ in range(len(self.queue))]


def test_one_owner_is_served_in_order_of_arrival_and_priority_over_all_lanes() -> None:
    arrivals = Arrivals()
    arrivals.push("patient", priority=5, lane=3)
    arrivals.push("early", lane=ALONE)
    arrivals.push("late", lane=3)
    arrivals.push("urgent", priority=-5)
    assert list(arrivals.queue) == ["urgent", "early", "late", "patient"]
    assert arrivals.queue.lanes() == [ANY, ALONE, 3]
    assert arrivals.queue.lane_items(3) == ["late", "patient"]


def test_a_removed_item_leaves_at_once_and_empty_lanes_vanish() -> None:
    arrivals = Arrivals()
    queue = arrivals.queue
    for item in "abc":
        arrivals.push(item)
    queue.remove("b")
    assert list(queue) == ["a", "c"]
    assert "b" not in queue
    with pytest.raises(KeyError):
        queue.remove("b")
    queue.remove("a")
    queue.remove("c")
    assert (len(queue), queue.lanes(), queue.head(ANY), queue.first(), list(queue)) == (0, [], None, None, [])


def test_an_item_waits_once() -> None:
    arrivals = Arrivals()
    arrivals.push("a")
    with pytest.raises(ValueError, match="waits already"):
        arrivals.push("a")


@pytest.mark.parametrize("owner", [None, "somebody"])
def test_one_owner_alone_is_first_come_first_served_whatever_the_timing(owner: str | None) -> None:
    rng = random.Random(1)
    arrivals = Arrivals()
    taken: list[str] = []
    for number in range(2000):
        arrivals.now += rng.choice([0.0, 0.001, 5.0])
        arrivals.push(f"{number:04}", owner=owner)
        while arrivals.queue and rng.random() < 0.5:
            taken.append(arrivals.take(rng.choice([0.0, 1.0])))
    assert taken + arrivals.take_all() == [f"{number:04}" for number in range(2000)]


def test_a_users_single_item_waits_for_at_most_one_of_each_busy_user() -> None:
    arrivals = Arrivals()
    for number in range(500):
        arrivals.push(f"heavy{number}", owner="heavy")
        arrivals.push(f"busy{number}", owner="busy")
    for _ in range(20):
        arrivals.take()
    for _ in range(20):
        arrivals.push("single", owner="light")
        before = next(number for number in range(100) if arrivals.take() == "single")
        assert before <= 2


def test_owners_take_turns_and_two_busy_ones_get_equal_shares_from_when_they_are_both_there() -> None:
    arrivals = Arrivals()
    for number in range(6):
        arrivals.push(f"a{number}", owner="a")
    assert [arrivals.take() for _ in range(2)] == ["a0", "a1"]
    for number in range(3):
        arrivals.push(f"b{number}", owner="b")
    assert list(arrivals.queue) == arrivals.take_all() == ["b0", "a2", "b1", "a3", "b2", "a4", "a5"]


def test_turns_are_exact_when_no_time_passes() -> None:
    arrivals = Arrivals()
    for owner in "abc":
        for number in range(3):
            arrivals.push(f"{owner}{number}", owner=owner)
    assert arrivals.take_all(0.0) == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]


@pytest.mark.parametrize(("mine", "theirs"), [("low", "high"), ("same", "same")])
@pytest.mark.parametrize(("low", "high"), [(1, 0), (10, -10), (100, -100)])
def test_a_low_priority_is_passed_only_by_what_arrives_within_its_handicap(
    low: int, high: int, mine: str, theirs: str
) -> None:
    """Endless urgent load, more than can be served, from others or from the same owner."""
    arrivals = Arrivals()
    arrivals.push("patient", priority=low, owner=mine)
    waited_s = 0.0
    for number in range(100_000):
        arrivals.push(f"urgent{number}", priority=high, owner=theirs)
        waited_s += 0.1
        if number % 2 and arrivals.take(0.1) == "patient":
            break
        arrivals.now += 0.1 if number % 2 == 0 else 0.0
    handicap_s = (low - high) * AGING_S
    # What arrived before that may still be served first by its own owner; twice as much arrives as is served.
    assert handicap_s - 1 <= waited_s <= (2 if mine == theirs else 1) * handicap_s + 1


def test_urgent_work_of_a_new_user_passes_a_long_old_backlog_of_others() -> None:
    arrivals = Arrivals()
    for number in range(500):
        arrivals.push(f"heavy{number}", owner="heavy")
    for _ in range(100):
        arrivals.take(10.0)
    arrivals.push("urgent", priority=-5, owner="light")
    assert arrivals.take() == "urgent"


def test_an_owners_urgent_item_is_not_held_up_at_the_pace_of_its_patient_ones() -> None:
    arrivals = Arrivals()
    for number in range(5):
        arrivals.push(f"patient{number}", priority=20, owner="x")
    arrivals.now += 60.0
    for number in range(50):
        arrivals.push(f"other{number}", owner="y")
    arrivals.push("urgent", owner="x")
    order = arrivals.take_all()
    assert order.index("urgent") <= 11


def test_a_new_priority_counts_from_the_old_arrival() -> None:
    arrivals = Arrivals()
    arrivals.push("a")
    arrivals.push("b")
    arrivals.queue.reprioritize("b", priority=-1, arrived_s=1000.0)
    assert arrivals.take_all() == ["b", "a"]


def test_a_new_priority_does_not_give_a_turn_back() -> None:
    arrivals = Arrivals()
    for item in ("a0", "a1"):
        arrivals.push(item, owner="a")
    assert arrivals.take() == "a0"
    arrivals.now -= 0.5
    arrivals.push("b0", owner="b")
    for priority in (3, 0):
        arrivals.queue.reprioritize("a1", priority=priority, arrived_s=1000.0)
    assert arrivals.take_all() == ["b0", "a1"]


def test_a_copy_is_independent_and_iteration_leaves_the_queue_alone() -> None:
    arrivals = Arrivals()
    for number in range(30):
        arrivals.push(f"{number}", owner=f"o{number % 4}", priority=number % 3, lane=(ANY, ALONE, 0)[number % 3])
    arrivals.take()
    order = list(arrivals.queue)
    copy = arrivals.queue.copy()
    assert list(copy) == order == list(arrivals.queue)
    copy.remove(order[0])
    assert list(arrivals.queue) == order
    assert len(copy) == 28


def expected_first(waiting: dict[int, tuple[int, float, int]], turns: dict[int, tuple[float, int]]) -> int:
    """The promise in the words of the docstring; `waiting`: item to (priority, arrived, owner)."""

    def aged(item: int) -> tuple[float, int]:
        return waiting[item][0] * AGING_S + waiting[item][1], item

    ranks = []
    for owner in {owner for _, _, owner in waiting.values()}:
        mine = [item for item in waiting if waiting[item][2] == owner]
        head = min(mine, key=aged)
        served_s, turn = turns.get(owner, (float("-inf"), 0))
        most_urgent = min(waiting[item][0] for item in mine)
        ranks.append((max(aged(head)[0], most_urgent * AGING_S + served_s), turn, head))
    return min(ranks)[2]


@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_the_slow_way_under_random_use(seed: int) -> None:
    rng = random.Random(seed)
    queue: UnitQueue[int] = UnitQueue()
    waiting: dict[int, tuple[int, float, int]] = {}
    turns: dict[int, tuple[float, int]] = {}
    now, count = 0.0, 0

    def gone(item: int) -> None:
        owner = waiting.pop(item)[2]
        if all(other != owner for _, _, other in waiting.values()):
            turns.pop(owner, None)

    for item in range(1500):
        now += rng.choice([0.0, 0.1, 3.0])
        waiting[item] = (rng.randint(-2, 2), now, rng.randrange(5))
        queue.push(item, priority=waiting[item][0], arrival=item, arrived_s=now, owner=waiting[item][2])
        if rng.random() < 0.2:
            out = rng.choice(list(waiting))
            queue.remove(out)
            gone(out)
        while waiting and rng.random() < 0.42:
            head = queue.first()
            assert head == expected_first(waiting, turns)
            queue.take(head, now)
            count += 1
            turns[waiting[head][2]] = (now, count)
            gone(head)
    assert sorted(queue) == sorted(waiting)


def test_order_among_many_owners_costs_little() -> None:
    """A thousand owners in a thousand lanes' worth of order: no step looks at all of them."""
    queue: UnitQueue[int] = UnitQueue()
    for item in range(4000):
        queue.push(item, priority=0, arrival=item, arrived_s=float(item), owner=item % 1000)
    taken: Sequence[int] = list(queue)
    assert taken[:1000] == list(range(1000))
    assert len(taken) == 4000
