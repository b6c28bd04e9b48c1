"""The central queue: waiting items in fair order, with priorities that age.

Items wait in lanes (any replica, alone, one lane per replica under early binding); the order is over all lanes. Within
a lane each owner has a line of its own, sorted once by arrival time plus `AGING_S` seconds per priority number, and
owners take turns. Taking the head, insertion and removal are O(log n) comparisons plus a block move of pointers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["AGING_S", "ALONE", "ANY", "UnitQueue"]

ANY = -1
"""Lane of items that any replica may take."""
ALONE = -2
"""Lane of items that need a replica for themselves. Lanes from 0 on belong to the replica of that id."""

AGING_S = 2.0
"""Head start in seconds that one priority number gives: an item is overtaken by those of a priority lower by d only if
they arrive less than d * AGING_S seconds after it. From 100 to -100 that is 400 s, within the default timeout."""

T = TypeVar("T", bound=Hashable)

# Keys are negated so that the head of a list is its last element; arrival numbers are unique, so items, lines and
# priorities are never compared.
_Entry = tuple[float, int, int, T]  # -(priority * AGING_S + arrived_s), -arrival, priority, item


class _Line(Generic[T]):
    """What one owner has in one lane, and when that owner last had its turn there."""

    __slots__ = ("entries", "priorities", "rank", "served_s", "turn")

    def __init__(self) -> None:
        self.entries: list[_Entry[T]] = []
        self.priorities: dict[int, int] = {}  # how many entries have it
        self.served_s = float("-inf")
        self.turn = 0
        self.rank: tuple[float, int, int, _Line[T]] | None = None

    def add(self, entry: _Entry[T]) -> None:
        insort(self.entries, entry)
        self.priorities[entry[2]] = self.priorities.get(entry[2], 0) + 1

    def discard(self, entry: _Entry[T]) -> None:
        if self.entries[-1] is entry:
            self.entries.pop()
        else:
            del self.entries[bisect_left(self.entries, entry)]
        if self.priorities[entry[2]] == 1:
            del self.priorities[entry[2]]
        else:
            self.priorities[entry[2]] -= 1

    def new_rank(self) -> tuple[float, int, int, _Line[T]]:
        """Among owners: the age of the head, but not counted from before the owner's last turn."""
        negative_aged_s, negative_arrival, _, _ = self.entries[-1]
        rested_s = min(self.priorities) * AGING_S + self.served_s
        return (min(negative_aged_s, -rested_s), -self.turn, negative_arrival, self)

    def copy(self) -> _Line[T]:
        line: _Line[T] = _Line()
        line.entries, line.priorities = self.entries.copy(), self.priorities.copy()
        line.served_s, line.turn = self.served_s, self.turn
        return line


class _Lane(Generic[T]):
    """Lines by owner, and their ranks in order."""

    __slots__ = ("lines", "ranks")

    def __init__(self) -> None:
        self.lines: dict[Hashable, _Line[T]] = {}
        self.ranks: list[tuple[float, int, int, _Line[T]]] = []

    def refresh(self, owner: Hashable, line: _Line[T]) -> None:
        """Put a line that changed where it belongs; an empty one is forgotten."""
        rank = line.new_rank() if line.entries else None
        before = line.rank
        if before is not None:
            if rank is not None and rank[:3] == before[:3]:
                return
            if self.ranks[-1] is before:
                self.ranks.pop()
            else:
                del self.ranks[bisect_left(self.ranks, before)]
        line.rank = rank
        if rank is None:
            del self.lines[owner]
        else:
            insort(self.ranks, rank)

    def copy(self) -> _Lane[T]:
        lane: _Lane[T] = _Lane()
        for owner, line in self.lines.items():
            copied = lane.lines[owner] = line.copy()
            copied.rank = copied.new_rank()
            lane.ranks.append(copied.rank)
        lane.ranks.sort()
        return lane


