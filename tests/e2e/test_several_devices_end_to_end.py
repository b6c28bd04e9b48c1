"""Replicas of two processes each: right pictures, and a rank that is killed takes its own replica alone."""

from __future__ import annotations

import base64
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import psutil
import pytest
from PIL import Image

from support.server_process import ServerProcess, wait_until

STAGE = """\
stages:
  - stage_id: 0
    stage_type: diffusion
    runtime: {{num_replicas: {replicas}, cpu_threads: 1}}
    engine_args: {{model: "{model}", parallel_config: {{world_size: {world}}}}}
"""


def stage_file(path: Path, model: str | Path, *, replicas: int, world: int) -> str:
    path.write_text(STAGE.format(model=model, replicas=replicas, world=world))
    return str(path)


def pixels(answer: dict[str, Any]) -> np.ndarray[Any, Any]:
    data = base64.b64decode(answer["data"][0]["b64_json"])
    return np.asarray(Image.open(io.BytesIO(data))).astype(int)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_rank_that_dies_takes_its_replica_alone_and_its_requests_are_answered(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    path = stage_file(tmp_path / "stages.yaml", "triptych/shapes", replicas=2, world=2)
    server = start_server("--stage-configs-path", path, ready=2)
    before = {replica["id"]: replica["pids"] for replica in server.replicas()}
    assert [len(set(pids)) for pids in before.values()] == [2, 2]
    assert all(psutil.Process(pids[1]).ppid() == pids[0] for pids in before.values())
    prompt = {"prompt": "a red circle above a blue square", "seed": 3}
    whole = pixels(server.image(**prompt, num_inference_steps=20).json())

    answers: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(server.image(**prompt, num_inference_steps=20).json()))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(replica["in_flight"] for replica in server.replicas()), 30, "both replicas at work")
    os.kill(before[1][1], signal.SIGKILL)
    for thread in threads:
        thread.join(timeout=60)
    assert [abs(pixels(answer) - whole).max() for answer in answers] == [0, 0]
    assert sorted(answer["metrics"][0]["attempts"] for answer in answers) == [1, 2]
    server.wait_ready(2)
    after = {replica["id"]: replica["pids"] for replica in server.replicas()}
    assert after[0] == before[0]
    assert set(after[1]).isdisjoint(before[1])
    assert not any(alive(pid) for pid in before[1])
    assert "rank 1" in server.replicas()[1]["last_error"]

    assert server.stop() == 0
    wait_until(lambda: not any(alive(pid) for pids in after.values() for pid in pids), 5, "no process is left")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of diffusers and transformers
def test_generate_makes_a_clip_on_two_devices(tiny_pipelines: Path, tmp_path: Path) -> None:
    path = stage_file(tmp_path / "stages.yaml", tiny_pipelines / "wan", replicas=1, world=2)
    target = tmp_path / "clip.mp4"
    size = ("--size", "32x32", "--num-frames", "5", "--num-inference-steps", "2", "--seed", "4")
    command = [sys.executable, "-m", "triptych", "generate", "a red circle", "-o", str(target), *size]
    command += ["--stage-configs-path", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    from tiny.engine_run import EngineRun

    run = EngineRun(tiny_pipelines / "wan")
    unit = run.unit(prompt="a red circle", width=32, height=32, num_frames=5, num_inference_steps=2, seed=4)
    on_one = tmp_path / "on-one.mp4"
    on_one.write_bytes(run.bytes_of(unit)[0])
    assert frames(target).shape == (5, 32, 32, 3)
    assert abs(frames(target) - frames(on_one)).max() <= 4  # of 255, after the codec


def frames(path: Path) -> np.ndarray[Any, Any]:
    with av.open(str(path)) as clip:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in clip.decode(video=0)]).astype(int)
