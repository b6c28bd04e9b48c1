"""Draw held-out captions of every form as a server would, one call each, and let the checker judge.

The outcome is a plain table (form, right, asked, attributes) that the model card shows and a run can be compared by.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.shapes.checker import check
from training.shapes.drawing import Picture
from training.shapes.forms import FORMS, Example, held_out_example
from training.shapes.pipeline import draw, save_sheet

__all__ = ["FormResult", "Judged", "evaluate", "labelled", "load_results", "save_results", "sheet_of", "show_results"]


@dataclass(slots=True)
class FormResult:
    """Captions of one form: how many were asked, wholly right, and right per attribute (right, asked)."""

    asked: int = 0
    right: int = 0
    attributes: dict[str, list[int]] = field(default_factory=dict)

    def add(self, verdict: dict[str, bool]) -> None:
        """Count one picture."""
        self.asked += 1
        self.right += verdict["all"]
        for name, good in verdict.items():
            if name != "all":
                counts = self.attributes.setdefault(name, [0, 0])
                counts[0] += good
                counts[1] += 1


def labelled(caption: str, verdict: dict[str, bool]) -> str:
    """A caption for a sample sheet, with what is wrong in what was drawn."""
    wrong = [name for name, good in verdict.items() if not good and name != "all"]
    return caption[:84] + (f" [NOT {', '.join(wrong)}]" if wrong else "")


@dataclass(frozen=True, slots=True)
class Judged:
    """One drawn caption."""

    example: Example
    picture: Picture
    verdict: dict[str, bool]

    @property
    def label(self) -> str:
        """The caption, with what is wrong."""
        return labelled(self.example.caption.text, self.verdict)


def evaluate(
    pipeline: Any,
    counts: dict[str, int],
    *,
    seed: int,
    batch: int = 1,
    report: Callable[[Judged], None] = lambda judged: None,
) -> tuple[dict[str, FormResult], list[Judged]]:
    """Draw so many captions of each form; `batch` 1 makes every picture alone, as a request would."""
    results, judged = {}, []
    for form in FORMS:
        rng = random.Random(f"{form} {seed}")
        examples = [held_out_example(rng, form) for _ in range(counts.get(form, 0))]
        results[form] = FormResult()
        for start in range(0, len(examples), batch):
            chunk = examples[start : start + batch]
            pictures = draw(pipeline, [e.caption.text for e in chunk], [start + k for k in range(len(chunk))])
            for example, picture in zip(chunk, pictures, strict=True):
                outcome = Judged(example, picture, check(picture, example.demand))
                results[form].add(outcome.verdict)
                judged.append(outcome)
                report(outcome)
    return {form: result for form, result in results.items() if result.asked}, judged


def show_results(results: dict[str, FormResult]) -> str:
    """One line per form."""
    lines = []
    for form, result in results.items():
        parts = "  ".join(f"{name} {good}/{asked}" for name, (good, asked) in result.attributes.items())
        lines.append(f"{form:<26}{result.right:>4}/{result.asked:<4}{result.right / result.asked:>5.0%}   {parts}")
    return "\n".join(lines)


def save_results(path: Path, results: dict[str, FormResult]) -> None:
    """Write the table as JSON."""
    rows = {form: {"asked": r.asked, "right": r.right, "attributes": r.attributes} for form, r in results.items()}
    path.write_text(json.dumps(rows, indent=1) + "\n")


def load_results(path: Path) -> dict[str, FormResult]:
    """Read what `save_results` wrote."""
    return {form: FormResult(**row) for form, row in json.loads(path.read_text()).items()}


def sheet_of(path: Path, judged: Sequence[Judged], *, per_form: int = 4) -> None:
    """A contact sheet with the first pictures of every form, wrong ones included."""
    shown: list[Judged] = []
    for form in FORMS:
        shown += [outcome for outcome in judged if outcome.example.form == form][:per_form]
    save_sheet(path, [outcome.picture for outcome in shown], [outcome.label for outcome in shown])
