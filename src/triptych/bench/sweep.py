"""Throughput over the number of replicas: a server per count, the same load on each.

`plan_sweep` fixes everything that must not change between counts (requests, concurrency, threads per replica) and cuts
the device list for each count; `run_sweep` starts, measures and stops; `sweep_report` compares.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from triptych.bench.options import LoadOptions
from triptych.bench.program import exit_code, measure
from triptych.bench.report import summarise, write_json
from triptych.bench.server import running_server
from triptych.bench.workload import BenchRequest
from triptych.config.stage_file import read_stage_file
from triptych.errors import ConfigError

__all__ = ["SweepPlan", "parse_replica_counts", "plan_sweep", "run_sweep", "sweep_report", "sweep_table"]

_ROUNDS_PER_REPLICA = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What stays the same over the counts, and the `serve` arguments of each."""

    counts: tuple[int, ...]
    serve_arguments: tuple[tuple[str, ...], ...]
    cpu_threads: int
    num_prompts: int
    max_concurrency: int
    notes: tuple[str, ...]


def parse_replica_counts(text: str) -> tuple[int, ...]:
    """`"1,2,4"` as increasing distinct counts. Raises `ConfigError`."""
    where, wanted = "--replicas", "distinct whole numbers of at least 1, like 1,2,3,4"
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError("not a list of counts", where=where, found=text, wanted=wanted) from error
    if min(counts) < 1 or len(set(counts)) != len(counts):
        raise ConfigError("bad counts", where=where, found=text, wanted=wanted)
    return tuple(sorted(counts))


def plan_sweep(
    *,
    model: str | None,
    stage_file: Path | None,
    counts: Sequence[int],
    num_prompts: int | None,
    max_concurrency: int | None,
) -> SweepPlan:
    """Everything that is decided before the first server starts. Raises `ConfigError`."""
    most = max(counts)
    devices, world_size, asked_threads = _stage(stage_file)
    if devices is not None and len(devices) < most * world_size:
        raise ConfigError(
            f"{most} replicas of {world_size} device(s) each do not fit the {len(devices)} devices of {stage_file}",
            where="--replicas",
            found=most,
            wanted=f"at most {len(devices) // world_size}",
        )
    cores = len(os.sched_getaffinity(0))
    outer = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    threads = int(outer) if outer.isdigit() else asked_threads or max(1, cores // (most * world_size))
    round_size = math.lcm(*counts)
    prompts = num_prompts or math.ceil(_ROUNDS_PER_REPLICA * most / round_size) * round_size
    concurrency = max_concurrency or 2 * most
    notes = [
        f"the same load for every count: {prompts} requests, at most {concurrency} at a time",
        f"{threads} CPU thread(s) per replica at every count (OMP_NUM_THREADS)",
    ]
    if uneven := [count for count in counts if prompts % count]:
        shown = ", ".join(map(str, uneven))
        notes.append(f"{prompts} requests do not divide evenly by {shown}: replicas idle in the last round")
    if concurrency < most:
        notes.append(f"at most {concurrency} requests at a time cannot keep {most} replicas busy")
    base = [model] if model is not None else []
    base += ["--stage-configs-path", str(stage_file)] if stage_file is not None else []
    arguments = []
    for count in counts:
        cut = ["--devices", ",".join(devices[: count * world_size])] if devices is not None else []
        arguments.append((*base, "--num-replicas", str(count), *cut))
    return SweepPlan(
        counts=tuple(counts),
        serve_arguments=tuple(arguments),
        cpu_threads=threads,
        num_prompts=prompts,
        max_concurrency=concurrency,
        notes=tuple(notes),
    )


def _stage(stage_file: Path | None) -> tuple[tuple[str, ...] | None, int, int | None]:
    """Listed devices, devices per replica and threads per replica of a stage file."""
    if stage_file is None:
        return None, 1, None
    stage = read_stage_file(stage_file).stages[0]
    return stage.runtime.devices, stage.engine_args.parallel_config.devices_per_replica, stage.runtime.cpu_threads


async def run_sweep(
    plan: SweepPlan,
    options: LoadOptions,
    requests: Sequence[BenchRequest],
    *,
    output_dir: Path,
    start_timeout_s: float,
    console: Console,
    on_report: Callable[[int, dict[str, Any]], None],
) -> None:
    """Measure every count in turn; `on_report` gets each report as it is made. An interruption ends the sweep.

    Raises `ServerStartError`, `ServerUnreachable`.
    """
    environment = {"OMP_NUM_THREADS": str(plan.cpu_threads)}
    for count, arguments in zip(plan.counts, plan.serve_arguments, strict=True):
        name = f"replicas-{count}"
        console.print(f"{count} replica(s): starting", highlight=False)
        async with running_server(
            arguments,
            replicas=count,
            log_path=output_dir / f"{name}.log",
            environment=environment,
            start_timeout_s=start_timeout_s,
        ) as base_url:
            loaded = replace(options, base_url=base_url)
            result = await measure(loaded, requests, console=console, label=f"{count} replica(s)")
        report = summarise(result)
        write_json(report, output_dir / f"{name}.json")
        on_report(count, report)
        if result.interrupted:
            return


def sweep_report(plan: SweepPlan, reports: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Throughput, speed-up and efficiency per count; both compare with the smallest count that was measured."""
    first = min(reports)
    base_qps = reports[first]["throughput_qps"]
    rows = []
    for count, report in sorted(reports.items()):
        speedup = report["throughput_qps"] / base_qps if base_qps else None
        rows.append(
            {
                "replicas": count,
                "throughput_qps": report["throughput_qps"],
                "speedup": speedup,
                "efficiency": speedup * first / count if speedup is not None else None,
                "latency_p50": report["latency_p50"],
                "latency_p95": report["latency_p95"],
                "latency_p99": report["latency_p99"],
                "completed_requests": report["completed_requests"],
                "failed_requests": report["failed_requests"],
                "requests_per_replica": report["requests_per_replica"],
            }
        )
    last = reports[max(reports)]
    return {
        "model": last["model"],
        "task": last["task"],
        "backend": last["backend"],
        "compared_with_replicas": first,
        "cpu_threads_per_replica": plan.cpu_threads,
        "num_prompts": plan.num_prompts,
        "max_concurrency": plan.max_concurrency,
        "notes": list(plan.notes),
        "exit_code": max(exit_code(report) for report in reports.values()),
        "rows": rows,
        "config": {key: value for key, value in last["config"].items() if key != "base_url"},
        "versions": last["versions"],
    }


def sweep_table(report: dict[str, Any]) -> Table:
    """The comparison for a terminal."""
    table = Table(
        title=f"{report['model']}: throughput over replicas", title_justify="left", box=SIMPLE_HEAD, show_edge=False
    )
    for heading in ("replicas", "req/s", "speed-up", "efficiency", "p50 s", "p95 s", "p99 s", "failed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report["rows"]:
        table.add_row(
            str(row["replicas"]),
            f"{row['throughput_qps']:.3f}",
            "-" if row["speedup"] is None else f"{row['speedup']:.2f}",
            "-" if row["efficiency"] is None else f"{row['efficiency']:.1%}",
            *("-" if row[key] is None else f"{row[key]:.3f}" for key in ("latency_p50", "latency_p95", "latency_p99")),
            str(row["failed_requests"]),
        )
    return table
