"""The reference page's whole flow: its command line, its stage file, its benchmark, on a real pipeline."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REPORT_KEYS = {
    "duration",
    "completed_requests",
    "failed_requests",
    "throughput_qps",
    "latency_mean",
    "latency_median",
    "latency_p50",
    "latency_p95",
    "latency_p99",
    "peak_memory_mb_max",
    "peak_memory_mb_mean",
    "peak_memory_mb_median",
}


@pytest.mark.slow
def test_the_reference_command_serves_four_replicas_and_its_benchmark_uses_them_all(
    start_server: Callable[..., Any], tiny_pipelines: Path, tmp_path: Path
) -> None:
    (tmp_path / "Qwen").mkdir()
    shutil.copytree(tiny_pipelines / "qwen", tmp_path / "Qwen/Qwen-Image")
    shutil.copy(ROOT / "examples/diffusion_multi_replica.yaml", tmp_path)
    server = start_server(
        *("Qwen/Qwen-Image", "--omni", "--stage-configs-path", "diffusion_multi_replica.yaml"), cwd=tmp_path, ready=4
    )
    report_file = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks/diffusion/diffusion_benchmark_serving.py")]
    command += ["--base-url", f"http://127.0.0.1:{server.port}", "--model", "Qwen/Qwen-Image", "--backend", "vllm-omni"]
    command += ["--task", "t2i", "--dataset", "random", "--num-prompts", "8", "--request-rate", "inf"]
    command += ["--num-inference-steps", "2", "--width", "256", "--height", "256", "--output-file", str(report_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(report_file.read_text())
    assert report.keys() >= REPORT_KEYS
    assert (report["completed_requests"], report["failed_requests"]) == (8, 0)
    assert {int(replica) for replica in report["requests_per_replica"]} == {0, 1, 2, 3}
    assert sum(report["requests_per_replica"].values()) == 8


def test_the_same_request_gives_the_same_bytes_on_every_replica(start_server: Callable[..., Any]) -> None:
    server = start_server(ready=2)
    answers = [server.image("a red circle above a blue square", seed=7).json() for _ in range(2)]
    assert [answer["metrics"][0]["replica"] for answer in answers] == [0, 1]
    assert answers[0]["data"] == answers[1]["data"]
