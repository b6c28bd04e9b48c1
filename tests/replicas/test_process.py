"""The process executor below the supervisor: launching, bad forks, plain asyncio."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

import psutil
import pytest
from replica_fleet import StartFleet, eventually, install_engine, remaining_processes, replica_spec

from triptych.errors import ConfigError
from triptych.messages import Address, FromReplica, Generate, Output, Ready, ReplicaSpec, SamplingParams, Stop
from triptych.replicas.launch import ForkServer
from triptych.replicas.process import ProcessExecutor
from triptych.wire import Frame

FAKE_TORCH = """
import sys

class cuda:
    @staticmethod
    def _is_in_bad_fork():
        return "triptych.engine.preload" in sys.modules
"""


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


FORKING_ENGINE = """
import os, time
from triptych.engine.simulated import SimulatedEngine

class Engine(SimulatedEngine):
    def run(self):
        if os.fork() == 0:
            time.sleep(6)
        os._exit(7)
"""


DYING_ENGINE = """
import os, signal
from triptych.engine.simulated import SimulatedEngine

class Engine(SimulatedEngine):
    def _finish(self, work):
        super()._finish(work)
        os.kill(os.getpid(), signal.SIGKILL)
"""


class Listener:
    def __init__(self) -> None:
        self.heard: asyncio.Queue[FromReplica] = asyncio.Queue()
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_message(self, message: FromReplica, frames: Sequence[Frame]) -> None:
        self.heard.put_nowait(message)

    def on_exit(self, reason: str) -> None:
        self.exited.set_result(reason)  # raises if told twice


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_one_life_on_either_event_loop(use_uvloop: bool) -> None:
    async def life() -> None:
        listener, executor = Listener(), ProcessExecutor("simulated")
        async with asyncio.timeout(30):
            replica = await executor.start(replica_spec(), 1, listener)
            assert psutil.pid_exists(replica.pids[0])
            assert type(await listener.heard.get()).__name__ == "Ready"
            replica.send(Stop())
            assert await listener.exited == "exit code 0"
            assert replica.pids == ()
            replica.send(Stop())  # nothing happens
            replica.kill()
            await executor.close()
            await executor.close()

    if use_uvloop:
        import uvloop

        uvloop.run(life())
    else:
        asyncio.run(life())
    assert remaining_processes() == []


@pytest.mark.anyio
async def test_no_descriptor_is_left_after_many_lives() -> None:
    executor = ProcessExecutor("simulated")
    counts = []
    for incarnation in range(1, 6):
        listener = Listener()
        replica = await executor.start(replica_spec(), incarnation, listener)
        replica.kill()
        assert await asyncio.wait_for(listener.exited, 30) == "killed by SIGKILL"
        counts.append(open_descriptors())
    await executor.close()
    assert counts[-1] == counts[0]


@pytest.mark.anyio
@pytest.mark.parametrize("fresh_interpreter", [False, True])
async def test_a_start_that_is_called_off_leaves_neither_process_nor_descriptor(fresh_interpreter: bool) -> None:
    executor = ProcessExecutor("simulated")
    listener = Listener()
    warm = await executor.start(replica_spec(), 1, listener)
    before = open_descriptors()
    if fresh_interpreter:
        executor.leave_forkserver()
    for delay_s in (0.0, 0.001, 0.003, 0.01):
        task = asyncio.create_task(executor.start(replica_spec(), 2, Listener()))
        await asyncio.sleep(delay_s)
        task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(result, asyncio.CancelledError):
            result.kill()  # type: ignore[union-attr]
    async with asyncio.timeout(30):
        while len(remaining_processes()) > 2 or open_descriptors() > before:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.02)
    warm.kill()
    await asyncio.wait_for(listener.exited, 30)
    await executor.close()


def test_an_unknown_engine_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="no such engine"):
        ProcessExecutor("nope")


@pytest.mark.anyio
async def test_a_replica_in_a_bad_cuda_fork_starts_again_in_a_fresh_interpreter(
    start_fleet: StartFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    install_engine(
        tmp_path, monkeypatch, "fake", "import torch\nfrom triptych.engine.simulated import SimulatedEngine as Engine\n"
    )
    specs = [_on_cuda(replica_spec(i, engine="fake")) for i in range(2)]
    with caplog.at_level(logging.WARNING):
        fleet = await start_fleet(*specs, ready=2)
    assert [psutil.Process(fleet.pid(i)).ppid() for i in range(2)] == [os.getpid()] * 2
    assert [record.message for record in caplog.records if "fresh interpreter" in record.message] == [
        "CUDA is unusable in forked replicas; starting each in a fresh interpreter from now on"
    ]
    assert fleet.lost == []
    fleet.generate(prompt="[[crash]]")
    await fleet.until(lambda: fleet.lost)
    assert fleet.lost[0][2] == "killed by SIGKILL"
    await fleet.until_ready(2)


@pytest.mark.anyio
async def test_a_result_sent_right_before_death_is_heard_although_the_death_is_seen_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path, monkeypatch, "dying", DYING_ENGINE)
    executor, listener = ProcessExecutor("dying"), Listener()
    replica = await executor.start(replica_spec(engine="dying"), 1, listener)
    assert isinstance(await asyncio.wait_for(listener.heard.get(), 30), Ready)
    assert replica._transport is not None
    replica._transport.pause_reading()
    address = Address("r", 0, 1, 1)
    replica.send(Generate(address, SamplingParams(prompt="x", seed=1, width=32, height=32)))
    await eventually(lambda: not {"process", "stderr", "status"} & replica._open)
    assert not listener.exited.done()
    replica._transport.resume_reading()
    assert await asyncio.wait_for(listener.exited, 30) == "killed by SIGKILL"
    heard = [listener.heard.get_nowait() for _ in range(listener.heard.qsize())]
    assert [message.address for message in heard if isinstance(message, Output)] == [address]
    await executor.close()


@pytest.mark.anyio
async def test_a_grandchild_that_keeps_the_socket_does_not_hide_the_death_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path, monkeypatch, "forking", FORKING_ENGINE)
    executor, listener = ProcessExecutor("forking"), Listener()
    await executor.start(replica_spec(engine="forking"), 1, listener)
    assert await asyncio.wait_for(listener.exited, 5) == "exit code 7"
    await executor.close()


def _on_cuda(spec: ReplicaSpec) -> ReplicaSpec:
    fields: dict[str, Any] = {name: getattr(spec, name) for name in spec.__struct_fields__}
    return ReplicaSpec(**{**fields, "device_kind": "cuda"})


@pytest.mark.anyio
async def test_a_forkserver_that_is_stopped_is_replaced(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.replicas.process._EXIT_GRACE_S", 0.2)  # nobody tells how the replica ended
    fleet = await start_fleet(ready=2)
    monkeypatch.setattr("triptych.replicas.launch._FORK_S", 0.2)
    stopped = fleet.executor.forkserver_pid
    os.kill(stopped, signal.SIGSTOP)
    os.kill(fleet.pid(0), signal.SIGKILL)
    error = "could not be started: the forkserver did not fork within 0.2 s"
    await eventually(lambda: fleet.supervisor.statuses()[0].last_error == error)
    await fleet.until_ready(2)
    assert fleet.executor.forkserver_pid != stopped


@pytest.mark.anyio
async def test_a_cleaner_of_old_files_does_not_keep_replicas_down(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(ready=2)
    shutil.rmtree(util.get_temp_dir())  # with the socket of the forkserver
    os.kill(fleet.pid(0), signal.SIGKILL)
    await fleet.until(lambda: fleet.lost)
    await fleet.until_ready(2)


@pytest.mark.anyio
async def test_a_forkserver_that_dies_while_it_starts_is_an_error_at_once_and_the_next_fork_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fatal_preload.py").write_text(
        "import os, pathlib\nmark = pathlib.Path(__file__).with_name('died')\n"
        "if not mark.exists():\n    mark.touch()\n    os._exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer(["triptych.engine.preload", "fatal_preload", "triptych.engine.worker"])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(OSError, match="ended before it could fork"):
            await asyncio.wait_for(server.fork(theirs, 2), 30)
        child = await asyncio.wait_for(server.fork(theirs, 2), 30)
        assert psutil.pid_exists(child.pid)
        child.close()
    await server.close()
