"""What sharing forwards gains, and what the hub costs: ratios to a plain diffusers loop in the same run.

The same pictures are made by plain diffusers one after another, and by the hub with 1, 2, 4 and 8 slots; beside them
the denoiser's bare forward runs for 1, 2, 4 and 8 pictures, which is the most that sharing could gain. All variants
take turns in each repetition; medians are reported, as a table, as JSON and as a plot.

    python benchmarks/engine/step_batching.py --pictures 16 --repetitions 7 --output-dir build/engine
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMPipeline, DDPMScheduler, DiffusionPipeline, UNet2DModel
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from triptych.engine.collation import merge
from triptych.engine.hub import Hub, Task
from triptych.engine.merging import Call, Merger
from triptych.engine.pipeline_view import ViewFactory
from triptych.models import embedded_path

Clock = Callable[[], float]
CLOCKS: Mapping[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
SLOTS = (1, 2, 4, 8)
PROMPTS = ("a red circle", "a blue square above a green star", "a small yellow triangle", "a pink heart on gray")


@dataclass(frozen=True)
class Subject:
    """A pipeline and the call that makes picture number n."""

    name: str
    pipe: Any
    arguments: Callable[[int], dict[str, Any]]


def shapes(steps: int) -> Subject:
    """The embedded picture model, with guidance."""
    pipe = DiffusionPipeline.from_pretrained(embedded_path("triptych/shapes"))

    def arguments(number: int) -> dict[str, Any]:
        return {
            "prompt": PROMPTS[number % len(PROMPTS)],
            "width": 64,
            "height": 64,
            "guidance_scale": 3.0,
            "num_inference_steps": steps,
            "use_resolution_binning": False,
            "output_type": "np",
            "generator": torch.Generator("cpu").manual_seed(number),
        }

    return Subject("shapes", pipe, arguments)


def unet(steps: int) -> Subject:
    """A UNet with random weights and nothing around it."""
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(64, 128),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()

    def arguments(number: int) -> dict[str, Any]:
        generator = torch.Generator("cpu").manual_seed(number)
        return {"num_inference_steps": steps, "output_type": "np", "generator": generator}

    return Subject("unet", DDPMPipeline(model, DDPMScheduler()), arguments)


SUBJECTS: Mapping[str, Callable[[int], Subject]] = {"shapes": shapes, "unet": unet}


def plain(subject: Subject, pictures: int) -> None:
    """Plain diffusers, one picture after another."""
    for number in range(pictures):
        subject.pipe(**subject.arguments(number))


class HubLoop:
    """The hub with so many slots, always full while pictures are left; as in a replica, forwards are checked before."""

    def __init__(self, subject: Subject, slots: int) -> None:
        self._subject = subject
        self._slots = slots
        self._views = ViewFactory(subject.pipe)

    def seconds(self, pictures: int, clock: Clock) -> float:
        """Time for so many pictures."""
        hub = Hub(merging=self._slots > 1)
        hub.attach(self._subject.pipe)
        try:
            self._run(hub, min(2, self._slots), num_inference_steps=2)
            began_s = clock()
            self._run(hub, pictures)
            return clock() - began_s
        finally:
            hub.detach()

    def _run(self, hub: Hub, pictures: int, **changes: Any) -> None:
        left = iter(range(pictures))
        for number in itertools.islice(left, self._slots):
            hub.start(self._task(number, changes))
        while len(hub):
            for ended in hub.step():
                if ended.error is not None:
                    raise ended.error
                if (number := next(left, None)) is not None:
                    hub.start(self._task(number, changes))

    def _task(self, number: int, changes: Mapping[str, Any]) -> Task:
        view = self._views.view(lambda made: None)
        return Task(functools.partial(view, **(self._subject.arguments(number) | changes)))


def denoiser_call(subject: Subject) -> Call:
    """The last denoiser call of one picture."""
    seen: list[Call] = []

    class Recorder(Merger):
        def run(self, calls: Any) -> bool:
            if calls[0].model.phase == "step":
                seen[:] = [Call(calls[0].model, calls[0].args, calls[0].kwargs, calls[0].task)]
            return super().run(calls)

    hub = Hub()
    hub._merger = Recorder()
    hub.attach(subject.pipe)
    hub.start(Task(functools.partial(subject.pipe, **subject.arguments(0))))
    while len(hub):
        hub.step()
    hub.detach()
    return seen[0]


def bare(call: Call, pictures: int, forwards: int, clock: Clock) -> float:
    """Seconds of one forward of the denoiser for so many pictures."""
    one = call.samples(hash)
    assert one is not None
    arguments = merge([one] * pictures)
    began_s = clock()
    with torch.no_grad():
        for _ in range(forwards):
            call.model.forward(**arguments)
    return (clock() - began_s) / forwards


def overhead_us(clock: Clock, *, merging: bool, tasks: int, calls: int = 2000) -> float:
    """Microseconds the hub adds to a call, with a model that does nothing."""

    class Nothing(torch.nn.Module):
        def forward(
            self, hidden_states: torch.Tensor, timestep: Any, encoder_hidden_states: Any, return_dict: bool = True
        ) -> Any:
            return (hidden_states,)

    model = Nothing()
    latents, timestep, text = torch.zeros(1, 4, 8, 8), torch.tensor(1.0), torch.zeros(1, 77, 64)

    def loop() -> None:
        for _ in range(calls):
            model(latents, timestep, text, return_dict=False)

    def timed(run: Callable[[], None]) -> float:
        began_s = clock()
        run()
        return clock() - began_s

    def through_hub() -> None:
        for _ in range(tasks):
            hub.start(Task(loop))
        while len(hub):
            hub.step()

    direct_s = timed(loop) * tasks
    hub = Hub(merging=merging)
    hub.attach(type("Pipe", (), {"components": {"transformer": model}}))
    return (timed(through_hub) - direct_s) / (tasks * calls) * 1e6


@dataclass(frozen=True)
class Row:
    """One number of slots. Gains are speed-ups over plain diffusers (hub) and over single forwards (bare)."""

    model: str
    slots: int
    seconds_per_picture: float
    hub_gain: float
    bare_gain: float
    share_of_bare_gain: float


def measure(subject: Subject, *, pictures: int, repetitions: int, forwards: int, clock: Clock) -> list[Row]:
    """All variants in turn, `repetitions` times."""
    subject.pipe.set_progress_bar_config(disable=True)
    loops = {slots: HubLoop(subject, slots) for slots in SLOTS}
    call = denoiser_call(subject)
    plain(subject, 2)
    plain_s: list[float] = []
    hub_s: dict[int, list[float]] = {slots: [] for slots in SLOTS}
    bare_s: dict[int, list[float]] = {slots: [] for slots in SLOTS}
    for _ in range(repetitions):
        began_s = clock()
        plain(subject, pictures)
        plain_s.append(clock() - began_s)
        for slots, loop in loops.items():
            hub_s[slots].append(loop.seconds(pictures, clock))
            bare_s[slots].append(bare(call, slots, forwards, clock))
    rows = []
    for slots in SLOTS:
        gain = statistics.median(one / other for one, other in zip(plain_s, hub_s[slots], strict=True))
        limit = statistics.median(slots * one / other for one, other in zip(bare_s[1], bare_s[slots], strict=True))
        seconds = statistics.median(hub_s[slots]) / pictures
        rows.append(Row(subject.name, slots, seconds, gain, limit, gain / limit))
    return rows


def show(rows: list[Row], overheads: Mapping[str, float]) -> None:
    """Print both tables."""
    table = Table(title="gain over plain diffusers, and that of bare batched forwards")
    for heading in ("model", "slots", "s/picture", "hub", "bare", "share"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            str(row.slots),
            f"{row.seconds_per_picture:.3f}",
            f"{row.hub_gain:.3f}",
            f"{row.bare_gain:.3f}",
            f"{row.share_of_bare_gain:.2f}",
        )
    console = Console()
    console.print(table)
    for name, microseconds in overheads.items():
        console.print(f"hub, {name}: {microseconds:.0f} us per call")


def plot(rows: list[Row], path: Path) -> None:
    """Gains by slots."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == name]
        slots = [row.slots for row in own]
        (line,) = axes.plot(slots, [row.hub_gain for row in own], marker="o", label=f"{name}: hub")
        limits = [row.bare_gain for row in own]
        axes.plot(slots, limits, linestyle="--", color=line.get_color(), label=f"{name}: bare forward")
    axes.set_xscale("log", base=2)
    axes.set_xticks(SLOTS, [str(slots) for slots in SLOTS])
    axes.set_xlabel("slots")
    axes.set_ylabel("speed-up")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SUBJECTS, action="append", help="default: all")
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--forwards", type=int, default=20, help="bare forwards per repetition")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu, with one thread: on a busy machine")
    parser.add_argument("--output-dir", type=Path, help="for step_batching.json and step_batching.png")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = CLOCKS[options.clock]
    rows = []
    for name in options.model or SUBJECTS:
        rows += measure(
            SUBJECTS[name](options.steps),
            pictures=options.pictures,
            repetitions=options.repetitions,
            forwards=options.forwards,
            clock=clock,
        )
    overheads = {
        "one task, nothing shared": overhead_us(clock, merging=False, tasks=1),
        "one task, ready to share": overhead_us(clock, merging=True, tasks=1),
        "eight tasks that share": overhead_us(clock, merging=True, tasks=8),
    }
    show(rows, overheads)
    if options.output_dir is not None:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        report = {"rows": [asdict(row) for row in rows], "overhead_us": overheads, "threads": options.threads}
        (options.output_dir / "step_batching.json").write_text(json.dumps(report, indent=2) + "\n")
        plot(rows, options.output_dir / "step_batching.png")


if __name__ == "__main__":
    main()
