"""Supervision of real processes: start, work, abort, death, hang, stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from replica_fleet import Fleet, StartFleet, eventually, install_engine, replica_spec

from triptych.messages import (
    Abort,
    Aborted,
    Address,
    Failure,
    Generate,
    MediaInput,
    Output,
    Progress,
    ReplicaSpec,
    SamplingParams,
)
from triptych.replicas.base import ReplicaListener
from triptych.replicas.process import ProcessExecutor, ProcessReplica
from triptych.replicas.state import ReplicaState
from triptych.replicas.watchdog import PhaseLimit, WatchdogLimits
from triptych.telemetry.logging import RAW_LOGGER

pytestmark = pytest.mark.anyio


async def test_two_replicas_get_ready_and_draw(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(ready=2)
    statuses = fleet.supervisor.statuses()
    assert [status.state for status in statuses] == [ReplicaState.READY] * 2
    assert statuses[0].pids != statuses[1].pids
    assert sorted(incarnation for _, incarnation in fleet.ready_log) == [1, 2]
    for replica_id in (0, 1):
        fleet.generate(replica_id)
    await fleet.until(lambda: len(fleet.ends()) == 2)
    assert {replica_id for replica_id, _ in fleet.ends()} == {0, 1}
    assert all(isinstance(message, Output) for _, message in fleet.ends())
    assert all(frames[0].startswith(b"\x89PNG") for _, m, frames in fleet.heard if isinstance(m, Output))


async def test_a_simulated_replica_is_titled_and_never_imports_torch(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(replica_spec(3), ready=1)
    process = psutil.Process(fleet.pid(0))
    assert process.cmdline()[0] == "triptych: stage 0 replica 3"
    assert [mapped.path for mapped in process.memory_maps() if "torch" in mapped.path] == []


async def test_an_abort_frees_the_unit_and_leaves_its_neighbour(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(replica_spec(seconds=60), ready=1)
    aborted = fleet.generate(unit=0)
    fleet.generate(unit=1, prompt="[[slow:0.5]]")
    await fleet.until(lambda: any(isinstance(m, Progress) for _, m, _ in fleet.heard))
    fleet.supervisor.send(0, Abort(aborted))
    await fleet.until(lambda: len(fleet.ends()) == 2)
    assert fleet.ends()[0] == (0, Aborted(aborted))
    last = fleet.ends()[1][1]
    assert isinstance(last, Output)
    assert last.address.unit == 1


@pytest.mark.parametrize(("fault", "code"), [("oom", "out_of_memory"), ("error", "engine_error")])
async def test_a_failure_is_told_and_the_replica_lives_on(start_fleet: StartFleet, fault: str, code: str) -> None:
    fleet = await start_fleet(replica_spec(), ready=1)
    pid = fleet.pid()
    fleet.generate(prompt=f"[[{fault}]]")
    await fleet.until(fleet.ends)
    message = fleet.ends()[0][1]
    assert isinstance(message, Failure)
    assert message.code == code
    assert fleet.pid() == pid


async def test_a_crashed_replica_comes_back_as_another_process_and_incarnation(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(ready=2)
    before, other = fleet.pid(0), fleet.pid(1)
    incarnation = fleet.ready[0]
    fleet.generate(0, prompt="[[crash]]")
    await fleet.until(lambda: fleet.lost)
    assert fleet.lost == [(0, incarnation, "killed by SIGKILL")]
    assert not psutil.pid_exists(before)
    await fleet.until_ready(2)
    assert fleet.ready[0] == 3
    assert fleet.pid(0) != before
    assert fleet.pid(1) == other
    status = fleet.supervisor.statuses()[0]
    assert (status.restarts, status.last_error) == (1, "killed by SIGKILL")
    fleet.generate(0)
    await fleet.until(fleet.ends)


async def test_a_hung_replica_ends_by_kill_and_is_replaced(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(replica_spec(), ready=1)
    pid = fleet.pid()
    fleet.generate(prompt="[[hang]]")
    fleet.generate(prompt="[[slow:0.01]]", unit=1)  # behind the hang: never answered
    os.kill(pid, signal.SIGKILL)
    await fleet.until(lambda: len(fleet.ready_log) == 2)
    assert fleet.pid() != pid
    assert fleet.ends() == []


async def test_stop_lets_running_units_finish_and_ends_a_hung_one(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(ready=2)
    fleet.generate(0, prompt="[[slow:0.4]]")
    fleet.generate(1, prompt="[[hang]]")
    async with asyncio.timeout(30):
        await fleet.supervisor.stop(timeout_s=1.0)
    assert [type(message) for _, message in fleet.ends()] == [Output]
    assert {reason for _, _, reason in fleet.lost} == {"exit code 0", "killed by SIGKILL"}
    assert [status.state for status in fleet.supervisor.statuses()] == [ReplicaState.DRAINING] * 2
    assert [status.pids for status in fleet.supervisor.statuses()] == [(), ()]


async def test_stop_while_starting_leaves_nothing(start_fleet: StartFleet) -> None:
    fleet = await start_fleet()
    await asyncio.sleep(0)
    await fleet.supervisor.stop(timeout_s=5)
    assert fleet.ready_log == []


async def test_a_second_stop_cuts_the_first_short(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(replica_spec(), ready=1)
    fleet.generate(prompt="[[slow:100]]")
    first = asyncio.create_task(fleet.supervisor.stop(timeout_s=100))
    await eventually(lambda: fleet.state() is ReplicaState.DRAINING)
    async with asyncio.timeout(30):
        await fleet.supervisor.stop(timeout_s=0)
        await first
    assert fleet.lost[0][2] == "killed by SIGKILL"


async def test_when_every_first_start_fails_the_listener_hears_the_reason_once(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(
        replica_spec(0, engine="broken"), replica_spec(1, engine="broken"), executor=ProcessExecutor("simulated")
    )
    await fleet.until(lambda: fleet.failure)
    assert fleet.failure is not None
    assert fleet.failure.startswith(
        "no replica could start: engine_args.engine: no such engine; found 'broken'; wanted"
    )
    assert fleet.ready_log == []
    assert [status.state for status in fleet.supervisor.statuses()] == [ReplicaState.FAILED] * 2


async def test_a_bug_in_the_task_of_a_replica_is_told_to_the_listener(start_fleet: StartFleet) -> None:
    class Breaking(ProcessExecutor):
        async def start(self, spec: ReplicaSpec, incarnation: int, listener: ReplicaListener) -> ProcessReplica:
            if incarnation > 2:
                raise ZeroDivisionError("of its own")
            return await super().start(spec, incarnation, listener)

    fleet = await start_fleet(executor=Breaking("simulated"), ready=2)
    os.kill(fleet.pid(1), signal.SIGKILL)
    await fleet.until(lambda: fleet.failure)
    assert fleet.failure == "a bug in the supervisor (replica 1): ZeroDivisionError: of its own"


async def test_a_bug_while_the_end_of_a_replica_is_told_is_told_to_the_listener(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await start_fleet(ready=2)
    monkeypatch.setattr(Fleet, "replica_lost", lambda self, replica_id, incarnation, reason: {}[replica_id])
    os.kill(fleet.pid(0), signal.SIGKILL)
    await fleet.until(lambda: fleet.failure)
    assert fleet.failure == "a bug in the supervisor (replica 0): KeyError: 0"


async def test_one_replica_that_cannot_start_does_not_end_the_other(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(
        replica_spec(0), replica_spec(1, engine="broken"), executor=ProcessExecutor("simulated"), ready=1
    )
    await fleet.until(lambda: fleet.ready)
    await eventually(lambda: fleet.supervisor.statuses()[1].restarts >= 1)
    assert fleet.state(0) is ReplicaState.READY
    assert "no such engine" in str(fleet.supervisor.statuses()[1].last_error)
    assert fleet.failure is None


async def test_replicas_load_one_after_another_when_told_so(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(*(replica_spec(i) for i in range(3)), max_parallel_loads=1, ready=3)
    assert fleet.ready_log == [(0, 1), (1, 2), (2, 3)]


async def test_replicas_outlive_the_forkserver_and_the_next_start_makes_a_new_one(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(ready=2)
    first = fleet.executor.forkserver_pid
    survivor = fleet.pid(1)
    os.kill(first, signal.SIGKILL)
    fleet.generate(1)
    await fleet.until(fleet.ends)
    os.kill(fleet.pid(0), signal.SIGKILL)
    await fleet.until(lambda: fleet.lost)
    await fleet.until_ready(2)
    assert fleet.executor.forkserver_pid != first
    assert fleet.pid(1) == survivor
    assert fleet.lost[0][0] == 0


async def test_20_mb_frames_for_a_replica_that_does_not_read_leave_the_loop_free(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(replica_spec(), ready=1)
    os.kill(fleet.pid(), signal.SIGSTOP)  # a send that waits for its reader would now never return
    pixels = bytes(20 * 1024 * 1024)
    picture = MediaInput("image", "RGB", 2560, 2730, 0)
    params = SamplingParams(prompt="x", seed=1, width=8, height=8)
    for unit in range(3):
        message = Generate(address=Address("r", unit, 0, fleet.ready[0]), params=params, inputs=(picture,))
        fleet.supervisor.send(0, message, (pixels,))
    await asyncio.sleep(0)
    assert fleet.ends() == []
    os.kill(fleet.pid(), signal.SIGCONT)
    await fleet.until(lambda: len(fleet.ends()) == 3)


async def test_a_sender_waits_for_a_slow_server_without_losing_a_byte(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(replica_spec(), ready=1)
    for unit in range(10):
        fleet.generate(unit=unit, width=1024, height=1024)
    time.sleep(1.0)  # noqa: ASYNC251 - the loop is meant to be stuck: 20 MB must wait in the replica
    await fleet.until(lambda: len(fleet.ends()) == 10)
    pictures = [frames[0] for _, message, frames in fleet.heard if isinstance(message, Output)]
    assert len(set(pictures)) == 1
    assert pictures[0].endswith(b"IEND\xaeB`\x82")


async def test_signals_to_the_whole_group_end_neither_forkserver_nor_replicas(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(ready=2)
    pids = [fleet.executor.forkserver_pid, fleet.pid(0), fleet.pid(1)]
    for number in (signal.SIGINT, signal.SIGTERM):
        for pid in pids:
            os.kill(pid, number)
    for replica_id in (0, 1):
        fleet.generate(replica_id)
    await fleet.until(lambda: len(fleet.ends()) == 2)
    assert fleet.lost == []
    assert fleet.executor.forkserver_pid == pids[0]


async def test_the_child_does_not_import_the_main_module_of_the_server(
    start_fleet: StartFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "imported"
    script = tmp_path / "server_main.py"
    script.write_text(f"open({str(trace)!r}, 'a').close()\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    await start_fleet(replica_spec(), ready=1)
    assert not trace.exists()


BREAKING = """
import ctypes, os, sys
from triptych.engine.simulated import SimulatedEngine