class UnitQueue(Generic[T]):
    """Waiting items; lower priority numbers first.

    Within an owner: arrival time plus `AGING_S` per priority number decides, a fixed order in which no item starves
    and equal priorities are first come, first served. Between owners: whoever had no turn for longest goes first, a
    priority number again counting for `AGING_S` seconds; so an item of an owner who has nothing else in the queue
    waits for at most one item of each other owner of its priority. An owner is judged by its most urgent item, so
    that none of its items is held up by an older, less urgent one. A turn is one item, however long it takes.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane[T]] = {}
        self._where: dict[T, tuple[int, Hashable, _Entry[T]]] = {}
        self.turns = 0  # items taken so far
        self.version = 0  # changes whenever the order may have changed
        self._latest_s = 0.0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, item: T) -> bool:
        return item in self._where

    def __iter__(self) -> Iterator[T]:
        """Items in the order in which they would leave if all did now."""
        rest = self.copy()
        while (item := rest.first()) is not None:
            rest.take(item, self._latest_s)
            yield item

    def push(
        self, item: T, *, priority: int, arrival: int, arrived_s: float, owner: Hashable = None, lane: int = ANY
    ) -> None:
        """Add an item; one that waited before keeps its place by keeping its arrival number and time (seconds)."""
        if item in self._where:
            raise ValueError("the item waits already")
        entry = (-(priority * AGING_S + arrived_s), -arrival, priority, item)
        self._where[item] = (lane, owner, entry)
        self.version += 1
        self._latest_s = max(self._latest_s, arrived_s)
        place = self._lanes.get(lane)
        if place is None:
            place = self._lanes[lane] = _Lane()
        line = place.lines.get(owner)
        if line is None:
            line = place.lines[owner] = _Line()
        line.add(entry)
        place.refresh(owner, line)

    def reprioritize(self, item: T, *, priority: int, arrived_s: float) -> None:
        """Move an item to where another priority belongs. Raises KeyError if it does not wait."""
        lane, owner, before = self._where[item]
        entry = (-(priority * AGING_S + arrived_s), before[1], priority, item)
        self._where[item] = (lane, owner, entry)
        self.version += 1
        place = self._lanes[lane]
        line = place.lines[owner]
        line.discard(before)
        line.add(entry)
        place.refresh(owner, line)

    def remove(self, item: T) -> None:
        """Take an item out, wherever it stands; no turn is spent. Raises KeyError if it does not wait."""
        self._take_out(item, None)

    def take(self, item: T, now: float) -> None:
        """Take an item out to start it: its owner had its turn. Raises KeyError if it does not wait."""
        self._latest_s = max(self._latest_s, now)
        self.turns += 1
        self._take_out(item, now)

    def _take_out(self, item: T, served_s: float | None) -> None:
        lane, owner, entry = self._where.pop(item)
        self.version += 1
        place = self._lanes[lane]
        line = place.lines[owner]
        line.discard(entry)
        if served_s is not None:
            line.served_s, line.turn = served_s, self.turns
        place.refresh(owner, line)
        if not place.lines:
            del self._lanes[lane]

    def head(self, lane: int) -> T | None:
        """First item of a lane, or None."""
        place = self._lanes.get(lane)
        return place.ranks[-1][3].entries[-1][3] if place is not None else None

    def first(self) -> T | None:
        """First item over all lanes, or None."""
        lanes = self.lanes()
        return self.head(lanes[0]) if lanes else None

    def lanes(self) -> list[int]:
        """Lanes in which something waits, the one with the first item first."""
        if len(self._lanes) < 2:
            return list(self._lanes)
        return sorted(self._lanes, key=lambda lane: self._lanes[lane].ranks[-1][:3], reverse=True)

    def lane_items(self, lane: int) -> list[T]:
        """Items of one lane in order of priority and age, whoever owns them."""
        place = self._lanes.get(lane)
        if place is None:
            return []
        return [entry[3] for entry in sorted((e for line in place.lines.values() for e in line.entries), reverse=True)]

    def copy(self) -> UnitQueue[T]:
        """A queue to rehearse with: it knows the same items and turns."""
        queue: UnitQueue[T] = UnitQueue()
        queue._lanes = {lane: place.copy() for lane, place in self._lanes.items()}
        queue._where = self._where.copy()
        queue.turns, queue._latest_s = self.turns, self._latest_s
        return queue
