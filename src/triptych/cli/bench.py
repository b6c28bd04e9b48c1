"""`triptych bench serve` and `triptych bench sweep`: measure a server that runs, or start one per replica count.

The flags are generated from the option models of `triptych.bench.options`; HTTP client and numbers are imported only
once all of them are checked. Results go to standard output, progress and notes to standard error. Exit codes: 0 all
answered, 1 a failure, 2 a bad flag, 130 interrupted.
"""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console

from triptych.bench.errors import ServerStartError, ServerUnreachable
from triptych.bench.options import LoadOptions, SweepOptions, TargetOptions, read_flags
from triptych.cli.exit_codes import exit_codes
from triptych.config.settings import Flag
from triptych.errors import ConfigError

if TYPE_CHECKING:
    from triptych.bench.sweep_plan import SweepPlan

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help="Measure a server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_FAILURES = (ServerUnreachable, ServerStartError, OSError)


@bench_app.command()
def serve(**given: object) -> None:
    """Send requests to a running server and report throughput and latency."""
    with exit_codes(*_FAILURES):
        target = read_flags(TargetOptions, given)
        _serve(read_flags(LoadOptions, given | {"base_url": target.url}), target.output_file)


@bench_app.command()
def sweep(**given: object) -> None:
    """Start a server per replica count, run the same load on each, and compare: table, JSON, plot."""
    with exit_codes(*_FAILURES):
        from triptych.bench.sweep_plan import plan_sweep

        own = read_flags(SweepOptions, given)
        plan = plan_sweep(own)
        decided = {"num_prompts": plan.num_prompts, "max_concurrency": plan.max_concurrency, "model": None}
        options = read_flags(LoadOptions, given | decided)
        _sweep(plan, options, output_dir=own.output_dir, start_timeout_s=own.start_timeout)


def _signature(*models: type[BaseModel], leave_out: tuple[str, ...] = ()) -> inspect.Signature:
    """Every flag of the models as a parameter; where two have one of the same name, that of the first."""
    fields: dict[str, FieldInfo] = {}
    for model in models:
        for name, field in model.model_fields.items():
            fields.setdefault(name, field)
    return inspect.Signature([_parameter(name, field) for name, field in fields.items() if name not in leave_out])


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    # Values stay text here: the option models check them.
    flag = next(entry for entry in field.metadata if isinstance(entry, Flag))
    kind = bool if field.annotation is bool else str
    if flag.option == "MODEL":
        info: Any = typer.Argument(metavar=flag.metavar, help=flag.help, show_default=False)
    else:
        notes = f" Default: {shown}." if (shown := _default_text(field.default)) else ""
        option = "--" + name.replace("_", "-")
        info = typer.Option(option, metavar=flag.metavar or None, help=flag.help + notes, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _default_text(value: object) -> str:
    """A default as a reader would type it; empty where there is none to show."""
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# Typer reads the signatures; they are the tables of flags.
serve.__signature__ = _signature(TargetOptions, LoadOptions)  # type: ignore[attr-defined]
sweep.__signature__ = _signature(SweepOptions, LoadOptions, leave_out=("base_url", "save_dir"))  # type: ignore[attr-defined]


def _serve(options: LoadOptions, output_file: Path | None) -> None:
    from triptych.bench.datasets import load_dataset

    progress = Console(stderr=True)
    _check_file("--output-file", output_file)
    _check_folder("--save-dir", options.save_dir)
    requests, notes = load_dataset(options)
    _show_notes(progress, notes)

    from triptych.bench.program import exit_code, run_benchmark
    from triptych.bench.report import summary_table, write_json

    report = run_benchmark(options, requests, console=progress)
    report["notes"] = [*notes, *report["notes"]]
    Console().print(summary_table(report))
    if output_file is not None:
        write_json(report, output_file)
        progress.print(f"report written to {output_file}", markup=False, highlight=False)
    raise typer.Exit(exit_code(report))


def _sweep(plan: SweepPlan, options: LoadOptions, *, output_dir: Path, start_timeout_s: float) -> None:
    from triptych.bench.datasets import load_dataset

    progress = Console(stderr=True)
    _check_folder("--output-dir", output_dir)
    requests, notes = load_dataset(options)
    _show_notes(progress, [*plan.notes, *notes])

    import uvloop

    from triptych.bench.plot import plot_sweep
    from triptych.bench.report import write_json
    from triptych.bench.sweep import run_sweep, sweep_report, sweep_table

    reports: dict[int, dict[str, Any]] = {}
    try:
        uvloop.run(
            run_sweep(
                plan,
                options,
                requests,
                output_dir=output_dir,
                start_timeout_s=start_timeout_s,
                console=progress,
                on_report=reports.__setitem__,
            )
        )
    finally:
        # What was measured before a failure is still worth its table.
        if reports:
            report = sweep_report(plan, reports)
            write_json(report, output_dir / "sweep.json")
            plot_sweep(report, output_dir / "sweep.png")
            Console().print(sweep_table(report))
            progress.print(f"sweep.json, sweep.png and the reports are in {output_dir}", markup=False, highlight=False)
    raise typer.Exit(report["exit_code"])


def _check_file(flag: str, path: Path | None) -> None:
    """Find out now, not after an hour of measuring; leaves no file behind."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_fifo():  # opening it would wait for its reader, closing it would end that
            return
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        reason = f"cannot write there: {error.strerror}"
        raise ConfigError(reason, where=flag, found=str(path), wanted="a file that can be written") from error


def _check_folder(flag: str, folder: Path | None) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"cannot write there: {error.strerror}"
        raise ConfigError(reason, where=flag, found=str(folder), wanted="a folder for new files") from error


def _show_notes(console: Console, notes: list[str]) -> None:
    for note in notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
