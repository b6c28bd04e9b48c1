"""`python -m training.shapes.train`: the whole recipe of `triptych/shapes`, from nothing or going on from a checkpoint.

Order: tokenizer, drawn training set, encoder (parse first), picture model, evaluation. Everything lies in one work
folder, and a run that was stopped goes on where it was when started again with the same folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.console import Console
from torch import nn

from training.shapes.answers import HEADS
from training.shapes.card import write_card
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
from training.shapes.dataset import Dataset, DatasetSize, build_dataset
from training.shapes.encoder import ParseHead, new_encoder, train_encoder
from training.shapes.evaluation import evaluate, load_results, save_results, sheet_of, show_results
from training.shapes.forms import FORMS
from training.shapes.picture import PictureTrainer
from training.shapes.pipeline import assemble, load_pipeline, new_transformer, save_pipeline
from training.shapes.progress import Course, Reporter
from training.shapes.tokenizer import build_tokenizer

__all__ = ["Recipe", "app", "train"]

ENCODER_SHARE: Final = 0.1  # of the minutes
WATCHED: Final = 4  # captions per form on a sample sheet

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Recipe:
    """Sizes of a run; the defaults make the model from nothing."""

    pictures: int = 60_000
    captions: int = 160_000
    encoder_steps: int = 2_400
    picture_steps: int = 12_000
    sheet_every: int = 500
    seed: int = 1
    minutes: float | None = None
    start: Path | None = None
    batch: int = 48
    rate: float = 1.0


def train(work: Path, recipe: Recipe, *, console: Console) -> Path:
    """Run every training part in `work`; the pipeline directory that comes out."""
    torch.manual_seed(recipe.seed)
    reporter = Reporter(console)
    tokenizer = build_tokenizer()
    dataset = _dataset(work, recipe, tokenizer, reporter)
    encoder = new_encoder(tokenizer, start=recipe.start)
    seconds = None if recipe.minutes is None else 60 * recipe.minutes
    head = ParseHead(HEADS)
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
    transformer = new_transformer(start=recipe.start)
    course = Course(recipe.picture_steps, None if seconds is None else (1 - ENCODER_SHARE) * seconds)
    return _train_pictures(work, recipe, course, (transformer, encoder, head, tokenizer), dataset, reporter)


def _dataset(work: Path, recipe: Recipe, tokenizer: object, reporter: Reporter) -> Dataset:
    size = DatasetSize(recipe.pictures, recipe.captions, recipe.seed)
    with reporter.part("drawing", recipe.captions) as bar:
        return build_dataset(work / "data", size, tokenizer, report=lambda done: reporter.count(bar, done))


def _train_pictures(
    work: Path,
    recipe: Recipe,
    course: Course,
    modules: tuple[nn.Module, nn.Module, ParseHead, object],
    dataset: Dataset,
    reporter: Reporter,
) -> Path:
    transformer, encoder, head, tokenizer = modules
    trainer = PictureTrainer(
        transformer,
        encoder,
        head,
        seed=recipe.seed + 1,
        state_file=work / "picture.pt",
        batch=recipe.batch,
        rate=recipe.rate,
    )
    pipeline = assemble(transformer, encoder, tokenizer)
    model = work / "model"

    def inspect(step: int) -> None:
        save_pipeline(pipeline, model)
        results, judged = evaluate(pipeline, dict.fromkeys(FORMS, WATCHED), seed=recipe.seed, batch=16)
        sheet_of(work / f"sheet-{step:06}.png", judged, per_form=WATCHED)
        reporter.note(f"sample sheet: {work / f'sheet-{step:06}.png'}\n{show_results(results)}")

    trainer.train(dataset, course, reporter=reporter, inspect=inspect, inspect_every=recipe.sheet_every)
    with trainer.averaged():
        save_pipeline(pipeline, model)
    return model


@app.command()
def run(
    work: Work = Path("build/shapes"),
    start: Annotated[Path | None, typer.Option("--from", help="Pipeline directory to go on from.")] = None,
    minutes: Minutes = None,
    pictures: Annotated[int, typer.Option(help="Drawn pictures.")] = Recipe.pictures,
    captions: Annotated[int, typer.Option(help="Captions for the encoder, the pictures' included.")] = Recipe.captions,
    encoder_steps: EncoderSteps = Recipe.encoder_steps,
    picture_steps: Annotated[int, typer.Option(help="Steps of `--batch` pictures.")] = Recipe.picture_steps,
    sheet_every: SheetEvery = Recipe.sheet_every,
    batch: Annotated[int, typer.Option(help="Pictures in a step.")] = Recipe.batch,
    rate: Annotated[float, typer.Option(help="Factor on the picture model's learning rates.")] = Recipe.rate,
    seed: Seed = Recipe.seed,
    threads: Threads = 2,
) -> None:
    """Train the model; what was begun in the work folder goes on."""
    quiet(threads)
    console = Console()
    begin(work, {"pictures": pictures, "captions": captions, "seed": seed, "from": start, "batch": batch, "rate": rate})
    recipe = Recipe(pictures, captions, encoder_steps, picture_steps, sheet_every, seed, minutes, start, batch, rate)
    model = train(work, recipe, console=console)
    console.print(f"model: {model}\nnext: python -m training.shapes.train judge {model}", highlight=False)


@app.command()
def judge(
    model: ModelToJudge,
    captions: Annotated[int, typer.Option(help="Held-out captions of each new form.")] = 40,
    old: Annotated[int, typer.Option(help="Held-out captions of the forms `single` and `pair` together.")] = 200,
    seed: CaptionSeed = 7,
    threads: Threads = 2,
) -> None:
    """Draw held-out captions of every form, one call each, and write results and sample sheet."""
    quiet(threads)
    console = Console()
    counts = {**dict.fromkeys(FORMS, captions), "single": old // 2, "pair": old - old // 2}
    reporter = Reporter(console)
    with reporter.part("judging", sum(counts.values())) as bar:
        results, judged = evaluate(
            load_pipeline(model), counts, seed=seed, report=lambda _: bar.advance(bar.task_ids[0])
        )
    save_results(results_file(model), results)
    sheet_of(sheet_file(model), judged)
    console.print(show_results(results), highlight=False)


@app.command()
def card(
    model: JudgedModel,
    into: Into,
    history: History,
) -> None:
    """Put the model in place with a card that shows its results."""
    quiet(1)
    save_pipeline(load_pipeline(model), into)
    results = load_results(results_file(model))
    write_card(into, results, sheet=sheet_file(model), history=history)


if __name__ == "__main__":
    app()
