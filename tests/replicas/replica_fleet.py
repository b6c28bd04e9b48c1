"""A supervisor over real processes, with a listener that remembers what it heard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from triptych.messages import (
    Aborted,
    Address,
    Failure,
    FromReplica,
    Generate,
    ModelInfo,
    Output,
    ReplicaSpec,
    SamplingParams,
)
from triptych.replicas.process import ProcessExecutor
from triptych.replicas.state import ReplicaState
from triptych.replicas.supervisor import Supervisor
from triptych.replicas.watchdog import WatchdogLimits
from triptych.wire import Frame

WAIT_S = 30


def replica_spec(
    replica_id: int = 0, *, engine: str = "simulated", slots: int = 2, seconds: float = 0.0
) -> ReplicaSpec:
    return ReplicaSpec(
        replica_id=replica_id,
        stage_id=0,
        engine=engine,
        model="m",
        device_kind="none",
        devices=(str(replica_id),),
        cpu_threads=1,
        max_num_seqs=slots,
        engine_args={"simulated": {"seconds_per_request": seconds}},
    )


class Fleet:
    """A supervisor with the listener a test asks."""

    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        *,
        max_parallel_loads: int = 4,
        executor: Any = None,
        limits: WatchdogLimits | None = None,
    ) -> None:
        self.executor = executor or ProcessExecutor(specs[0].engine)
        self.supervisor = Supervisor(
            specs, self.executor, listener=self, max_parallel_loads=max_parallel_loads, limits=limits
        )
        self.ready: dict[int, int] = {}  # replica -> incarnation
        self.ready_log: list[tuple[int, int]] = []
        self.lost: list[tuple[int, int, str]] = []
        self.heard: list[tuple[int, FromReplica, list[bytes]]] = []
        self.draining: list[tuple[int, int, bool]] = []
        self.failure: str | None = None
        self.model: ModelInfo | None = None
        self._changed = asyncio.Event()

    def replica_ready(self, replica_id: int, incarnation: int, slots: int, model: ModelInfo) -> None:
        self.ready[replica_id] = incarnation
        self.ready_log.append((replica_id, incarnation))
        self.model = model
        self._changed.set()

    def replica_draining(self, replica_id: int, incarnation: int, *, comes_back: bool) -> None:
        self.draining.append((replica_id, incarnation, comes_back))
        self._changed.set()

    def replica_lost(self, replica_id: int, incarnation: int, reason: str) -> None:
        self.ready.pop(replica_id, None)
        self.lost.append((replica_id, incarnation, reason))
        self._changed.set()

    def replica_message(self, replica_id: int, message: FromReplica, frames: Sequence[Frame]) -> None:
        self.heard.append((replica_id, message, [bytes(frame) for frame in frames]))
        self._changed.set()

    def expected_step_s(self, replica_id: int) -> float | None:
        return None

    def supervision_failed(self, reason: str) -> None:
        self.failure = reason
        self._changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_ready(self, count: int) -> None:
        await self.until(lambda: len(self.ready) == count)

    def generate(self, replica_id: int = 0, prompt: str = "a cat", *, unit: int = 0, **params: Any) -> Address:
        address = Address("r", unit, 0, self.ready[replica_id])
        sampling = SamplingParams(**{"prompt": prompt, "seed": 1, "width": 32, "height": 32, **params})
        self.supervisor.send(replica_id, Generate(address=address, params=sampling))
        return address

    def ends(self) -> list[tuple[int, FromReplica]]:
        return [(r, m) for r, m, _ in self.heard if isinstance(m, Output | Failure | Aborted)]

    def state(self, replica_id: int = 0) -> ReplicaState:
        return self.supervisor.statuses()[replica_id].state

    def pid(self, replica_id: int = 0) -> int:
        return self.supervisor.statuses()[replica_id].pids[0]


StartFleet = Callable[..., Awaitable[Fleet]]


async def eventually(condition: Callable[[], bool]) -> None:
    """For what no listener is told."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def install_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> None:
    """Make `Engine` of `source` an engine called `name`, for this process and the forkserver it starts."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[triptych.engines]\n{name} = {name}_engine:Engine\n")
    (folder / f"{name}_engine.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(folder)


def remaining_processes() -> list[str]:
    """Live children of this process, without multiprocessing's resource tracker, which ends with its parent."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if "resource_tracker" not in command and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {command}")
        except psutil.NoSuchProcess:
            continue
    return found
