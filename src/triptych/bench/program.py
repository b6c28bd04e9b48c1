"""`bench serve` as a function: options in, report out.

The command line, the sweep and the tests all call `run_benchmark`; it shows a progress bar, runs the load on a fast
event loop and turns the result into the report. `exit_code` is the one rule of when a run counts as passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from triptych.bench.load import LoadResult, run_load
from triptych.bench.options import LoadOptions
from triptych.bench.report import summarise
from triptych.bench.workload import BenchRequest

__all__ = ["exit_code", "measure", "run_benchmark"]

_INTERRUPTED = 130


def run_benchmark(options: LoadOptions, requests: Sequence[BenchRequest], *, console: Console) -> dict[str, Any]:
    """Run one load and return its report; notes and the progress bar go to `console`. Raises `ServerUnreachable`."""
    return summarise(uvloop.run(measure(options, requests, console=console)))


async def measure(
    options: LoadOptions, requests: Sequence[BenchRequest], *, console: Console, label: str = "requests"
) -> LoadResult:
    """Run one load under a progress bar; `save_dir` exists. Raises `ServerUnreachable`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}", style="red"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    disabled = options.disable_tqdm or not console.is_terminal
    with Progress(*columns, console=console, disable=disabled, refresh_per_second=4) as progress:
        bar = progress.add_task(label, total=len(requests), failed="")

        def advance(finished: int, failed: int) -> None:
            progress.update(bar, completed=finished, failed=f"{failed} failed" if failed else "")

        def note(text: str) -> None:
            progress.console.print(f"note: {text}", style="yellow", markup=False, highlight=False)

        return await run_load(options, requests, on_progress=advance, on_note=note)


def exit_code(report: dict[str, Any]) -> int:
    """0 when every request was answered, 1 when one failed, 130 when interrupted."""
    if report["interrupted"]:
        return _INTERRUPTED
    return 1 if report["failed_requests"] or not report["completed_requests"] else 0
