"""What a training reports, kept for a test to look at."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress

from training.shapes.progress import Course, Reporter


class Losses(Reporter):
    """Keeps every step's losses."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.rows: list[dict[str, float]] = []

    def step(self, bar: Progress, course: Course, losses: dict[str, float]) -> None:
        self.rows.append(losses)
