"""The order that the queue promises, looked up the slow way, from what clients were told alone."""

from __future__ import annotations

from typing import Any

from triptych.orchestrator.queue import AGING_S


class FairOrder:
    """Who of those that wait for any replica must be next: the promise of the queue, looked up the slow way."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[str, int], dict[str, Any]] = {}
        self.priorities: dict[str, int] = {}
        self.users: dict[str, str | None] = {}
        self.arrived_s: dict[str, float] = {}
        self.arrivals: dict[tuple[str, int], int] = {}
        self.turns: dict[object, tuple[float, int]] = {}
        self.count = 0

    def accept(self, request_id: str, n: int, priority: int, user: str | None, now: float) -> None:
        self.priorities[request_id], self.users[request_id], self.arrived_s[request_id] = priority, user, now
        for index in range(n):
            self.arrivals[request_id, index] = len(self.arrivals)
            self.waiting[request_id, index] = {"owner": user}

    def requeue(self, unit: tuple[str, int]) -> None:
        self.waiting[unit] = {"owner": unit}

    def end(self, request_id: str) -> None:
        for unit in [unit for unit in self.waiting if unit[0] == request_id]:
            self.leave(unit)

    def leave(self, unit: tuple[str, int]) -> None:
        owner = self.waiting.pop(unit)["owner"]
        if all(other["owner"] != owner for other in self.waiting.values()):
            self.turns.pop(owner, None)

    def aged_s(self, unit: tuple[str, int]) -> float:
        return self.priorities[unit[0]] * AGING_S + self.arrived_s[unit[0]]

    def next(self) -> tuple[str, int]:
        best = []
        for owner in {entry["owner"] for entry in self.waiting.values()}:
            mine = [unit for unit, entry in self.waiting.items() if entry["owner"] == owner]
            head = min(mine, key=lambda unit: (self.aged_s(unit), self.arrivals[unit]))
            served_s, turn = self.turns.get(owner, (float("-inf"), 0))
            rested_s = min(self.priorities[unit[0]] for unit in mine) * AGING_S + served_s
            best.append((max(self.aged_s(head), rested_s), turn, self.arrivals[head], head))
        return min(best)[3]

    def dispatch(self, unit: tuple[str, int], now: float) -> None:
        self.count += 1
        self.turns[self.waiting[unit]["owner"]] = (now, self.count)
        self.leave(unit)
