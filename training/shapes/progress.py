"""The course of one training part: how far it is by steps or by time, its learning rates, its state file and its bar.

A part ends after its steps or, when `--minutes` is given, after its share of them, whichever comes first; the
learning rate follows the same fraction, so that a shortened run still ends with a small one. State files are written
beside the old one and renamed over it, so a stopped run goes on from the last complete file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Course", "Reporter", "load_state", "save_state", "step_generator"]


@dataclass(slots=True)
class Course:
    """Steps and seconds spent, against those allowed; `seconds` None sets no limit of time."""

    steps: int
    seconds: float | None = None
    step: int = 0
    used_s: float = 0.0

    @property
    def fraction(self) -> float:
        """0 at the start, 1 at the end."""
        by_time = self.used_s / self.seconds if self.seconds is not None else 0.0
        return min(1.0, max(self.step / self.steps, by_time))

    @property
    def done(self) -> bool:
        """Whether no step is left."""
        return self.fraction >= 1.0

    def rate(self, *, warm_up: int, decay: float) -> float:
        """Share of the full learning rate: up over `warm_up` steps, down to 0 over the last `decay` of the course."""
        return min(1.0, (self.step + 1) / warm_up) * min(1.0, (1 - self.fraction) / decay)

    def advance(self, seconds: float) -> None:
        """One step that took so long."""
        self.step += 1
        self.used_s += seconds


def step_generator(seed: int, step: int) -> torch.Generator:
    """The random numbers of one step: the same again when a run is resumed there."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state file in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".writing")
    torch.save(state, unfinished)
    unfinished.replace(path)


def load_state(path: Path) -> dict[str, Any] | None:
    """The state that `save_state` wrote, or None."""
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


class Reporter:
    """A progress bar on a terminal; elsewhere a line every `every` steps."""

    def __init__(self, console: Console, *, every: int = 100) -> None:
        self._console = console
        self._every = every
        self._recent: deque[dict[str, float]] = deque(maxlen=every)

    @contextmanager
    def part(self, title: str, total: int) -> Iterator[Progress]:
        """The bar of one part; add the task yourself."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as bar:
            bar.add_task(title, total=total)
            yield bar

    def count(self, bar: Progress, done: int) -> None:
        """Move the bar of a part that has no losses."""
        bar.update(bar.task_ids[0], completed=done)

    def step(self, bar: Progress, course: Course, losses: dict[str, float]) -> None:
        """Note a step's losses; shows their mean over the last `every` steps."""
        self._recent.append(losses)
        self.count(bar, course.step)
        if course.step % self._every == 0 or course.done:
            means = {name: sum(row[name] for row in self._recent) / len(self._recent) for name in losses}
            shown = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
            self._console.print(f"step {course.step}  {course.used_s:.0f} s  {shown}", highlight=False)
            self._recent.clear()

    def note(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, highlight=False)
