"""From records to numbers: the JSON report and the table for people.

`summarise` turns a `LoadResult` into one plain dict, keys as in the reference script plus our own; the table shows the
same dict. Times are seconds, memory MB; a number that nothing was measured for is null, never 0.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from triptych import __version__
from triptych.bench.load import LoadResult, Record

__all__ = ["summarise", "summary_table", "write_json"]

_PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


def summarise(result: LoadResult) -> dict[str, Any]:
    """The whole report as JSON-ready values."""
    options = result.options
    good = [record for record in result.records if record.ok]
    failed = [record for record in result.records if not record.ok]
    answers = [record.answer for record in good if record.answer is not None]
    outputs = sum(len(answer.outputs) for answer in answers)
    frames = [record.request.num_frames for record in good]
    total_frames = sum(count for count in frames if count) if frames and all(frames) else None
    memory = [answer.peak_memory_mb for answer in answers if answer.peak_memory_mb]
    replicas = Counter(replica for answer in answers for replica in answer.replicas)
    report: dict[str, Any] = {
        "backend": str(options.backend),
        "model": result.server.model,
        "dataset": str(options.dataset),
        "task": str(options.task),
        "duration": result.duration_s,
        "completed_requests": len(good),
        "failed_requests": len(failed),
        "throughput_qps": _per_second(len(good), result.duration_s),
        "images_per_second": None if options.task.makes_video else _per_second(outputs, result.duration_s),
        "frames_per_second": _per_second(total_frames, result.duration_s) if options.task.makes_video else None,
        **_spread("latency", [record.latency_s for record in good]),
        **_spread("queue", [answer.queue_s for answer in answers if answer.queue_s is not None]),
        **_spread("inference", [answer.inference_s for answer in answers if answer.inference_s is not None]),
        **_spread("client_wait", [max(0.0, record.start_s - record.arrival_s) for record in good]),
        "peak_memory_mb_max": max(memory, default=None),
        "peak_memory_mb_mean": float(np.mean(memory)) if memory else None,
        "peak_memory_mb_median": float(np.median(memory)) if memory else None,
        "requests_per_replica": {str(replica): replicas[replica] for replica in sorted(replicas)},
        "replayed_requests": sum((answer.attempts or 1) > 1 for answer in answers),
        "errors": dict(Counter(record.error_class for record in failed).most_common()),
    }
    if options.slo:
        report |= _slo(result)
    return report | _context(result) | {"requests": [_record(record) for record in result.records]}


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write a report; parent folders are made. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def summary_table(report: dict[str, Any]) -> Group:
    """The report for a terminal."""
    table = Table(title="Serving benchmark", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    config = report["config"]
    limit = config["max_concurrency"]
    sent = report["completed_requests"] + report["failed_requests"]
    table.add_row("Server", f"{config['base_url']}  {report['backend']}")
    table.add_row("Model", str(report["model"]))
    rate = "all at once" if config["request_rate"] == "inf" else f"{config['request_rate']:g} requests/s"
    table.add_row("Load", f"{report['dataset']} {report['task']}, {rate}")
    table.add_row("Concurrency limit", "none" if limit is None else str(limit), end_section=True)
    table.add_row("Duration (s)", _number(report["duration"], 2))
    table.add_row("Completed requests", f"{report['completed_requests']} of {sent}")
    if report["unfinished_requests"]:
        table.add_row("Unfinished requests", str(report["unfinished_requests"]))
    table.add_row("Throughput (requests/s)", _number(report["throughput_qps"], 3))
    for key, label in (("images_per_second", "Images/s"), ("frames_per_second", "Frames/s")):
        if report[key] is not None:
            table.add_row(label, _number(report[key], 3))
    table.add_section()
    for name in ("latency", "queue", "inference"):
        if report[f"{name}_mean"] is not None:
            shown = " / ".join(_number(report[f"{name}_{key}"], 3) for key in ("mean", "p50", "p95", "p99", "max"))
            table.add_row(f"{name.capitalize()} mean/p50/p95/p99/max (s)", shown)
    if "slo_scale" in report:
        attained = report["slo_attainment_rate"]
        shown = "no target known" if attained is None else f"{attained:.1%} ({report['slo_met_success']})"
        table.add_row(f"SLO attained (scale {report['slo_scale']:g})", shown)
    if report["peak_memory_mb_max"] is not None:
        table.add_row("Peak memory (MB)", _number(report["peak_memory_mb_max"], 0))
    if report["requests_per_replica"]:
        counts = "  ".join(f"{replica}: {count}" for replica, count in report["requests_per_replica"].items())
        table.add_row("Requests per replica", counts)
    return Group(table, *_failures(report))


def _failures(report: dict[str, Any]) -> list[Text]:
    lines = []
    for error_class, count in report["errors"].items():
        first = next(entry["error"] for entry in report["requests"] if entry["error_class"] == error_class)
        lines.append(Text(f"{count} failed: {error_class}: {first}", style="red"))
    if report["interrupted"]:
        lines.append(Text("interrupted: these are the requests that had ended by then", style="yellow"))
    return lines


def _context(result: LoadResult) -> dict[str, Any]:
    """How the numbers came about: everything needed to run the same again."""
    versions = {"triptych": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in ("aiohttp", "numpy", "uvloop"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "interrupted": result.interrupted,
        "unfinished_requests": result.planned_requests - len(result.records),
        "warmup_requests": result.warmup_requests,
        "failed_warmup_requests": len(result.failed_warmups),
        "notes": list(result.notes),
        "server": {
            "version": result.server.version,
            "replicas": result.server.replicas,
            "ready_replicas": result.server.ready_replicas,
        },
        "config": result.options.as_json(),
        "versions": versions,
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    keys = [f"{name}_p{percentile:g}".replace(".", "_") for percentile in _PERCENTILES]
    if not values:
        return dict.fromkeys([f"{name}_mean", f"{name}_median", *keys, f"{name}_max"])
    array = np.asarray(values, dtype=float)
    percentiles = dict(zip(keys, np.percentile(array, _PERCENTILES).tolist(), strict=True))
    return {
        f"{name}_mean": float(array.mean()),
        f"{name}_median": float(np.median(array)),
        **percentiles,
        f"{name}_max": float(array.max()),
    }


def _slo(result: LoadResult) -> dict[str, Any]:
    verdicts = [verdict for record in result.records if (verdict := record.slo_met) is not None]
    return {
        "slo_attainment_rate": sum(verdicts) / len(verdicts) if verdicts else None,
        "slo_met_success": sum(verdicts),
        "slo_scale": result.options.slo_scale,
    }


def _record(record: Record) -> dict[str, Any]:
    answer = record.answer
    return {
        "index": record.index,
        "prompt": record.request.prompt,
        **record.request.parameters(),
        "arrival_s": record.arrival_s,
        "start_s": record.start_s,
        "latency_s": record.latency_s,
        "status": record.status,
        "error_class": record.error_class,
        "error": record.error,
        "outputs": len(answer.outputs) if answer else 0,
        "replicas": list(answer.replicas) if answer else [],
        "queue_s": answer.queue_s if answer else None,
        "inference_s": answer.inference_s if answer else None,
        "peak_memory_mb": answer.peak_memory_mb if answer else None,
        "attempts": answer.attempts if answer else None,
        "slo_ms": record.request.slo_ms,
        "slo_met": record.slo_met,
    }


def _per_second(count: int | None, duration_s: float) -> float | None:
    if count is None:
        return None
    return count / duration_s if duration_s > 0 else 0.0


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
