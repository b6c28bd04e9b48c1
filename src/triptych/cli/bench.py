"""`triptych bench serve` and `triptych bench sweep`: measure a server that runs, or start one per replica count.

Flags become one `LoadOptions`; the work is in `triptych.bench`, which is imported only when a command runs. Results go
to standard output, progress and notes to standard error. Exit codes: 0 all answered, 1 a failure, 2 a bad flag,
130 interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from triptych.bench.options import BackendName, DatasetName, LoadOptions, Task
from triptych.errors import ConfigError

if TYPE_CHECKING:
    from triptych.bench.sweep import SweepPlan

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help="Measure a server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Backend = Annotated[
    BackendName,
    typer.Option(
        help="Request dialect: triptych and vllm-omni post to /v1/chat/completions, openai to /v1/images/generations, "
        "v1/videos to the video job API. OPENAI_API_KEY, where set, is sent as the key."
    ),
]
_Task = Annotated[Task, typer.Option(help="What is asked for; tasks with i send an input picture.")]
_Dataset = Annotated[
    DatasetName,
    typer.Option(help="Source of requests; trace and prompts read --dataset-path, vbench a local copy of its files."),
]
_DatasetPath = Annotated[Path | None, typer.Option(help="File (or folder of pictures) of the dataset.")]
_RequestRate = Annotated[
    float, typer.Option(help="Requests per second, arriving as a Poisson process; inf sends all at once.")
]
_WarmupRequests = Annotated[
    int | None,
    typer.Option(help="Requests before the measurement; 0 for none.", show_default="one per replica"),
]
_WarmupSteps = Annotated[int, typer.Option(help="Denoising steps of a warm-up request.")]
_Width = Annotated[int | None, typer.Option(help="Width in pixels.")]
_Height = Annotated[int | None, typer.Option(help="Height in pixels.")]
_NumFrames = Annotated[int | None, typer.Option(help="Frames of a clip.")]
_Fps = Annotated[int | None, typer.Option(help="Frames per second of a clip.")]
_Steps = Annotated[int, typer.Option(help="Denoising steps.")]
_Seed = Annotated[int | None, typer.Option(help="Seed of every request; without one the server draws.")]
_RandomConfig = Annotated[
    str | None,
    typer.Option(
        help="Kinds of random requests as a JSON list, "
        '[{"width":512,"height":512,"num_inference_steps":20,"weight":0.5}, …]; weight is how often a kind is drawn.'
    ),
]
_RandomSeed = Annotated[int, typer.Option(help="Seed of the random dataset and of the arrival times.")]
_NegativePrompt = Annotated[
    bool, typer.Option("--enable-negative-prompt", help="Random requests carry a negative prompt.")
]
_Slo = Annotated[
    bool,
    typer.Option(
        "--slo",
        help="Report how many requests met their latency target: slo_ms of the trace, else --slo-scale times what the "
        "warm-up requests let expect for the size, frames and steps.",
    ),
]
_SloScale = Annotated[float, typer.Option(help="Target as a multiple of the expected latency.")]
_DisableTqdm = Annotated[bool, typer.Option("--disable-tqdm", help="No progress bar.")]


@bench_app.command()
def serve(
    base_url: Annotated[str | None, typer.Option(help="Server address; wins over --host and --port.")] = None,
    host: Annotated[str, typer.Option(help="Server host.")] = "localhost",
    port: Annotated[int, typer.Option(help="Server port.")] = 8091,
    model: Annotated[str, typer.Option(help="Model name; default is the first one the server lists.")] = "default",
    backend: _Backend = BackendName.TRIPTYCH,
    task: _Task = Task.T2I,
    dataset: _Dataset = DatasetName.RANDOM,
    dataset_path: _DatasetPath = None,
    num_prompts: Annotated[int, typer.Option(help="Number of requests.")] = 10,
    request_rate: _RequestRate = math.inf,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Most requests in flight at a time.", show_default="no limit")
    ] = None,
    warmup_requests: _WarmupRequests = None,
    warmup_num_inference_steps: _WarmupSteps = 2,
    width: _Width = None,
    height: _Height = None,
    num_frames: _NumFrames = None,
    fps: _Fps = None,
    num_inference_steps: _Steps = 50,
    seed: _Seed = None,
    random_request_config: _RandomConfig = None,
    random_request_seed: _RandomSeed = 42,
    enable_negative_prompt: _NegativePrompt = False,
    slo: _Slo = False,
    slo_scale: _SloScale = 3.0,
    output_file: Annotated[Path | None, typer.Option(help="Write the whole report there as JSON.")] = None,
    save_dir: Annotated[Path | None, typer.Option(help="Keep the pictures and clips in this folder.")] = None,
    disable_tqdm: _DisableTqdm = False,
) -> None:
    """Send requests to a running server and report throughput and latency."""
    flags = {name: value for name, value in locals().items() if name not in ("host", "port", "output_file")}
    with _exit_codes():
        if not 0 < port < 65536:
            raise ConfigError("out of range", where="--port", found=port, wanted="1 to 65535")
        options = LoadOptions(**flags | {"base_url": base_url or f"http://{_bracketed(host)}:{port}"})
        _serve(options, output_file)


@bench_app.command()
def sweep(
    model: Annotated[
        str | None, typer.Argument(help="What `triptych serve` takes as MODEL.", show_default="the embedded model")
    ] = None,
    replicas: Annotated[str, typer.Option(help="Replica counts to measure.")] = "1,2,3,4",
    stage_configs_path: Annotated[
        Path | None, typer.Option(help="Stage file; its device list is cut to what each count needs.")
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="Folder of table, plot, reports and server logs.")] = Path(
        "results/sweep"
    ),
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds until all replicas must be ready.")] = 600.0,
    backend: _Backend = BackendName.TRIPTYCH,
    task: _Task = Task.T2I,
    dataset: _Dataset = DatasetName.RANDOM,
    dataset_path: _DatasetPath = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Requests per count.", show_default="8 per replica, divisible by every count"),
    ] = None,
    request_rate: _RequestRate = math.inf,
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Most requests in flight at a time.", show_default="twice the largest count"),
    ] = None,
    warmup_requests: _WarmupRequests = None,
    warmup_num_inference_steps: _WarmupSteps = 2,
    width: _Width = None,
    height: _Height = None,
    num_frames: _NumFrames = None,
    fps: _Fps = None,
    num_inference_steps: _Steps = 50,
    seed: _Seed = None,
    random_request_config: _RandomConfig = None,
    random_request_seed: _RandomSeed = 42,
    enable_negative_prompt: _NegativePrompt = False,
    slo: _Slo = False,
    slo_scale: _SloScale = 3.0,
    disable_tqdm: _DisableTqdm = False,
) -> None:
    """Start a server per replica count, run the same load on each, and compare: table, JSON, plot."""
    own = ("model", "replicas", "stage_configs_path", "output_dir", "start_timeout")
    flags = {name: value for name, value in locals().items() if name not in (*own, "own")}
    with _exit_codes():
        from triptych.bench.sweep import parse_replica_counts, plan_sweep

        plan = plan_sweep(
            model=model,
            stage_file=stage_configs_path,
            counts=parse_replica_counts(replicas),
            num_prompts=num_prompts,
            max_concurrency=max_concurrency,
        )
        options = LoadOptions(**flags | {"num_prompts": plan.num_prompts, "max_concurrency": plan.max_concurrency})
        _sweep(plan, options, output_dir=output_dir, start_timeout_s=start_timeout)


def _serve(options: LoadOptions, output_file: Path | None) -> None:
    from triptych.bench.datasets import load_dataset
    from triptych.bench.program import exit_code, run_benchmark
    from triptych.bench.report import summary_table, write_json

    progress = Console(stderr=True)
    _check_writable("--output-file", output_file.parent if output_file else None)
    requests, notes = load_dataset(options)
    _show_notes(progress, notes)
    report = run_benchmark(options, requests, console=progress)
    report["notes"] = [*notes, *report["notes"]]
    Console().print(summary_table(report))
    if output_file is not None:
        write_json(report, output_file)
        progress.print(f"report written to {output_file}", markup=False, highlight=False)
    raise typer.Exit(exit_code(report))


def _sweep(plan: SweepPlan, options: LoadOptions, *, output_dir: Path, start_timeout_s: float) -> None:
    import uvloop

    from triptych.bench.datasets import load_dataset
    from triptych.bench.plot import plot_sweep
    from triptych.bench.report import write_json
    from triptych.bench.sweep import run_sweep, sweep_report, sweep_table

    progress = Console(stderr=True)
    _check_writable("--output-dir", output_dir)
    requests, notes = load_dataset(options)
    _show_notes(progress, [*plan.notes, *notes])
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


@contextmanager
def _exit_codes() -> Iterator[None]:
    """One readable line and the right exit code for what can go wrong."""
    from triptych.bench.load import ServerUnreachable
    from triptych.bench.server import ServerStartError

    try:
        yield
    except ConfigError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    except (ServerUnreachable, ServerStartError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error


def _check_writable(flag: str, folder: Path | None) -> None:
    """Find out now, not after an hour of measuring."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder: {error}", where=flag, found=str(folder)) from error


def _show_notes(console: Console, notes: list[str]) -> None:
    for note in notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
