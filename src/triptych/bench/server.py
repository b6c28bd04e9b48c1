"""A `triptych serve` of our own for the time of a measurement.

`running_server` starts the command in a process group of its own, waits until every replica is ready, and stops it with
SIGTERM (SIGKILL to the group when that takes too long). The server's log goes to a file; a failed start shows its end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from triptych.bench.errors import ServerStartError

__all__ = ["free_port", "running_server"]

_POLL_S = 0.1
_STOP_TIMEOUT_S = 45.0
_TAIL_LINES = 25


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def running_server(
    arguments: Sequence[str],
    *,
    replicas: int,
    log_path: Path,
    environment: Mapping[str, str] | None = None,
    start_timeout_s: float = 600.0,
) -> AsyncIterator[str]:
    """Serve with these `triptych serve` arguments; yields the base URL once `replicas` replicas are ready.

    Raises `ServerStartError`.
    """
    port = free_port()
    address = ["--host", "127.0.0.1", "--port", str(port)]
    log_path.parent.mkdir(parents=True, exist_ok=True)
    data_dir = tempfile.TemporaryDirectory(prefix="triptych-")
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "triptych", "serve", "--data-dir", data_dir.name, *arguments, *address),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    base_url = f"http://127.0.0.1:{port}"
    try:
        await _wait_until_ready(process, base_url, replicas=replicas, log_path=log_path, timeout_s=start_timeout_s)
        yield base_url
    finally:
        await _stop(process)
        data_dir.cleanup()


async def _wait_until_ready(
    process: asyncio.subprocess.Process, base_url: str, *, replicas: int, log_path: Path, timeout_s: float
) -> None:
    ready = asyncio.create_task(_all_ready(base_url, replicas))
    ended = asyncio.create_task(process.wait())
    try:
        await asyncio.wait({ready, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            return
        if ended.done():
            reason = f"the server ended with exit code {ended.result()} before its replicas were ready"
        else:
            reason = f"not all of {replicas} replicas were ready after {timeout_s:g} s"
        raise ServerStartError(f"{reason}; the end of {log_path}:\n{_tail(log_path)}")
    finally:
        for task in (ready, ended):
            task.cancel()
        await asyncio.gather(ready, ended, return_exceptions=True)


async def _all_ready(base_url: str, replicas: int) -> None:
    timeout = aiohttp.ClientTimeout(total=5.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
                async with session.get(f"{base_url}/v1/replicas") as response:
                    listed = await response.json(content_type=None) if response.status == 200 else None
                    if _ready_count(listed) >= replicas:
                        return
            await asyncio.sleep(_POLL_S)


def _ready_count(listed: Any) -> int:
    data = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(data, list):
        return 0
    return sum(isinstance(replica, dict) and replica.get("state") == "ready" for replica in data)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
    except TimeoutError:
        await _kill(process)
    except asyncio.CancelledError:
        await _kill(process)
        raise


async def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _tail(log_path: Path) -> str:
    text = log_path.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-_TAIL_LINES:]) or "(empty)"
