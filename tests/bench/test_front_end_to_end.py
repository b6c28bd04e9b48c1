"""The front benchmarks as a whole, tiny: real servers, and exit codes by their bars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FRONT = Path(__file__).parents[2] / "benchmarks/front"
TINY_LOAD = ("--replicas", "2", "--seconds", "0.02", "--duration", "0.1", "--size", "64x64")


def measured(tmp_path: Path, program: str, *args: str) -> tuple[int, dict[str, Any], str]:
    output = tmp_path / "report.json"
    command = [sys.executable, str(FRONT / program), *args, "--output-file", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert output.exists(), done.stderr
    return done.returncode, json.loads(output.read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("case", "bar", "code"), [("counts", "0", 0), ("wide", "2", 1)])
def test_scaling_keeps_every_replica_busy_and_compares_with_its_bar(
    tmp_path: Path, case: str, bar: str, code: int
) -> None:
    found, report, shown = measured(tmp_path, "scaling.py", case, *TINY_LOAD, "--at-least", bar)
    assert found == code
    (row,) = report["rows"]
    assert (row["replicas"], row["clients"], row["requests"]) == (2, 4, 8)
    assert row["ideal_s"] == pytest.approx(8 * 0.02 / 2)
    assert row["fraction_of_ideal"] == pytest.approx(row["ideal_s"] / row["elapsed_s"])
    assert row["throughput_qps"] == pytest.approx(8 / row["elapsed_s"])
    assert "of ideal" in shown


@pytest.mark.slow
def test_the_rotation_goes_over_all_replicas_twice(tmp_path: Path) -> None:
    code, report, shown = measured(tmp_path, "scaling.py", "rotation", *TINY_LOAD)
    assert code == 0
    assert report["rows"] == [{"replicas": 2, "served_by": [0, 1, 0, 1], "in_turn": True}]
    assert "in turn" in shown


@pytest.mark.slow
@pytest.mark.parametrize(("bar", "code"), [(1e9, 0), (0.0, 1)])
def test_the_front_cost_compares_the_same_picture_from_both_servers_with_its_bar(
    tmp_path: Path, bar: float, code: int
) -> None:
    args = ("--sizes", "64x64", "--pairs", "2", "--block", "1", "--at-most", f"64x64={bar}")
    found, report, shown = measured(tmp_path, "front_cost.py", *args)
    assert found == code
    assert (report["pairs"], report["block"], report["concurrency"]) == (2, 1, 1)
    (row,) = report["rows"]
    assert (row["size"], row["at_most"]) == ("64x64", bar)
    assert min(row["body_bytes"].values()) > 64 * 64
    assert row["ratio"] == pytest.approx(row["ours_p50_ms"] / row["bare_p50_ms"])
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert "95 % interval" in shown


def test_a_bar_for_a_size_that_is_not_measured_is_refused() -> None:
    command = [sys.executable, str(FRONT / "front_cost.py"), "--sizes", "64x64", "--at-most", "32x32=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "32x32" in done.stderr
