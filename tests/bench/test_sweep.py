"""The sweep: what each count is started with, what is compared, and the picture."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from triptych.bench.errors import ServerStartError
from triptych.bench.options import SweepOptions, parse_replica_counts
from triptych.bench.plot import plot_sweep
from triptych.bench.server import running_server
from triptych.bench.sweep import sweep_report, sweep_table
from triptych.bench.sweep_plan import SweepPlan, plan_sweep
from triptych.errors import ConfigError

STAGES = """\
stages:
  - stage_id: 0
    stage_type: diffusion
    runtime: {devices: "4,5,6,7", num_replicas: 4}
    engine_args:
      engine: simulated
"""
NO_VARIABLES: dict[str, str] = {}


def planned(environ: dict[str, str] = NO_VARIABLES, **options: Any) -> SweepPlan:
    return plan_sweep(SweepOptions(**options), {"CUDA_VISIBLE_DEVICES": "", **environ})


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
def plan() -> SweepPlan:
    return planned(replicas="1,2,4")


def test_counts_are_sorted() -> None:
    assert parse_replica_counts("4, 1,2") == (1, 2, 4)


def test_the_load_and_the_threads_are_the_same_for_every_count(plan: SweepPlan) -> None:
    assert plan.num_prompts == 32
    assert plan.max_concurrency == 8
    assert plan.cpu_threads == max(1, len(os.sched_getaffinity(0)) // 4)
    assert plan.serve_arguments[1] == ("--num-replicas", "2", "--devices", "0,1")
    assert any("32 requests, at most 8 at a time" in note for note in plan.notes)
    assert any("OMP_NUM_THREADS" in note for note in plan.notes)


def test_the_number_of_requests_divides_by_every_count() -> None:
    assert planned(replicas="1,2,3,4").num_prompts == 36
    asked = planned(replicas="1,2,3", num_prompts=10, max_concurrency=2)
    assert (asked.num_prompts, asked.max_concurrency) == (10, 2)
    assert any("do not divide evenly by 3" in note for note in asked.notes)
    assert any("cannot keep 3 replicas busy" in note for note in asked.notes)


def test_a_device_list_is_cut_to_what_each_count_needs(tmp_path: Path) -> None:
    stage_file = tmp_path / "stages.yaml"
    stage_file.write_text(STAGES)
    options = {"model": "m", "stage_configs_path": str(stage_file)}
    made = planned(**options, replicas="1,3")
    base = ("m", "--stage-configs-path", str(stage_file))
    assert made.serve_arguments == (
        (*base, "--num-replicas", "1", "--devices", "4"),
        (*base, "--num-replicas", "3", "--devices", "4,5,6"),
    )
    with pytest.raises(ConfigError, match=r"5 replica.* but 4 are listed"):
        planned(**options, replicas="1,5")


def test_variables_of_serve_count_for_the_plan_as_they_do_for_its_servers(tmp_path: Path) -> None:
    stage_file = tmp_path / "stages.yaml"
    stage_file.write_text(STAGES)
    variables = {"TRIPTYCH_STAGE_CONFIGS_PATH": str(stage_file), "TRIPTYCH_DEVICES": "7,8,9"}
    assert planned(variables, replicas="2").serve_arguments == (("--num-replicas", "2", "--devices", "7,8"),)


def test_threads_per_replica_are_those_that_serve_would_choose(tmp_path: Path) -> None:
    stage_file = tmp_path / "stages.yaml"
    stage_file.write_text(
        STAGES.replace("simulated", "diffusers").replace("}", ", cpu_threads: 2}").replace("4,5,6,7", "0,1,2,3")
    )
    options = {"model": "org/model", "stage_configs_path": str(stage_file), "replicas": "1,2"}
    assert planned(**options).cpu_threads == 2
    outer = planned({"OMP_NUM_THREADS": "3,1"}, **options)
    assert outer.cpu_threads == 3
    assert any("gives way to OMP_NUM_THREADS=3" in note for note in outer.notes)
    with pytest.raises(ConfigError, match=r"OMP_NUM_THREADS: not a number of threads; found 'abc'"):
        planned({"OMP_NUM_THREADS": "abc"}, **options)


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
