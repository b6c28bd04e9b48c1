"""A whole sweep: real servers with the simulated engine, started and stopped per count."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

STAGES = """\
stages:
  - stage_id: 0
    stage_type: diffusion
    runtime: {devices: "a,b", num_replicas: 2}
    engine_args:
      engine: simulated
      simulated: {seconds_per_request: 0.1, image: flat}
"""


@pytest.fixture
def stage_file(tmp_path: Path) -> Path:
    path = tmp_path / "stages.yaml"
    path.write_text(STAGES)
    return path


def servers_of(stage_file: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(stage_file) in process.cmdline() and "serve" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def sweep(stage_file: Path, *args: str) -> list[str]:
    command = [sys.executable, "-m", "triptych", "bench", "sweep", "--stage-configs-path", str(stage_file)]
    return [*command, "--width", "64", "--height", "64", *args]


@pytest.mark.slow
def test_a_sweep_measures_every_count_and_leaves_no_server(stage_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    command = sweep(stage_file, "--replicas", "1,2", "--num-prompts", "12", "--output-dir", str(folder))
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "sweep.json").read_text())
    one, two = report["rows"]
    assert (one["replicas"], two["replicas"]) == (1, 2)
    assert (one["completed_requests"], two["completed_requests"]) == (12, 12)
    assert one["requests_per_replica"] == {"0": 12}
    # Which replica is free first varies; that both work at a time does not.
    assert two["requests_per_replica"].keys() == {"0", "1"}
    assert sum(two["requests_per_replica"].values()) == 12
    assert (one["speedup"], one["efficiency"]) == (1.0, 1.0)
    assert two["speedup"] == pytest.approx(two["throughput_qps"] / one["throughput_qps"])
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2)
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "replicas-2.json").read_text())["completed_requests"] == 12
    assert "speed-up" in done.stdout
    assert "OMP_NUM_THREADS" in done.stderr
    assert not servers_of(stage_file)


@pytest.mark.slow
def test_ctrl_c_stops_the_sweep_and_its_server_and_keeps_what_was_measured(stage_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    command = sweep(stage_file, "--replicas", "1,2", "--num-prompts", "2", "--output-dir", str(folder))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    deadline = time.monotonic() + 90
    # The second server is being started: no load runs at this moment.
    while not (folder / "replicas-2.log").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=80)
    assert process.returncode == 130, errors
    assert [row["replicas"] for row in json.loads((folder / "sweep.json").read_text())["rows"]] == [1]
    assert not servers_of(stage_file)
