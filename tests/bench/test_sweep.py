"""The sweep: what each count is started with, what is compared, and the picture."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from triptych.bench.plot import plot_sweep
from triptych.bench.server import ServerStartError, running_server
from triptych.bench.sweep import SweepPlan, parse_replica_counts, plan_sweep, sweep_report, sweep_table
from triptych.errors import ConfigError

STAGES = """\
stages:
  - stage_id: 0
    stage_type: diffusion
    runtime: {devices: "4,5,6,7,0,1,2,3", num_replicas: 4}
    engine_args:
      engine: simulated
      parallel_config: {world_size: 2}
"""


def report(count: int, qps: float, *, failed: int = 0) -> dict[str, Any]:
    return {
        "model": "some/model",
        "task": "t2i",
        "backend": "triptych",
        "throughput_qps": qps,
        "latency_p50": 0.5,
        "latency_p95": 0.6,
        "latency_p99": 0.7,
        "completed_requests": 24 - failed,
        "failed_requests": failed,
        "interrupted": False,
        "requests_per_replica": {str(replica): 24 // count for replica in range(count)},
        "config": {"base_url": "http://x", "num_prompts": 24},
        "versions": {"triptych": "0"},
    }


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> SweepPlan:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return plan_sweep(model=None, stage_file=None, counts=(1, 2, 4), num_prompts=None, max_concurrency=None)


def test_counts_are_sorted() -> None:
    assert parse_replica_counts("4, 1,2") == (1, 2, 4)


def test_the_load_and_the_threads_are_the_same_for_every_count(plan: SweepPlan) -> None:
    assert plan.num_prompts == 32
    assert plan.max_concurrency == 8
    assert plan.cpu_threads == max(1, len(os.sched_getaffinity(0)) // 4)
    assert plan.serve_arguments[1] == ("--num-replicas", "2")
    assert any("32 requests, at most 8 at a time" in note for note in plan.notes)
    assert any("OMP_NUM_THREADS" in note for note in plan.notes)


def test_the_number_of_requests_divides_by_every_count() -> None:
    made = plan_sweep(model="m", stage_file=None, counts=(1, 2, 3, 4), num_prompts=None, max_concurrency=None)
    assert made.num_prompts == 36
    asked = plan_sweep(model="m", stage_file=None, counts=(1, 2, 3), num_prompts=10, max_concurrency=2)
    assert (asked.num_prompts, asked.max_concurrency) == (10, 2)
    assert any("do not divide evenly by 3" in note for note in asked.notes)
    assert any("cannot keep 3 replicas busy" in note for note in asked.notes)


def test_a_device_list_is_cut_to_what_each_count_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    stage_file = tmp_path / "stages.yaml"
    stage_file.write_text(STAGES)
    made = plan_sweep(model="m", stage_file=stage_file, counts=(1, 3), num_prompts=None, max_concurrency=None)
    assert made.cpu_threads == 3
    base = ("m", "--stage-configs-path", str(stage_file))
    assert made.serve_arguments == (
        (*base, "--num-replicas", "1", "--devices", "4,5"),
        (*base, "--num-replicas", "3", "--devices", "4,5,6,7,0,1"),
    )
    with pytest.raises(ConfigError, match="at most 4"):
        plan_sweep(model="m", stage_file=stage_file, counts=(1, 5), num_prompts=None, max_concurrency=None)


def test_speed_up_and_efficiency_compare_with_the_smallest_count(plan: SweepPlan) -> None:
    made = sweep_report(plan, {1: report(1, 2.0), 2: report(2, 3.8), 4: report(4, 7.0)})
    assert [row["speedup"] for row in made["rows"]] == pytest.approx([1.0, 1.9, 3.5])
    assert [row["efficiency"] for row in made["rows"]] == pytest.approx([1.0, 0.95, 0.875])
    assert made["exit_code"] == 0
    assert "base_url" not in made["config"]
    from_two = sweep_report(plan, {2: report(2, 4.0), 4: report(4, 6.0)})
    assert [row["efficiency"] for row in from_two["rows"]] == pytest.approx([1.0, 0.75])
    assert from_two["compared_with_replicas"] == 2


def test_a_failed_request_at_any_count_fails_the_sweep(plan: SweepPlan) -> None:
    assert sweep_report(plan, {1: report(1, 2.0), 2: report(2, 3.8, failed=1)})["exit_code"] == 1


def test_the_table_shows_every_count(plan: SweepPlan) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(sweep_table(sweep_report(plan, {1: report(1, 2.0), 2: report(2, 3.8)})))
    text = console.export_text()
    assert "1.90" in text
    assert "95.0%" in text


def test_the_plot_is_a_png_of_a_readable_size(plan: SweepPlan, tmp_path: Path) -> None:
    plot_sweep(sweep_report(plan, {1: report(1, 2.0), 2: report(2, 3.8), 4: report(4, 7.0)}), tmp_path / "sweep.png")
    with Image.open(tmp_path / "sweep.png") as picture:
        assert picture.format == "PNG"
        assert picture.width >= 1200
        assert picture.height >= 500


@pytest.mark.anyio
async def test_a_server_that_does_not_start_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with pytest.raises(ServerStartError, match="exit code") as caught:
        async with running_server(["--no-such-flag"], replicas=1, log_path=log, start_timeout_s=60):
            pytest.fail("it cannot be ready")
    assert "no-such-flag" in str(caught.value) or "Error" in str(caught.value)
