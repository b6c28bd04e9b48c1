"""A replica process seen from the other end of its socket."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from triptych.messages import (
    Address,
    FromReplica,
    Generate,
    Heartbeat,
    Output,
    Progress,
    Ready,
    ReplicaSpec,
    SamplingParams,
    Start,
    StartFailed,
    Stop,
    ToReplica,
)
from triptych.wire import Frame, encode, from_replica_decoder

WAIT_S = 30
PLUGINS = """
import os, sys, time
from triptych.engine.base import EngineStartError
from triptych.engine.simulated import SimulatedEngine

SEEN = os.environ.get("CUDA_VISIBLE_DEVICES")

class Unloadable(SimulatedEngine):
    def load(self):
        raise EngineStartError("no such directory: /models/x")

class Buggy(SimulatedEngine):
    def load(self):
        raise KeyError("first line\\nsecond line")

class Printing(SimulatedEngine):
    def load(self):
        print("to stdout", flush=True)
        print("sees", SEEN, "from the start", flush=True)
        os.write(1, b"raw to descriptor 1\\n")
        return super().load()

class SlowToLoad(SimulatedEngine):
    def load(self):
        print("loading", flush=True)
        time.sleep(3600)

class Breaking(SimulatedEngine):
    def run(self):
        raise RuntimeError("device lost")
