"""A real `triptych serve` process on a free port, for the tests that need one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

START_TIMEOUT_S = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll an outside process; fails the test when `what` does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s: {what}")
        time.sleep(0.02)


@dataclass
class ServerProcess:
    """A `triptych serve` process in a process group of its own."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)

    def replicas(self) -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = self.client.get("/v1/replicas").json()["data"]
        return data

    def ready_replicas(self) -> int:
        try:
            return sum(replica["state"] == "ready" for replica in self.replicas())
        except httpx.TransportError:
            if self.process.poll() is not None:
                pytest.fail(f"the server ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
            return 0

    def wait_ready(self, count: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.ready_replicas() < count:
            if time.monotonic() > deadline:
                pytest.fail(f"{count} replicas not ready in time:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)

    def descendants(self) -> list[psutil.Process]:
        """The server's processes but itself: forkserver, resource tracker and replicas."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def forkserver(self) -> psutil.Process | None:
        """The process that replicas are forked from; None while there is none."""
        for process in self.descendants():
            with suppress(psutil.NoSuchProcess):  # or it is a zombie
                if "triptych: forkserver" in " ".join(process.cmdline()):
                    return process
        return None

    def image(self, prompt: str = "a red circle", **fields: Any) -> httpx.Response:
        return self.client.post("/v1/images/generations", json={"prompt": prompt, **fields})

    def stop(self, number: signal.Signals = signal.SIGTERM, *, group: bool = False, timeout_s: float = 40) -> int:
        if self.process.poll() is None:
            if group:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)
        return self.process.wait(timeout_s)


StartServer = Callable[..., ServerProcess]
"""A fixture that starts servers and ends them with the test."""


def launch(
    log: Path,
    *args: str,
    port: int | None = None,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    program: Sequence[str] = ("-m", "triptych"),
) -> ServerProcess:
    port = port or free_port()
    command = [sys.executable, *program, "serve", *args, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=cwd, env={**os.environ, **(env or {})}, start_new_session=True
        )
    return ServerProcess(process, port, log)


def end(server: ServerProcess) -> None:
    server.client.close()
    try:
        leftovers = server.descendants()
    except psutil.NoSuchProcess:
        leftovers = []
    try:
        server.stop()
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
    _, alive = psutil.wait_procs(leftovers, timeout=10)
    for process in alive:
        process.kill()


def write_stage_file(
    path: Path, *, replicas: int, seconds: float, slots: int = 1, image: str = "flat", kind: str = "image"
) -> Path:
    """A stage file for the simulated engine."""
    path.write_text(
        f"""\
stages:
  - stage_id: 0
    stage_type: diffusion
    runtime: {{num_replicas: {replicas}}}
    engine_args:
      engine: simulated
      max_num_seqs: {slots}
      simulated: {{seconds_per_request: {seconds}, image: {image}, kind: {kind}}}
"""
    )
    return path
