"""Capacity planning on a virtual clock: the server's own queue, routing and cost model, with replicas that only wait.

Jobs of a mix of service times arrive at random at a given load; nothing sleeps, so thousands of replicas are fine.
Reported per policy: latencies, how far estimates were off, and the ratio of the mean latency to that of a clairvoyant
least-work-left policy, which knows every service time and sends each job on arrival to the replica free first.

    python benchmarks/routing/simulate.py --replicas 4 --mix 0.1:0.8,1:0.2 --load 0.9 --jobs 20000
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from triptych.messages import Address, GenerationRequest, Output, Progress, SamplingParams
from triptych.orchestrator.core import Core
from triptych.orchestrator.cost import CostModel
from triptych.orchestrator.effects import Dispatch, Finish, Requeued
from triptych.orchestrator.routing import POLICIES, create_policy

FOREVER_S = 1e9
STEPS_PER_SECOND = 100  # a job's steps tell the cost model its size, as they do in a real server


class VirtualServer:
    """A core whose clock is a heap of events. Replicas hold a unit for its service time and then answer."""

    def __init__(
        self, *, routing: str, replicas: int, slots: int = 1, max_queue_size: int = 10**9, progress: bool = False
    ) -> None:
        self.now = 0.0
        self.core = Core(
            policy=create_policy(routing, CostModel()),
            max_queue_size=max_queue_size,
            no_replica_timeout_s=30.0,
        )
        self.service_s: dict[str, float] = {}
        self.dispatched_s: dict[tuple[str, int], float] = {}
        self.ended_s: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self._progress = progress
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        for replica_id in range(replicas):
            self.core.replica_ready(replica_id, 1, slots, self.now)

    def at(self, moment_s: float, action: Callable[[], None]) -> None:
        """Do something at a moment, in order of calls among equal moments."""
        heapq.heappush(self._events, (moment_s, next(self._serial), action))

    def submit(self, request_id: str, service_s: float, *, steps: int | None = None, **fields: Any) -> None:
        """Send a request now, every unit of which takes this long. Raises `TriptychError` when it is refused."""
        steps = steps or max(1, round(service_s * STEPS_PER_SECOND))
        params = SamplingParams(prompt="x", seed=0, num_inference_steps=steps)
        fields = {"timeout_s": FOREVER_S} | fields
        self.service_s[request_id] = service_s
        self.core.submit(GenerationRequest(id=request_id, model="m", params=params, **fields), self.now)
        self._carry_out()

    def run(self, until_s: float | None = None) -> None:
        """Let events happen until that moment, or until none is left."""
        while self._events and (until_s is None or self._events[0][0] <= until_s):
            self.now, _, action = heapq.heappop(self._events)
            action()
        if until_s is not None:
            self.now = until_s

    def estimate_error(self) -> float:
        """Mean of what `/v1/replicas` would show."""
        errors = [replica.estimate_error for replica in self.core.dispatcher.pool.by_id.values()]
        return float(np.mean([error for error in errors if error is not None] or [np.nan]))

    def _carry_out(self) -> None:
        effects = self.core.effects
        while effects:
            effect = effects.popleft()
            if isinstance(effect, Dispatch):
                self._start(effect.replica_id, effect.message.address, effect.message.params)
            elif isinstance(effect, Finish):
                self.ended_s[effect.request_id] = self.now
                if effect.error is not None:
                    self.failed[effect.request_id] = effect.error.code
            elif isinstance(effect, Requeued):
                raise AssertionError("virtual replicas do not die")

    def _start(self, replica_id: int, address: Address, params: SamplingParams) -> None:
        service_s, steps = self.service_s[address.request_id], params.num_inference_steps or 1
        self.dispatched_s[address.request_id, address.unit] = self.now
        if self._progress:
            for step in range(1, steps):
                message = Progress(address, step, steps)
                self.at(self.now + service_s * step / steps, lambda message=message: self._say(replica_id, message))
        output = Output(address, "image/png", 64, 64, service_s, steps, 1.0, 0.0)
        self.at(self.now + service_s, lambda: self._say(replica_id, output))

    def _say(self, replica_id: int, message: Output | Progress) -> None:
        self.core.message(replica_id, message, [b"x"] if isinstance(message, Output) else [], self.now)
        self._carry_out()


@dataclass(frozen=True)
class Jobs:
    """When jobs arrive and how long each takes, in seconds."""

    arrivals_s: list[float]
    services_s: list[float]

    @classmethod
    def draw(cls, *, count: int, mix: Sequence[tuple[float, float]], load: float, servers: int, seed: int = 1) -> Jobs:
        """Poisson arrivals at `load` of what `servers` can do; `mix` holds (service seconds, weight)."""
        rng = random.Random(seed)
        times_s, weights = zip(*mix, strict=True)
        services_s = rng.choices(times_s, weights, k=count)
        rate = load * servers * sum(weights) / sum(t * w for t, w in mix)
        arrivals_s = list(itertools.accumulate(rng.expovariate(rate) for _ in range(count)))
        return cls(arrivals_s, services_s)


def latencies_s(jobs: Jobs, *, routing: str, replicas: int, slots: int = 1) -> tuple[np.ndarray, float]:
    """Latency of every job under a policy of the server, and the estimate error at the end."""
    server = VirtualServer(routing=routing, replicas=replicas, slots=slots)
    for number, (arrival_s, service_s) in enumerate(zip(jobs.arrivals_s, jobs.services_s, strict=True)):
        server.at(arrival_s, lambda number=number, service_s=service_s: server.submit(f"{number}", service_s))
    server.run()
    ends_s = [server.ended_s[f"{number}"] for number in range(len(jobs.arrivals_s))]
    return np.array(ends_s) - np.array(jobs.arrivals_s), server.estimate_error()


def clairvoyant_latencies_s(jobs: Jobs, *, servers: int) -> np.ndarray:
    """Latency of every job when each goes on arrival to the server that will be free first."""
    free_s = [0.0] * servers
    latencies = []
    for arrival_s, service_s in zip(jobs.arrivals_s, jobs.services_s, strict=True):
        end_s = max(arrival_s, free_s[0]) + service_s
        heapq.heapreplace(free_s, end_s)
        latencies.append(end_s - arrival_s)
    return np.array(latencies)


def parse_mix(text: str) -> list[tuple[float, float]]:
    """`0.1:0.8,1:0.2` means eight of ten jobs take 0.1 s and two take 1 s."""
    pairs = [part.split(":") for part in text.split(",")]
    return [(float(seconds), float(weight)) for seconds, weight in pairs]


def summary(latencies: np.ndarray) -> dict[str, float]:
    """Mean and percentiles in seconds."""
    p50, p95, p99 = np.percentile(latencies, [50, 95, 99])
    return {"mean_s": float(latencies.mean()), "p50_s": float(p50), "p95_s": float(p95), "p99_s": float(p99)}


def main() -> None:
    """Compare the policies and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--slots", type=int, default=1, help="units a replica runs at once, each at full speed")
    parser.add_argument("--mix", type=parse_mix, default="0.1:0.8,1:0.2", help="seconds:weight,...")
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--routing", nargs="*", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--output-file", type=Path)
    arguments = parser.parse_args()
    servers = arguments.replicas * arguments.slots
    jobs = Jobs.draw(count=arguments.jobs, mix=arguments.mix, load=arguments.load, servers=servers, seed=arguments.seed)
    results = {"clairvoyant": summary(clairvoyant_latencies_s(jobs, servers=servers))}
    for routing in arguments.routing:
        latencies, error = latencies_s(jobs, routing=routing, replicas=arguments.replicas, slots=arguments.slots)
        results[routing] = {**summary(latencies), "estimate_error": error}
    table = Table("policy", "mean s", "p50 s", "p95 s", "p99 s", "of clairvoyant", "estimate error")
    for name, row in results.items():
        ratio = row["mean_s"] / results["clairvoyant"]["mean_s"]
        times = [f"{row[key]:.3f}" for key in ("mean_s", "p50_s", "p95_s", "p99_s")]
        table.add_row(name, *times, f"{ratio:.3f}", f"{row['estimate_error']:.1%}" if "estimate_error" in row else "")
    Console().print(table)
    if arguments.output_file is not None:
        arguments.output_file.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
