"""Draw held-out captions as a server would, one call each, and let the checker judge; results are kept per motion."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from training.shapes.evaluation import FormResult, labelled
from training.shapes.pipeline import save_sheet
from training.shapes_video.captions import Example, held_out_example
from training.shapes_video.checker import check_clip
from training.shapes_video.clips import FRAMES, MOTIONS, Video
from training.shapes_video.pipeline import draw_clip

__all__ = ["JudgedClip", "evaluate_clips", "sheet_of_clips", "total"]

SHOWN: Final = range(0, FRAMES, 2)  # frames of a clip on a sheet


@dataclass(frozen=True, slots=True)
class JudgedClip:
    """One drawn caption."""

    example: Example
    video: Video
    verdict: dict[str, bool]

    @property
    def label(self) -> str:
        """The caption, with what is wrong."""
        return labelled(self.example.caption.text, self.verdict)


def evaluate_clips(
    pipeline: Any, count: int, *, seed: int, report: Callable[[JudgedClip], None] = lambda judged: None
) -> tuple[dict[str, FormResult], list[JudgedClip]]:
    """Draw so many captions and judge them."""
    rng = random.Random(f"clips {seed}")
    results = {motion: FormResult() for motion in MOTIONS}
    judged = []
    for k in range(count):
        example = held_out_example(rng)
        video = draw_clip(pipeline, example.caption.text, k)
        outcome = JudgedClip(example, video, check_clip(video, example))
        results[example.clip.path.motion].add(outcome.verdict)
        judged.append(outcome)
        report(outcome)
    return {motion: result for motion, result in results.items() if result.asked}, judged


def total(results: dict[str, FormResult]) -> FormResult:
    """All motions together."""
    whole = FormResult()
    for result in results.values():
        whole.asked += result.asked
        whole.right += result.right
        for name, (good, asked) in result.attributes.items():
            counts = whole.attributes.setdefault(name, [0, 0])
            counts[0] += good
            counts[1] += asked
    return whole


def sheet_of_clips(path: Path, judged: Sequence[JudgedClip]) -> None:
    """A contact sheet, every other frame of one clip in a row."""
    frames = [outcome.video[k] for outcome in judged for k in SHOWN]
    labels = [outcome.label if k == 0 else "" for outcome in judged for k in SHOWN]
    save_sheet(path, frames, labels, columns=len(SHOWN))