"""


class Replica:
    """A worker in a fresh interpreter, and our end of its socket."""

    def __init__(self, folder: Path) -> None:
        self.ours, theirs = socket.socketpair()
        self.log = folder / "worker.log"
        self.out = folder / "worker.out"
        with theirs, self.log.open("w") as log, self.out.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "triptych.engine.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdout=out,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(folder)},
            )
        self.ours.settimeout(WAIT_S)
        self.decoder = from_replica_decoder()
        self.pending: list[tuple[FromReplica, Sequence[Frame]]] = []

    def send(self, message: ToReplica) -> None:
        for buffer in encode(message):
            self.ours.sendall(buffer)

    def start(self, engine: str = "simulated", **spec: object) -> None:
        fields = {
            "replica_id": 5,
            "stage_id": 0,
            "engine": engine,
            "model": "m",
            "device_kind": "none",
            "devices": ("0",),
            "cpu_threads": 1,
            "engine_args": {"simulated": {"seconds_per_request": 0.0}},
            **spec,
        }
        self.send(Start(spec=ReplicaSpec(**fields), incarnation=9))  # type: ignore[arg-type]

    def generate(self, prompt: str = "a cat", size: int = 16) -> None:
        params = SamplingParams(prompt=prompt, seed=1, width=size, height=size)
        self.send(Generate(address=Address("r", 0, 0, 9), params=params))

    def hear(self) -> FromReplica:
        """Next message that is no heartbeat."""
        while True:
            while not self.pending:
                count = self.ours.recv_into(self.decoder.get_buffer())
                assert count, self.log.read_text()
                self.pending += self.decoder.buffer_updated(count)
            message, _ = self.pending.pop(0)
            if not isinstance(message, Heartbeat):
                return message

    def end(self) -> None:
        self.ours.close()
        self.process.kill()
        self.process.wait(WAIT_S)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[], Replica]]:
    info = tmp_path / "plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n")
    names = ("Unloadable", "Buggy", "Printing", "SlowToLoad", "Breaking")
    points = "".join(f"{name} = worker_plugins:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[triptych.engines]\n{points}")
    (tmp_path / "worker_plugins.py").write_text(PLUGINS)
    replicas: list[Replica] = []

    def make() -> Replica:
        replicas.append(Replica(tmp_path))
        return replicas[-1]

    yield make
    for replica in replicas:
        replica.end()


Launch = Callable[[], Replica]


def test_it_loads_serves_and_leaves_with_exit_code_0_when_told(launch: Launch) -> None:
    replica = launch()
    replica.start(max_num_seqs=3)
    ready = replica.hear()
    assert isinstance(ready, Ready)
    assert (ready.incarnation, ready.pids, ready.slots) == (9, (replica.process.pid,), 3)
    assert ready.model.pipeline == "SimulatedPipeline"
    replica.generate()
    assert [type(replica.hear()) for _ in range(2)] == [Progress, Output]
    replica.send(Stop())
    assert replica.process.wait(WAIT_S) == 0


def test_stop_waits_for_the_running_unit(launch: Launch) -> None:
    replica = launch()
    replica.start()
    replica.hear()
    replica.generate("[[slow:0.4]]")
    replica.send(Stop())
    while not isinstance(message := replica.hear(), Output):
        pass
    assert message.inference_s >= 0.4
    assert replica.process.wait(WAIT_S) == 0


def test_a_model_that_does_not_load_is_one_line_and_exit_code_1(launch: Launch) -> None:
    replica = launch()
    replica.start("Unloadable")
    assert replica.hear() == StartFailed(9, "no such directory: /models/x")
    assert replica.process.wait(WAIT_S) == 1


def test_a_bug_while_loading_is_one_line_too_and_the_traceback_is_logged(launch: Launch) -> None:
    replica = launch()
    replica.start("Buggy")
    message = replica.hear()
    assert isinstance(message, StartFailed)
    assert message.message.startswith("KeyError: ")
    assert "\n" not in message.message
    assert replica.process.wait(WAIT_S) == 1
    assert "Traceback" in replica.log.read_text()


def test_an_unknown_engine_is_named_with_the_known_ones(launch: Launch) -> None:
    replica = launch()
    replica.start("nope")
    message = replica.hear()
    assert isinstance(message, StartFailed)
    assert "'nope'" in message.message
    assert "simulated" in message.message


def test_an_engine_that_breaks_while_running_ends_the_process(launch: Launch) -> None:
    replica = launch()
    replica.start("Breaking")
    assert isinstance(replica.hear(), Ready)
    assert replica.process.wait(WAIT_S) == 1
    assert "device lost" in replica.log.read_text()


@pytest.mark.parametrize("engine", ["simulated", "SlowToLoad"])
def test_end_of_file_ends_the_process_at_once_also_while_it_loads_or_hangs(launch: Launch, engine: str) -> None:
    replica = launch()
    replica.start(engine)
    if engine == "simulated":
        replica.hear()
        replica.generate("[[hang]]")
    else:
        assert _logged(replica, "loading")
    replica.ours.close()
    assert replica.process.wait(5) == 0


def test_end_of_file_before_start_is_no_error(launch: Launch) -> None:
    replica = launch()
    replica.ours.close()
    assert replica.process.wait(WAIT_S) == 0


def test_stop_while_loading_ends_it_at_once(launch: Launch) -> None:
    replica = launch()
    replica.start("SlowToLoad")
    replica.send(Stop())
    assert replica.process.wait(WAIT_S) == 0


def test_signals_meant_for_the_server_are_ignored(launch: Launch) -> None:
    replica = launch()
    replica.start()
    replica.hear()
    for number in (signal.SIGINT, signal.SIGTERM):
        replica.process.send_signal(number)
    replica.generate()
    assert [type(replica.hear()) for _ in range(2)] == [Progress, Output]


def test_what_is_printed_goes_to_stderr(launch: Launch) -> None:
    replica = launch()
    replica.start("Printing")
    assert isinstance(replica.hear(), Ready)
    assert "to stdout" in replica.log.read_text()
    assert "raw to descriptor 1" in replica.log.read_text()
    assert replica.out.read_text() == ""


def test_heartbeats_come_by_themselves_and_also_while_it_hangs(launch: Launch) -> None:
    replica = launch()
    replica.start()
    replica.hear()
    replica.generate("[[hang]]")
    beats: list[Heartbeat] = []
    while len(beats) < 2:
        replica.pending += replica.decoder.buffer_updated(replica.ours.recv_into(replica.decoder.get_buffer()))
        beats += [m for m, _ in replica.pending if isinstance(m, Heartbeat)]
        replica.pending.clear()
    assert beats[-1].phase == "step"
    assert beats[-1].incarnation == 9


def test_it_is_titled_and_pinned_to_its_cores(launch: Launch) -> None:
    core = min(os.sched_getaffinity(0))
    replica = launch()
    replica.start(cpu_affinity=(core,))
    replica.hear()
    process = psutil.Process(replica.process.pid)
    assert process.cmdline()[0] == "triptych: stage 0 replica 5"
    assert {tuple(os.sched_getaffinity(thread.id)) for thread in process.threads()} == {(core,)}


def test_cores_that_do_not_exist_are_a_warning_with_the_replica_in_the_line(launch: Launch) -> None:
    replica = launch()
    replica.start(cpu_affinity=(100_000,))
    assert isinstance(replica.hear(), Ready)
    assert "[replica 5] triptych.engine.worker: cannot pin to cores" in replica.log.read_text()


@pytest.mark.parametrize(("visible", "expected"), [((), "2,3"), (("GPU-a", "GPU-b"), "GPU-a,GPU-b")])
def test_accelerators_are_pinned_before_the_engine_exists(
    launch: Launch, visible: tuple[str, ...], expected: str
) -> None:
    replica = launch()
    replica.start("Printing", device_kind="cuda", devices=("2", "3"), visible_devices=visible)
    assert isinstance(replica.hear(), Ready)
    assert f"sees {expected} from the start" in replica.log.read_text()


def test_rubbish_on_the_socket_ends_the_process(launch: Launch) -> None:
    replica = launch()
    replica.start()
    replica.hear()
    replica.ours.sendall(b"\xff" * 64)
    assert replica.process.wait(WAIT_S) == 1
    assert "over the limit" in replica.log.read_text()


def test_a_large_answer_survives_a_server_that_reads_in_small_bites(launch: Launch) -> None:
    replica = launch()
    replica.start()
    replica.hear()
    replica.generate(size=1024)
    replica.generate(size=1024)
    pictures: list[Sequence[Frame]] = []
    while len(pictures) < 2:
        assert select.select([replica.ours], [], [], WAIT_S)[0]
        count = replica.ours.recv_into(replica.decoder.get_buffer()[:50_000])
        pictures += [frames for message, frames in replica.decoder.buffer_updated(count) if isinstance(message, Output)]
    assert bytes(pictures[0][0]) == bytes(pictures[1][0])


def _logged(replica: Replica, text: str) -> bool:
    deadline = time.monotonic() + WAIT_S
    while text not in replica.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    return text in replica.log.read_text()
