"""Storms over a real server. `CHAOS_SEED` and `CHAOS_SECONDS` choose another one than the short one of the suite."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from chaos_judge import complaints, deaths_caused_by
from chaos_schedule import Blow, faults
from chaos_storm import Storm

from support.holdings import holdings
from support.server_process import StartServer, wait_until, write_stage_file

SEED = int(os.environ.get("CHAOS_SEED", "1"))
SECONDS = float(os.environ.get("CHAOS_SECONDS", "8"))
TESTS = str(Path(__file__).parents[1])
REPLICAS = 4
CLIENTS = 12
BACK_S = 30.0  # the longest back-off that a storm leads to, and a slow machine
GROWTH_BYTES = 16 << 20  # the history of a thousand requests, and what the allocator keeps


@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.parametrize("seed", [SEED])
def test_in_a_storm_everybody_gets_one_right_answer_and_nothing_is_left_behind(
    start_server: StartServer, tmp_path: Path, seed: int
) -> None:
    stage_file = write_stage_file(tmp_path / "stages.yaml", replicas=REPLICAS, seconds=0.05, slots=2)
    observed, start_faults = tmp_path / "observed", tmp_path / "faults"
    start_faults.mkdir()
    server = start_server(
        "--stage-configs-path",
        str(stage_file),
        ready=REPLICAS,
        program=("-m", "support.observed_server"),
        env={"PYTHONPATH": TESTS, "OBSERVED": str(observed), "START_FAULTS": str(start_faults)},
    )
    before = holdings(server, observed)
    plan = faults(seed, duration_s=SECONDS, replicas=REPLICAS, pause_s=(0.5, 1.5))
    storm = Storm(server, start_faults, seed, plan, SECONDS, CLIENTS)
    asyncio.run(storm.rage())

    repeat = f"CHAOS_SEED={seed} CHAOS_SECONDS={SECONDS:g} repeats it"
    found = complaints(storm.wished, storm.outcomes, [*storm.deaths, *deaths_caused_by(storm.outcomes)])
    assert not found, "\n".join([repeat, *found])
    assert len(storm.outcomes) > 5 * SECONDS
    assert set(storm.blows) == set(Blow)
    assert storm.health <= {"ok", "degraded", "no_replica"}, repeat
    assert "degraded" in storm.health, repeat
    wait_until(lambda: server.ready_replicas() == REPLICAS, BACK_S, f"all replicas are back; {repeat}")
    assert server.client.get("/v1/requests").json()["data"] == []
    assert [replica["in_flight"] for replica in server.replicas()] == [0] * REPLICAS
    after = holdings(server, observed)
    assert not (grown := after.beyond(before, growth_bytes=GROWTH_BYTES)), "\n".join([repeat, *grown])
    assert server.stop() == 0
