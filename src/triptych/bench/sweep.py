"""Throughput over the number of replicas: a server per count, the same load on each.

`run_sweep` starts a server per count as the `SweepPlan` says, measures and stops it; `sweep_report` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from triptych.bench.options import LoadOptions
from triptych.bench.program import exit_code, measure
from triptych.bench.report import summarise, write_json
from triptych.bench.server import running_server
from triptych.bench.sweep_plan import SweepPlan
from triptych.bench.workload import BenchRequest

__all__ = ["run_sweep", "sweep_report", "sweep_table"]


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
            loaded = options.model_copy(update={"base_url": base_url})
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
