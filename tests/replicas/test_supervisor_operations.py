"""What operators do to replicas while they run: drain, restart, resize."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from replica_fleet import Fleet, StartFleet, eventually, install_engine, remaining_processes, replica_spec

from triptych.errors import ErrorCode, TriptychError
from triptych.messages import Output
from triptych.replicas.state import ReplicaState

pytestmark = pytest.mark.anyio


async def test_a_drained_replica_finishes_what_it_has_leaves_and_comes_back_when_told(
    start_fleet: StartFleet,
) -> None:
    fleet = await start_fleet(ready=2)
    fleet.generate(0, prompt="[[slow:0.5]]")
    fleet.supervisor.drain(0)
    assert fleet.draining == [(0, fleet.ready[0], False)]
    fleet.supervisor.drain(0)  # asked twice
    assert len(fleet.draining) == 1
    assert fleet.state(0) is ReplicaState.DRAINING
    await fleet.until(lambda: fleet.lost)
    assert isinstance(fleet.ends()[0][1], Output)
    assert fleet.lost[0][2] == "exit code 0"
    await asyncio.sleep(0.2)
    assert (fleet.state(0), fleet.supervisor.statuses()[0].pids) == (ReplicaState.DRAINING, ())
    assert fleet.supervisor.statuses()[0].last_error is None
    fleet.supervisor.restart(0)
    await fleet.until_ready(2)
    assert fleet.supervisor.statuses()[0].restarts == 1
    fleet.generate(0)
    await fleet.until(lambda: len(fleet.ends()) == 2)


async def test_a_restart_is_a_drain_and_another_process(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(ready=2)
    before = fleet.pid(0)
    fleet.generate(0, prompt="[[slow:0.3]]")
    fleet.supervisor.restart(0)
    fleet.supervisor.restart(0)
    fleet.supervisor.drain(0)
    fleet.supervisor.restart(0)
    assert [comes_back for _, _, comes_back in fleet.draining] == [True, False, True]
    await fleet.until(lambda: len(fleet.ready_log) == 3)
    assert isinstance(fleet.ends()[0][1], Output)
    assert fleet.pid(0) != before
    assert [status.restarts for status in fleet.supervisor.statuses()] == [1, 0]


async def test_every_change_of_state_is_logged_with_its_trigger(
    start_fleet: StartFleet, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "triptych.replicas.supervisor"):
        fleet = await start_fleet(replica_spec(), ready=1)
        fleet.supervisor.restart(0)
        await fleet.until(lambda: len(fleet.ready_log) == 2)
    changes = [record for record in caplog.records if record.message == "replica state changed"]
    assert [(change.before, change.trigger, change.after) for change in changes] == [
        ("starting", "process_started", "warming"),
        ("warming", "became_ready", "ready"),
        ("ready", "drain_asked", "draining"),
        ("draining", "restart_asked", "starting"),
        ("starting", "process_started", "warming"),
        ("warming", "became_ready", "ready"),
    ]


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.2])
async def test_drain_and_restart_at_any_moment_of_a_start_end_in_one_ready_process(
    start_fleet: StartFleet, delay_s: float
) -> None:
    fleet = await start_fleet()
    for _ in range(3):
        await asyncio.sleep(delay_s)
        fleet.supervisor.restart(0)
        fleet.supervisor.drain(0)
        fleet.supervisor.restart(0)
    await fleet.until(lambda: set(fleet.ready) == {0, 1} and fleet.state(0) is ReplicaState.READY)
    fleet.generate(0)
    await fleet.until(fleet.ends)


@pytest.mark.parametrize("seed", [int(os.environ.get("OPERATIONS_SEED", "1"))])
async def test_operations_and_kills_in_any_order_end_in_a_fleet_that_works(start_fleet: StartFleet, seed: int) -> None:
    draw = random.Random(seed)
    fleet = await start_fleet(*(replica_spec(i) for i in range(3)), ready=1)
    supervisor = fleet.supervisor

    def kill(replica_id: int) -> None:
        for pid in supervisor.statuses()[replica_id].pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    acts = [supervisor.drain, supervisor.restart, kill, lambda replica_id: supervisor.resize(replica_id + 1)]
    for _ in range(40):
        draw.choice(acts)(draw.randrange(3))
        await asyncio.sleep(draw.choice([0.0, 0.0, 0.01, 0.05, 0.2]))
    for replica_id in range(3):
        supervisor.restart(replica_id)
    await eventually(lambda: all(fleet.state(replica_id) is ReplicaState.READY for replica_id in range(3)))
    assert fleet.failure is None
    before = len(fleet.ends())
    for replica_id in range(3):
        fleet.generate(replica_id)
    await fleet.until(lambda: len(fleet.ends()) == before + 3)
    await eventually(lambda: len(remaining_processes()) == 1 + 3)  # the forkserver and they


async def test_resize_rests_the_highest_ids_and_wakes_the_lowest(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(*(replica_spec(i) for i in range(3)), ready=3)
    fleet.supervisor.resize(1)
    await fleet.until(lambda: set(fleet.ready) == {0})
    assert [status.wanted for status in fleet.supervisor.statuses()] == [True, False, False]
    fleet.supervisor.resize(2)
    await fleet.until(lambda: set(fleet.ready) == {0, 1})
    fleet.supervisor.drain(0)
    fleet.supervisor.resize(2)
    await fleet.until(lambda: set(fleet.ready) == {0, 1})
    for count in (0, 4):
        with pytest.raises(TriptychError, match=f"1 to 3.* got {count}"):
            fleet.supervisor.resize(count)


async def test_a_crash_loop_fails_the_replica_until_it_is_started_anew_but_never_the_last(
    start_fleet: StartFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.replicas.restart.FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("triptych.replicas.restart.CRASH_LOOP_DEATHS", 3)
    source = "import os\nfrom triptych.engine.simulated import SimulatedEngine as Base\nclass Engine(Base):\n"
    source += "    def load(self):\n        if os.path.exists(os.environ['BROKEN'] + self._spec_id):\n"
    source += "            os._exit(3)\n        return super().load()\n"
    source += "    def __init__(self, spec, emit):\n        self._spec_id = str(spec.replica_id)\n"
    source += "        super().__init__(spec, emit)\n"
    install_engine(tmp_path, monkeypatch, "looping", source)
    monkeypatch.setenv("BROKEN", str(tmp_path / "broken-"))
    (tmp_path / "broken-0").touch()
    fleet = await start_fleet(replica_spec(0, engine="looping"), replica_spec(1, engine="looping"))
    supervisor = fleet.supervisor
    await eventually(lambda: fleet.state(0) is ReplicaState.FAILED)
    assert fleet.state(1) is ReplicaState.READY
    assert supervisor.statuses()[0].last_error == "exit code 3"
    with pytest.raises(TriptychError, match="a restart revives it"):
        supervisor.drain(0)
    supervisor.resize(1)  # which is the one that works
    assert fleet.state(1) is ReplicaState.READY
    assert [status.wanted for status in supervisor.statuses()] == [False, True]
    supervisor.resize(2)
    assert fleet.state(0) is ReplicaState.STARTING
    await eventually(lambda: fleet.state(0) is ReplicaState.FAILED)
    (tmp_path / "broken-0").unlink()
    supervisor.restart(0)
    await fleet.until_ready(2)

    (tmp_path / "broken-0").touch()
    (tmp_path / "broken-1").touch()
    for replica_id in (0, 1):
        os.kill(fleet.pid(replica_id), signal.SIGKILL)
    await eventually(lambda: supervisor.statuses()[1].restarts >= 5)
    assert fleet.state(1) is not ReplicaState.FAILED
    (tmp_path / "broken-1").unlink()
    await fleet.until(lambda: 1 in fleet.ready)


def test_before_the_start_nothing_can_be_changed() -> None:
    async def ask() -> None:
        fleet = Fleet([replica_spec()])
        for change in (fleet.supervisor.drain, fleet.supervisor.restart):
            with pytest.raises(TriptychError) as caught:
                change(0)
            assert caught.value.code is ErrorCode.CONFLICT
            with pytest.raises(TriptychError, match="no replica 7"):
                change(7)

    asyncio.run(ask())
