"""What becomes of replicas and forkserver when the server dies or the whole process group gets a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

WAIT_S = 60

SERVER = """
import asyncio, json, signal, sys
sys.path.insert(0, {folder!r})
from replica_fleet import Fleet, replica_spec
from triptych.telemetry.logging import configure_logging

async def main(engine):
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: None)
    loop.add_signal_handler(signal.SIGUSR1, stop.set)
    began = loop.time()
    fleet = Fleet([replica_spec(0, engine=engine, seconds=60), replica_spec(1, engine=engine, seconds=60)])
    await fleet.supervisor.start()
    while fleet.executor.forkserver_pid is None:
        await asyncio.sleep(0.01)
    print(json.dumps({{"forkserver": fleet.executor.forkserver_pid}}), flush=True)
    await fleet.until_ready(2)
    print(json.dumps({{"pids": [fleet.pid(0), fleet.pid(1)], "seconds": loop.time() - began}}), flush=True)
    fleet.generate(0)
    await stop.wait()
    await fleet.supervisor.stop(timeout_s=1)
    print(json.dumps({{"lost": fleet.lost}}), flush=True)

configure_logging("info", "text")
asyncio.run(main(sys.argv[1]))
"""

TORCH_PLUGIN = """
import sys
import torch
from triptych.engine.simulated import SimulatedEngine

class TorchEngine(SimulatedEngine):
    def load(self):
        if "triptych.engine.preload" not in sys.modules:
            raise RuntimeError("not a child of the preloaded forkserver")
        assert float(torch.ones(3).sum()) == 3.0
        return super().load()
"""


class Server:
    """The script above as a process group of its own."""

    def __init__(self, tmp_path: Path, engine: str, env: dict[str, str]) -> None:
        script = tmp_path / "server_script.py"
        script.write_text(SERVER.format(folder=str(Path(__file__).parent)))
        self.log = tmp_path / "server.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), engine],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, **env},
            )
        self.seen: list[int] = []

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        told: dict[str, Any] = json.loads(line)
        self.seen += [*told.get("pids", []), *([told["forkserver"]] if "forkserver" in told else [])]
        return told

    def end(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        for pid in self.seen:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pids: list[int], seconds: float) -> list[int]:
    """Those of `pids` that are left after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(engine: str = "simulated", **env: str) -> Server:
        servers.append(Server(tmp_path, engine, env))
        return servers[-1]

    yield make
    for server in servers:
        server.end()


@pytest.fixture
def torch_plugin(tmp_path: Path) -> str:
    """Folder of an installed-looking package whose engine needs torch."""
    folder = tmp_path / "plugins"
    info = folder / "torch_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[triptych.engines]\ntorchy = torch_plugin:TorchEngine\n")
    (folder / "torch_plugin.py").write_text(TORCH_PLUGIN)
    return str(folder)


def test_kill_9_of_the_server_leaves_no_process_after_five_seconds(start: Callable[..., Server]) -> None:
    server = start()
    forkserver = server.hear()["forkserver"]
    pids = server.hear()["pids"]
    assert all(map(alive, [forkserver, *pids]))
    server.process.kill()
    assert wait_gone([forkserver, *pids], 5) == []


def test_signals_to_the_group_end_neither_forkserver_nor_replicas(start: Callable[..., Server]) -> None:
    server = start()
    forkserver = server.hear()["forkserver"]
    os.killpg(server.process.pid, signal.SIGTERM)  # while the forkserver starts
    os.killpg(server.process.pid, signal.SIGINT)
    pids = server.hear()["pids"]
    for number in (signal.SIGINT, signal.SIGTERM):
        os.killpg(server.process.pid, number)
    assert wait_gone([forkserver], 0.5) == [forkserver]
    assert all(map(alive, pids))
    server.process.send_signal(signal.SIGUSR1)
    assert sorted(reason for _, _, reason in server.hear()["lost"]) == ["exit code 0", "killed by SIGKILL"]
    assert server.process.wait(WAIT_S) == 0
    assert wait_gone([forkserver, *pids], 5) == []


@pytest.mark.slow
def test_a_plug_in_engine_is_preloaded_with_torch_and_survives_group_signals_meanwhile(
    start: Callable[..., Server], torch_plugin: str
) -> None:
    server = start("torchy", PYTHONPATH=torch_plugin)
    forkserver = server.hear()["forkserver"]
    for _ in range(5):
        os.killpg(server.process.pid, signal.SIGTERM)
        os.killpg(server.process.pid, signal.SIGINT)
        time.sleep(0.05)
    pids = server.hear()["pids"]
    for pid in pids:
        assert any("libtorch" in mapped.path for mapped in psutil.Process(pid).memory_maps())
        assert psutil.Process(pid).ppid() == forkserver
    assert "not preloaded" not in server.log.read_text()


@pytest.mark.slow
def test_kill_9_of_the_server_during_the_preload_leaves_nothing(
    start: Callable[..., Server], torch_plugin: str
) -> None:
    server = start("torchy", PYTHONPATH=torch_plugin)
    forkserver = server.hear()["forkserver"]
    time.sleep(0.2)
    server.process.kill()
    assert wait_gone([forkserver], 30) == []
