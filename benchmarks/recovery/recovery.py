"""How soon killed and stopped replicas serve again, and what their clients notice.

Clients ask without pause; one replica after another gets `kill -9`, then one SIGSTOP. Reported: seconds from each blow
until every replica is ready again, how requests ended, whether every simulated picture shows its own prompt and seed,
and what `/health` said.

    python benchmarks/recovery/recovery.py --kills 20 --at-most 2.0
    python benchmarks/recovery/recovery.py --model triptych/shapes --replicas 2 --clients 4 --every 6
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from triptych.bench.server import running_server

_LOOK_EVERY_S = 0.01
_BACK_WITHIN_S = 60.0


class Run:
    """One server under load, and what is seen of it."""

    def __init__(self, session: aiohttp.ClientSession, *, simulated: bool) -> None:
        self.ended: Counter[str] = Counter()
        self.health: Counter[str] = Counter()
        self._session = session
        self._simulated = simulated

    async def ask_on(self, serials: Iterator[int], over: asyncio.Event) -> None:
        """One client."""
        while not over.is_set():
            self.ended[await self._ask(next(serials))] += 1

    async def _ask(self, serial: int) -> str:
        body: dict[str, Any] = {"prompt": f"a red circle, number {serial}", "seed": serial}
        if self._simulated:
            body["size"] = "64x64"
        try:
            async with self._session.post("/v1/images/generations", json=body) as response:
                answer = await response.json()
                if response.status != 200:
                    return str(answer["error"]["code"])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return type(error).__name__
        picture = base64.b64decode(answer["data"][0]["b64_json"])
        shown = json.dumps({"prompt": body["prompt"], "seed": serial}).encode()
        if not picture.startswith(b"\x89PNG") or (self._simulated and shown not in picture):
            return "wrong picture"
        return "right"

    async def watch_health(self) -> None:
        """Look at `/health` until cancelled."""
        while True:
            async with self._session.get("/health") as response:
                self.health[(await response.json()).get("status", str(response.status))] += 1
            await asyncio.sleep(0.05)

    async def replicas(self) -> list[dict[str, Any]]:
        """The list as the server shows it."""
        async with self._session.get("/v1/replicas") as response:
            data: list[dict[str, Any]] = (await response.json())["data"]
            return data

    async def strike(self, replica_id: int, number: signal.Signals) -> float:
        """Signal one replica; seconds until another process serves in its place and all are ready."""
        pid = (await self.replicas())[replica_id]["pid"]
        began_at = time.perf_counter()
        os.kill(pid, number)
        async with asyncio.timeout(_BACK_WITHIN_S):
            while True:
                replicas = await self.replicas()
                if replicas[replica_id]["pid"] != pid and all(replica["state"] == "ready" for replica in replicas):
                    return time.perf_counter() - began_at
                await asyncio.sleep(_LOOK_EVERY_S)  # over HTTP there is nothing to wait on


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All blows under load."""
    simulated = arguments.model == "simulated"
    serve = ["--log-level", "warning"]
    if simulated:
        stage_file = folder / "simulated.yaml"
        engine = f"{{engine: simulated, simulated: {{seconds_per_request: {arguments.seconds}, image: flat}}}}"
        stage_file.write_text(
            "stages:\n  - stage_id: 0\n    stage_type: diffusion\n"
            f"    runtime: {{num_replicas: {arguments.replicas}}}\n    engine_args: {engine}\n"
        )
        serve += ["--stage-configs-path", str(stage_file)]
    else:
        serve = [arguments.model, "--num-replicas", str(arguments.replicas), *serve]
    log_path = folder / "server.log"
    async with (
        running_server(serve, replicas=arguments.replicas, log_path=log_path) as url,
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        run = Run(session, simulated=simulated)
        over, serials = asyncio.Event(), itertools.count()
        watching = asyncio.create_task(run.watch_health())
        clients = [asyncio.create_task(run.ask_on(serials, over)) for _ in range(arguments.clients)]
        await asyncio.sleep(arguments.every)
        kills_s = []
        for number in range(arguments.kills):
            kills_s.append(await run.strike(number % arguments.replicas, signal.SIGKILL))
            await asyncio.sleep(max(0.0, arguments.every - kills_s[-1]))
        stop_s = await run.strike(0, signal.SIGSTOP)
        over.set()
        await asyncio.gather(*clients)
        watching.cancel()
    return {
        "kills_s": kills_s,
        "kill_p50_s": float(np.median(kills_s)),
        "kill_max_s": max(kills_s),
        "stop_s": stop_s,
        "ended": dict(run.ended),
        "health": dict(run.health),
    }


def show(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """The table."""
    title = f"{arguments.model}: {arguments.replicas} replicas, {arguments.clients} clients, {arguments.kills} kills"
    table = Table("", "", title=title, title_justify="left", show_header=False)
    table.add_row(
        "all replicas ready after kill -9, p50 / max", f"{report['kill_p50_s']:.2f} / {report['kill_max_s']:.2f} s"
    )
    table.add_row("after SIGSTOP", f"{report['stop_s']:.2f} s")
    for name in ("ended", "health"):
        counts = sorted(report[name].items(), key=lambda item: -item[1])
        table.add_row(
            "requests" if name == "ended" else "/health", ", ".join(f"{count} {what}" for what, count in counts)
        )
    Console(width=110).print(table)


def main() -> int:
    """Measure, report, compare with the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="simulated", help="simulated, or a model to serve")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--every", type=float, default=1.5, help="seconds between kills")
    parser.add_argument("--seconds", type=float, default=0.2, help="service time of a simulated request")
    parser.add_argument("--at-most", type=float, help="exit 1 when a kill took longer, or when a request failed")
    parser.add_argument("--output-file", type=Path, help="write the report there as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        report = asyncio.run(measure(arguments, Path(name)))
    show(arguments, report)
    if arguments.output_file:
        arguments.output_file.write_text(json.dumps(report, indent=2) + "\n")
    bar = arguments.at_most
    return int(bar is not None and (report["kill_max_s"] > bar or set(report["ended"]) != {"right"}))


if __name__ == "__main__":
    sys.exit(main())
