"""`triptych bench serve` against a server in the contract's shape: JSON keys, exit codes, failures, interruption."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from typer.testing import CliRunner

from triptych import __version__
from triptych.bench.backends import VideosBackend
from triptych.bench.workload import BenchRequest
from triptych.cli.bench import bench_app

REFERENCE_KEYS = [
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
]
SLO_KEYS = ["slo_attainment_rate", "slo_met_success", "slo_scale"]
OWN_KEYS = [
    "latency_p90",
    "latency_p99_9",
    "latency_max",
    "queue_mean",
    "queue_p99",
    "inference_mean",
    "inference_p99",
    "images_per_second",
    "frames_per_second",
    "requests_per_replica",
    "errors",
    "requests",
    "config",
    "versions",
    "server",
    "warmup_requests",
]

Run = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def run(fake_server: Any, tmp_path: Path) -> Run:
    def invoke(*args: str) -> tuple[int, dict[str, Any], str]:
        output = tmp_path / "out" / "report.json"
        base = ["serve", "--base-url", fake_server.base_url, "--disable-tqdm", "--output-file", str(output)]
        result = CliRunner().invoke(bench_app, [*base, *args], catch_exceptions=False)
        return result.exit_code, json.loads(output.read_text()), result.output

    return invoke


def test_the_report_has_the_keys_of_the_reference_and_our_own(run: Run, fake_server: Any) -> None:
    code, report, output = run("--num-prompts", "6", "--num-inference-steps", "2", "--width", "64", "--height", "32")
    assert code == 0
    assert not set(REFERENCE_KEYS + OWN_KEYS) - report.keys()
    assert not report.keys() & set(SLO_KEYS)
    assert (report["completed_requests"], report["failed_requests"]) == (6, 0)
    assert report["throughput_qps"] == pytest.approx(6 / report["duration"])
    assert report["images_per_second"] == pytest.approx(6 / report["duration"])
    assert report["frames_per_second"] is None
    assert report["model"] == "some/model"
    assert report["warmup_requests"] == 2
    assert sum(report["requests_per_replica"].values()) == 6
    assert set(report["requests_per_replica"]) == {"0", "1"}
    assert (report["queue_mean"], report["inference_p50"]) == (0.25, 0.5)
    assert report["peak_memory_mb_max"] == 107.0
    assert report["server"]["version"] == {"version": "1.2.3"}
    assert report["config"]["num_inference_steps"] == 2
    assert report["config"]["request_rate"] == "inf"
    assert report["versions"]["triptych"] == __version__
    assert "6 of 6" in output
    body = fake_server.bodies[-1]
    assert body["model"] == "some/model"
    assert (body["width"], body["height"], body["num_inference_steps"]) == (64, 32, 2)
    assert body["messages"][0]["role"] == "user"


def test_percentiles_are_those_of_numpy_over_the_recorded_latencies(run: Run) -> None:
    _, report, _ = run("--num-prompts", "40", "--max-concurrency", "4")
    latencies = [record["latency_s"] for record in report["requests"]]
    assert len(latencies) == 40
    for key, percentile in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("p99_9", 99.9)):
        assert report[f"latency_{key}"] == pytest.approx(float(np.percentile(latencies, percentile)))
    assert report["latency_median"] == pytest.approx(report["latency_p50"])
    assert report["latency_mean"] == pytest.approx(float(np.mean(latencies)))
    assert report["latency_max"] == max(latencies)


def test_warm_up_requests_are_short_and_not_counted(run: Run, fake_server: Any) -> None:
    code, report, _ = run("--num-prompts", "3", "--warmup-requests", "4", "--warmup-num-inference-steps", "1")
    assert code == 0
    assert [body["num_inference_steps"] for body in fake_server.bodies] == [1] * 4 + [50] * 3
    assert report["completed_requests"] == 3


def test_concurrency_is_limited_when_asked_and_unlimited_otherwise(run: Run, fake_server: Any) -> None:
    fake_server.seconds = 0.05
    run("--num-prompts", "8", "--max-concurrency", "3", "--warmup-requests", "0")
    assert fake_server.most_open == 3
    fake_server.seconds = 1.0
    run("--num-prompts", "120", "--warmup-requests", "0")
    assert fake_server.most_open == 120


def test_every_failed_request_is_counted_under_its_class_and_the_exit_code_is_1(run: Run, fake_server: Any) -> None:
    full = {"error": {"message": "the queue is full", "type": "rate_limit_error", "param": None, "code": "queue_full"}}
    answers = {
        1: lambda: web.json_response(full, status=429),
        2: lambda: web.json_response({"choices": [{"message": {"content": []}}]}),
        3: lambda: web.Response(status=502, text="bad gateway"),
        4: lambda: web.Response(text="not json", content_type="application/json"),
    }
    fake_server.behave = lambda number, body: answers[number]() if number in answers else None
    code, report, output = run("--num-prompts", "6", "--max-concurrency", "1", "--warmup-requests", "0")
    assert code == 1
    assert (report["completed_requests"], report["failed_requests"]) == (2, 4)
    assert report["errors"] == {"queue_full": 1, "no_output": 1, "http_502": 1, "invalid_answer": 1}
    assert len(fake_server.bodies) == 6, "nothing is retried"
    assert [record["error_class"] is None for record in report["requests"]] == [True, False, False, False, False, True]
    assert "the queue is full" in output


def test_a_cut_connection_is_a_failed_request(run: Run, fake_server: Any) -> None:
    def cut(number: int, body: dict[str, Any]) -> web.StreamResponse | None:
        if number == 1:
            raise ConnectionResetError
        return None

    fake_server.behave = cut
    code, report, _ = run("--num-prompts", "3", "--max-concurrency", "1", "--warmup-requests", "0")
    assert code == 1
    assert report["failed_requests"] == 1


def test_when_nothing_was_answered_numbers_are_null_and_the_exit_code_is_1(run: Run, fake_server: Any) -> None:
    fake_server.behave = lambda number, body: web.Response(status=500, text="no")
    code, report, output = run("--num-prompts", "2")
    assert code == 1
    assert report["latency_p50"] is None
    assert report["throughput_qps"] == 0
    assert report["failed_warmup_requests"] == 2
    assert "2 of 2 warm-up requests failed" in output


def test_latency_targets_are_reported_with_slo(run: Run) -> None:
    code, report, output = run("--num-prompts", "4", "--slo", "--slo-scale", "1000", "--width", "64", "--height", "64")
    assert code == 0
    assert (report["slo_attainment_rate"], report["slo_met_success"], report["slo_scale"]) == (1.0, 4, 1000.0)
    assert all(record["slo_ms"] > 0 for record in report["requests"])
    assert "SLO" in output


def test_a_trace_is_replayed_at_its_times_with_its_targets(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text(
        "Request(height=64, width=64, num_inference_steps=2, timestamp=10.0, slo_ms=60000)\n"
        "Request(height=32, width=32, num_inference_steps=3, timestamp=10.3, slo_ms=0.0001)\n"
    )
    _, report, _ = run("--dataset", "trace", "--dataset-path", str(trace), "--slo")
    first, second = report["requests"]
    assert (first["arrival_s"], second["arrival_s"]) == (0.0, pytest.approx(0.3))
    assert second["start_s"] >= 0.29
    assert (report["slo_met_success"], report["slo_attainment_rate"]) == (1, 0.5)


def test_vllm_omni_nests_the_parameters(run: Run, fake_server: Any) -> None:
    code, report, _ = run("--backend", "vllm-omni", "--num-prompts", "1", "--seed", "7", "--enable-negative-prompt")
    assert code == 0
    assert fake_server.bodies[-1]["extra_body"]["seed"] == 7
    assert fake_server.bodies[-1]["extra_body"]["negative_prompt"]
    assert "seed" not in fake_server.bodies[-1]
    assert report["backend"] == "vllm-omni"


def test_openai_posts_to_the_image_routes(run: Run, fake_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    size = ("--width", "64", "--height", "32")
    code, report, _ = run("--backend", "openai", "--num-prompts", "1", "--warmup-requests", "0", *size)
    assert code == 0
    assert (fake_server.bodies[-1]["size"], fake_server.bodies[-1]["n"]) == ("64x32", 1)
    assert fake_server.headers[-1]["Authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in json.dumps(report)
    code, _, _ = run("--backend", "openai", "--task", "i2i", "--num-prompts", "1", "--warmup-requests", "0")
    assert code == 0
    assert fake_server.bodies[-1]["image"].filename == "input.png"


def test_chat_carries_an_input_picture_as_a_data_url(run: Run, fake_server: Any) -> None:
    code, _, _ = run("--task", "i2i", "--num-prompts", "1", "--warmup-requests", "0")
    assert code == 0
    text, image = fake_server.bodies[-1]["messages"][0]["content"]
    assert text["type"] == "text"
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")


def test_videos_are_made_through_the_job_api(run: Run, fake_server: Any) -> None:
    args = ("--backend", "v1/videos", "--task", "t2v", "--num-frames", "9", "--num-prompts", "2")
    code, report, _ = run(*args, "--warmup-requests", "0")
    assert code == 0
    assert fake_server.bodies[-1]["num_frames"] == "9"
    assert report["frames_per_second"] == pytest.approx(18 / report["duration"])
    assert report["images_per_second"] is None


@pytest.mark.anyio
async def test_a_video_job_that_never_ends_is_given_up_after_the_request_timeout(fake_server: Any) -> None:
    fake_server.jobs_end = False
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session:
        backend = VideosBackend(session, fake_server.base_url, "m")
        sending = asyncio.create_task(backend.send(BenchRequest(prompt="x")))
        done, _ = await asyncio.wait({sending}, timeout=20)
        sending.cancel()
    assert done == {sending}
    assert isinstance(sending.exception(), TimeoutError)
    assert fake_server.jobs["video_0"]["status"] == "queued"


def test_a_server_of_another_maker_without_our_routes_is_measured_too(run: Run, fake_server: Any) -> None:
    fake_server.replicas = 0
    code, report, _ = run("--num-prompts", "2", "--model", "their/model")
    assert code == 0
    assert report["warmup_requests"] == 1
    assert fake_server.bodies[-1]["model"] == "their/model"


def test_pictures_are_kept_when_asked(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    run("--num-prompts", "2", "--save-dir", str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["request-0000-0.png", "request-0001-0.png"]
    assert (folder / "request-0000-0.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_reports_what_was_measured_so_far(fake_server: Any, tmp_path: Path) -> None:
    def slow_after_three(number: int, body: dict[str, Any]) -> None:
        fake_server.seconds = 60.0 if number >= 2 else 0.0

    fake_server.behave = slow_after_three
    output = tmp_path / "report.json"
    command = [sys.executable, "-c", "from triptych.cli.bench import bench_app; bench_app()", "serve"]
    command += ["--base-url", fake_server.base_url, "--num-prompts", "9", "--max-concurrency", "1"]
    command += ["--warmup-requests", "0", "--output-file", str(output)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    deadline = time.monotonic() + 60
    while len(fake_server.bodies) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=30)
    report = json.loads(output.read_text())
    assert process.returncode == 130, text
    assert (report["completed_requests"], report["unfinished_requests"]) == (3, 6)
    assert report["interrupted"] is True
    assert "interrupted" in text
