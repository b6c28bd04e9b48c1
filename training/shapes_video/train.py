"""`python -m training.shapes_video.train`: the whole recipe of `triptych/shapes-video`.

Order: tokenizer, drawn training set, encoder (parse first), clip model, evaluation. Everything lies in one work
folder, and a run that was stopped goes on where it was when started again with the same folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console

from training.shapes.command_line import (
    CaptionSeed,
    EncoderSteps,
    History,
    Into,
    JudgedModel,
    Minutes,
    ModelToJudge,
    Seed,
    SheetEvery,
    Threads,
    Work,
    begin,
    quiet,
    results_file,
    sheet_file,
)
from training.shapes.encoder import ParseHead, train_encoder
from training.shapes.evaluation import load_results, save_results, show_results
from training.shapes.pipeline import save_pipeline
from training.shapes.progress import Course, Reporter
from training.shapes_video.card import write_clip_card
from training.shapes_video.clip_model import (
    ClipTrainer,
    new_clip_transformer,
    new_column_transformer,
    output_scale,
)
from training.shapes_video.columns import unfold
from training.shapes_video.dataset import QUESTIONS, ClipDataset, ClipDatasetSize, build_clip_dataset
from training.shapes_video.encoder import build_clip_tokenizer, new_clip_encoder
from training.shapes_video.evaluation import evaluate_clips, sheet_of_clips, total
from training.shapes_video.pipeline import assemble_clip_pipeline, load_clip_pipeline

__all__ = ["Recipe", "app", "train"]

ENCODER_SHARE: Final = 0.1  # of the minutes
WATCHED: Final = 12  # captions on a sample sheet
ON_CARD: Final = 16

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Recipe:
    """Sizes of a run; the defaults make the model from nothing, or from the picture model's encoder (`start`)."""

    paths: int = 2_000
    captions: int = 60_000
    encoder_steps: int = 1_600
    clip_steps: int = 6_000
    sheet_every: int = 500
    seed: int = 1
    minutes: float | None = None
    start: Path | None = None
    batch: int = 32
    rate: float = 1.2


def train(work: Path, recipe: Recipe, *, console: Console) -> Path:
    """Run every training part in `work`; the pipeline directory that comes out."""
    torch.manual_seed(recipe.seed)
    reporter = Reporter(console)
    tokenizer = build_clip_tokenizer()
    with reporter.part("drawing", recipe.paths) as bar:
        size = ClipDatasetSize(recipe.paths, recipe.captions, recipe.seed)
        dataset = build_clip_dataset(work / "data", size, tokenizer, report=lambda done: reporter.count(bar, done))
    encoder, head = new_clip_encoder(tokenizer, start=recipe.start), ParseHead(QUESTIONS)
    seconds = None if recipe.minutes is None else 60 * recipe.minutes
    train_encoder(
        encoder,
        head,
        dataset,
        Course(recipe.encoder_steps, None if seconds is None else ENCODER_SHARE * seconds),
        state_file=work / "encoder.pt",
        seed=recipe.seed,
        warm=recipe.start is not None,
        reporter=reporter,
    )
    course = Course(recipe.clip_steps, None if seconds is None else (1 - ENCODER_SHARE) * seconds)
    return _train_clips(work, recipe, course, (encoder, head, tokenizer), dataset, reporter)


def _train_clips(
    work: Path,
    recipe: Recipe,
    course: Course,
    text: tuple[Any, ParseHead, Any],
    dataset: ClipDataset,
    reporter: Reporter,
) -> Path:
    encoder, head, tokenizer = text
    scale = output_scale(dataset)
    trainer = ClipTrainer(
        new_column_transformer(),
        encoder,
        head,
        scale=scale,
        seed=recipe.seed + 1,
        state_file=work / "clip.pt",
        batch=recipe.batch,
        rate=recipe.rate,
    )
    pipeline = assemble_clip_pipeline(new_clip_transformer().eval(), encoder, tokenizer)
    model = work / "model"

    def save() -> None:
        unfold(trainer.transformer, dataset.patterns, scale, pipeline.transformer)
        save_pipeline(pipeline, model)

    def inspect(step: int) -> None:
        save()
        results, judged = evaluate_clips(pipeline, WATCHED, seed=recipe.seed)
        sheet = work / f"sheet-{step:06}.png"
        sheet_of_clips(sheet, judged)
        reporter.note(f"sample sheet: {sheet}\n{show_results({'all': total(results)})}")

    trainer.train(dataset, course, reporter=reporter, inspect=inspect, inspect_every=recipe.sheet_every)
    with trainer.averaged():
        save()
    return model


@app.command()
def run(
    work: Work = Path("build/shapes-video"),
    start: Annotated[
        Path | None, typer.Option("--from", help="Pipeline directory whose encoder to go on from.")
    ] = None,
    minutes: Minutes = None,
    paths: Annotated[int, typer.Option(help="Drawn paths.")] = Recipe.paths,
    captions: Annotated[int, typer.Option(help="Captions, each of one of the paths in colours.")] = Recipe.captions,
    encoder_steps: EncoderSteps = Recipe.encoder_steps,
    clip_steps: Annotated[int, typer.Option(help="Steps of `--batch` clips.")] = Recipe.clip_steps,
    sheet_every: SheetEvery = Recipe.sheet_every,
    batch: Annotated[int, typer.Option(help="Clips in a step.")] = Recipe.batch,
    rate: Annotated[float, typer.Option(help="Factor on the clip model's learning rates.")] = Recipe.rate,
    seed: Seed = Recipe.seed,
    threads: Threads = 2,
) -> None:
    """Train the model; what was begun in the work folder goes on."""
    quiet(threads)
    console = Console()
    begin(work, {"paths": paths, "captions": captions, "seed": seed, "from": start, "batch": batch, "rate": rate})
    recipe = Recipe(paths, captions, encoder_steps, clip_steps, sheet_every, seed, minutes, start, batch, rate)
    model = train(work, recipe, console=console)
    console.print(f"model: {model}\nnext: python -m training.shapes_video.train judge {model}", highlight=False)


@app.command()
def judge(
    model: ModelToJudge,
    captions: Annotated[int, typer.Option(help="Held-out captions.")] = 100,
    seed: CaptionSeed = 7,
    threads: Threads = 2,
) -> None:
    """Draw held-out captions, one call each, and write results and sample sheet."""
    quiet(threads)
    console = Console()
    reporter = Reporter(console)
    with reporter.part("judging", captions) as bar:
        results, judged = evaluate_clips(
            load_clip_pipeline(model), captions, seed=seed, report=lambda _: bar.advance(bar.task_ids[0])
        )
    save_results(results_file(model), results)
    sheet_of_clips(sheet_file(model), judged[:ON_CARD])
    console.print(show_results({**results, "all": total(results)}), highlight=False)


@app.command()
def card(
    model: JudgedModel,
    into: Into,
    history: History,
) -> None:
    """Put the model in place with a card that shows its results."""
    quiet(1)
    save_pipeline(load_clip_pipeline(model), into)
    results = load_results(results_file(model))
    write_clip_card(into, results, sheet=sheet_file(model), history=history)


if __name__ == "__main__":
    app()
