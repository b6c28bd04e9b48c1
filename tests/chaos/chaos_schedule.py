"""What goes wrong when, and what clients ask: drawn from a seed, so that a bad run can be repeated. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Blow(StrEnum):
    """Something done to the server's processes from outside."""

    KILL = "kill"  # -9 of a replica
    STOP = "stop"  # SIGSTOP of a replica
    FORKSERVER = "forkserver"  # -9 of the process that replicas are forked from
    REFUSE = "refuse"  # a replica dies, and its next start says that the model cannot be loaded
    DIE = "die"  # a replica dies, and so does its next start


@dataclass(frozen=True)
class Fault:
    at_s: float  # from the start of the storm
    blow: Blow
    replica: int


@dataclass(frozen=True)
class Wish:
    """One request and what its client does meanwhile. `gone_after_s`: closes the connection; None: waits."""

    number: int
    kind: str
    prompt: str
    outputs: int = 1
    timeout_s: float | None = None
    gone_after_s: float | None = None
    deleted_after_s: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": self.prompt, "seed": self.number, "n": self.outputs, "size": "64x64"}
        return body if self.timeout_s is None else {**body, "timeout": self.timeout_s}


# How often a client wishes what, of a hundred; the rest is plain.
_SHARES = {"several": 10, "slow": 6, "oom": 4, "error": 4, "leave": 6, "delete": 5, "late": 4, "crash": 1, "hang": 0.3}


def faults(seed: int, *, duration_s: float, replicas: int, pause_s: tuple[float, float] = (0.5, 2.0)) -> list[Fault]:
    """Blows at random moments: every kind once if there is time for it, then mostly kills."""
    draw = random.Random(f"faults {seed}")
    first = list(Blow)
    draw.shuffle(first)
    plan: list[Fault] = []
    at_s = draw.uniform(*pause_s)
    while at_s < duration_s:
        blow = first.pop() if first else draw.choices(list(Blow), weights=(8, 1, 1, 1, 1))[0]
        plan.append(Fault(at_s, blow, draw.randrange(replicas)))
        at_s += draw.uniform(*pause_s)
    return plan


def wishes(seed: int, client: int) -> Iterator[Wish]:
    """What one client asks, one after another, without end; numbers differ between clients."""
    draw = random.Random(f"wishes {seed} {client}")
    number = client * 1_000_000
    while True:
        number += 1
        pick = draw.uniform(0, 100)
        kind = "plain"
        for name, share in _SHARES.items():
            if pick < share:
                kind = name
                break
            pick -= share
        yield _wish(number, kind, draw)


def _wish(number: int, kind: str, draw: random.Random) -> Wish:
    name = f"wish {number}"
    if kind in ("oom", "error", "crash", "hang"):
        return Wish(number, kind, f"[[{kind}]] {name}")
    if kind == "several":
        return Wish(number, kind, name, outputs=draw.randint(2, 4))
    if kind == "slow":
        return Wish(number, kind, f"[[slow:{draw.uniform(0.3, 1.0):.2f}]] {name}")
    if kind == "leave":
        return Wish(number, kind, f"[[slow:1]] {name}", gone_after_s=draw.uniform(0.0, 0.5))
    if kind == "delete":
        return Wish(number, kind, f"[[slow:1]] {name}", deleted_after_s=draw.uniform(0.0, 0.5))
    if kind == "late":
        return Wish(number, kind, f"[[slow:30]] {name}", timeout_s=0.3)
    return Wish(number, kind, name)
