"""What a server process holds at one moment, and what it holds too much of later."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.server_process import ServerProcess, wait_until


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Counts of one idle server, its replicas included in `processes`; `tasks` by what they run, memory in bytes."""

    tasks: Counter[str]
    descriptors: int
    connections: int
    threads: int
    processes: int
    shared_memory: int
    resident_bytes: int

    def beyond(self, baseline: Holdings, *, growth_bytes: int) -> list[str]:
        """What has grown, one line each; memory may by `growth_bytes`, threads of pools are bounded elsewhere."""
        grown = [
            f"{name}: {before} before, {after} after"
            for name in ("descriptors", "connections", "processes", "shared_memory")
            if (after := getattr(self, name)) > (before := getattr(baseline, name))
        ]
        grown += [f"task {name}: {count} more" for name, count in (self.tasks - baseline.tasks).items()]
        growth = self.resident_bytes - baseline.resident_bytes
        if growth > growth_bytes:
            grown.append(f"memory: {growth / 2**20:.1f} MiB more, allowed {growth_bytes / 2**20:.1f}")
        return grown


def holdings(server: ServerProcess, observed: Path) -> Holdings:
    """Ask a `support.observed_server` whose `$OBSERVED` is this path."""
    observed.unlink(missing_ok=True)
    os.kill(server.process.pid, signal.SIGUSR2)
    wait_until(observed.exists, 10, "the server tells what it holds")
    process = psutil.Process(server.process.pid)
    with process.oneshot():
        return Holdings(
            tasks=Counter(json.loads(observed.read_text())["tasks"]),
            descriptors=process.num_fds(),
            connections=sum(c.status == psutil.CONN_ESTABLISHED for c in process.net_connections("tcp")),
            threads=process.num_threads(),
            processes=len(process.children(recursive=True)),
            shared_memory=len(list(Path("/dev/shm").glob("*"))),
            resident_bytes=process.memory_info().rss,
        )
