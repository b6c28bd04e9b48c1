from __future__ import annotations

import random

import pytest

from triptych.orchestrator.queue import ALONE, ANY, UnitQueue


def test_order_is_priority_then_arrival_over_all_lanes() -> None:
    queue: UnitQueue[str] = UnitQueue()
    queue.push("late", priority=0, arrival=2, lane=3)
    queue.push("early", priority=0, arrival=1, lane=ALONE)
    queue.push("urgent", priority=-5, arrival=9)
    queue.push("patient", priority=5, arrival=0)
    assert list(queue) == ["urgent", "early", "late", "patient"]
    assert queue.lanes() == [ANY, ALONE, 3]
    assert [queue.position(item) for item in queue] == [0, 1, 2, 3]


def test_a_removed_item_leaves_at_once_and_empty_lanes_vanish() -> None:
    queue: UnitQueue[str] = UnitQueue()
    for arrival, item in enumerate("abc"):
        queue.push(item, priority=0, arrival=arrival)
    queue.remove("b")
    assert list(queue) == ["a", "c"]
    assert "b" not in queue
    with pytest.raises(KeyError):
        queue.remove("b")
    queue.remove("a")
    queue.remove("c")
    assert (len(queue), queue.lanes(), queue.head(ANY)) == (0, [], None)


def test_an_item_waits_once() -> None:
    queue: UnitQueue[str] = UnitQueue()
    queue.push("a", priority=0, arrival=0)
    with pytest.raises(ValueError, match="waits already"):
        queue.push("a", priority=0, arrival=1)


def test_it_agrees_with_sorting_a_plain_list() -> None:
    rng = random.Random(1)
    queue: UnitQueue[int] = UnitQueue()
    plain: dict[int, tuple[int, int]] = {}
    for item in range(2000):
        plain[item] = (rng.randint(-2, 2), item)
        queue.push(item, priority=plain[item][0], arrival=item, lane=rng.choice([ANY, ALONE, 0, 1]))
        if rng.random() < 0.4:
            gone = rng.choice(list(plain))
            queue.remove(gone)
            del plain[gone]
    expected = sorted(plain, key=plain.__getitem__)
    assert list(queue) == expected
    assert [queue.position(item) for item in expected[::50]] == list(range(len(expected)))[::50]
    assert min((queue.head(lane) for lane in queue.lanes()), key=lambda item: plain[item or 0]) == expected[0]