class Engine(SimulatedEngine):
    def run(self):
        how = os.environ["ENDS_BY"]
        if how == "exception":
            raise RuntimeError("device lost\\nmore about it")
        if how == "segfault":
            ctypes.string_at(0)
        print("2 free blocks left", file=sys.stderr)
        os._exit(9)
"""


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("exception", "exit code 1 (RuntimeError: device lost)"),
        ("segfault", "killed by SIGSEGV (Fatal Python error: Segmentation fault)"),
        ("exit", "exit code 9 (2 free blocks left)"),
    ],
)
@pytest.mark.parametrize("fresh_interpreter", [False, True])
async def test_the_last_words_of_a_replica_explain_its_end(
    start_fleet: StartFleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    reason: str,
    fresh_interpreter: bool,
) -> None:
    install_engine(tmp_path, monkeypatch, "breaking", BREAKING)
    monkeypatch.setenv("ENDS_BY", how)
    executor = ProcessExecutor("breaking")
    if fresh_interpreter:
        executor.leave_forkserver()
    fleet = await start_fleet(replica_spec(engine="breaking"), executor=executor)
    await fleet.until(lambda: fleet.lost)
    assert fleet.lost[0][2] == reason
    assert fleet.supervisor.statuses()[0].last_error == reason


async def test_an_engine_that_cannot_be_imported_is_one_line_with_its_reason(
    start_fleet: StartFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path, monkeypatch, "missing", "import no_such_module\n")
    fleet = await start_fleet(replica_spec(engine="missing"))
    await fleet.until(lambda: fleet.failure)
    assert fleet.failure == "no replica could start: ModuleNotFoundError: No module named 'no_such_module'"


async def test_what_a_replica_writes_reaches_the_log_of_the_server_in_whole_lines(
    start_fleet: StartFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = "import os\nfrom triptych.engine.simulated import SimulatedEngine as Base\nclass Engine(Base):\n"
    source += (
        "    def load(self):\n        os.write(2, b'half a '); os.write(2, b'line\\nrest'); return super().load()\n"
    )
    install_engine(tmp_path, monkeypatch, "talking", source)
    fleet = await start_fleet(replica_spec(engine="talking"), ready=1)
    await fleet.supervisor.stop(timeout_s=5)
    assert raw_lines(caplog) == ["half a line", "rest"]


def raw_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for record in caplog.records if record.name == RAW_LOGGER for line in record.getMessage().splitlines()]


QUICK = WatchdogLimits(step=PhaseLimit(1.5, 1.5), stopped_after_s=1.5)


async def test_a_hang_is_found_its_stacks_are_dumped_and_the_replica_is_replaced(
    start_fleet: StartFleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = await start_fleet(ready=2, limits=QUICK)
    other = fleet.pid(1)
    fleet.generate(1, prompt="[[slow:2.5]]", num_inference_steps=1)  # one long step is no hang
    fleet.generate(0, prompt="[[hang]]")
    await fleet.until(lambda: fleet.lost)
    assert fleet.lost[0][2].startswith("hung: no progress in phase step for ")
    assert fleet.draining == [(0, fleet.lost[0][1], False)]
    assert fleet.supervisor.statuses()[0].last_error == fleet.lost[0][2]
    assert any(line.endswith("in _end") for line in raw_lines(caplog))  # where the simulated engine hangs
    await fleet.until_ready(2)
    await fleet.until(fleet.ends)
    assert fleet.pid(1) == other


async def test_a_stopped_process_is_found_and_replaced_also_when_it_was_idle(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(replica_spec(), ready=1, limits=QUICK)
    os.kill(fleet.pid(), signal.SIGSTOP)
    await fleet.until(lambda: fleet.lost)
    assert fleet.lost[0][2].startswith("hung: stopped by a signal and silent for ")
    await fleet.until_ready(1)


async def test_a_loop_that_stood_still_kills_nobody(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(replica_spec(), ready=1, limits=QUICK)
    fleet.generate(prompt="[[slow:6]]")
    time.sleep(4)  # noqa: ASYNC251 - the loop is meant to be stuck
    await fleet.until(fleet.ends)
    assert fleet.lost == []
