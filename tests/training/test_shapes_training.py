"""The recipe in its short form: it learns, can be stopped and resumed, and makes what diffusers loads and serves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from rich.console import Console
from rich.progress import Progress
from typer import Typer
from typer.testing import CliRunner

from support.losses import Losses
from training.shapes.answers import HEADS
from training.shapes.card import SHEET, write_card
from training.shapes.dataset import Dataset, DatasetSize, build_dataset
from training.shapes.encoder import ParseHead, new_encoder, train_encoder
from training.shapes.evaluation import evaluate, load_results, save_results, sheet_of
from training.shapes.muon import orthogonalize
from training.shapes.picture import PictureTrainer
from training.shapes.pipeline import assemble, draw, load_pipeline, new_transformer
from training.shapes.progress import Course, load_state, save_state
from training.shapes.tokenizer import build_tokenizer
from training.shapes.train import Recipe, train
from training.shapes.train import app as shapes_app
from training.shapes_video.train import app as clips_app
from triptych.models import embedded_path

SHORT = Recipe(pictures=64, captions=1200, encoder_steps=8, picture_steps=24, sheet_every=1000, batch=8)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="module")
def small_set(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Dataset:
    return build_dataset(tmp_path_factory.mktemp("set"), DatasetSize(64, 1100, 1), tokenizer)


def picture_trainer(tokenizer: Any, state_file: Path) -> PictureTrainer:
    torch.manual_seed(5)
    return PictureTrainer(
        new_transformer(), new_encoder(tokenizer), ParseHead(HEADS), seed=2, state_file=state_file, batch=4
    )


@pytest.mark.long
def test_the_short_recipe_makes_a_pipeline_that_diffusers_loads_and_that_draws_one_picture(tmp_path: Path) -> None:
    model = train(tmp_path, SHORT, console=Console(quiet=True))
    pipeline = DiffusionPipeline.from_pretrained(model)
    picture = pipeline("a red circle", num_inference_steps=2, use_resolution_binning=False).images[0]
    assert picture.size == (64, 64)
    assert (tmp_path / "encoder.pt").is_file()
    assert (tmp_path / "picture.pt").is_file()


@pytest.mark.long
def test_the_loss_falls(tmp_path: Path, tokenizer: Any, small_set: Dataset) -> None:
    reporter = Losses()
    trainer = picture_trainer(tokenizer, tmp_path / "picture.pt")
    trainer.train(small_set, Course(40), reporter=reporter, inspect=lambda step: None, inspect_every=1000)
    first, last = reporter.rows[:5], reporter.rows[-5:]
    for name, part in (("picture", 0.8), ("parse", 0.9)):  # parsing weighs a twentieth here: it falls more slowly
        assert sum(row[name] for row in last) < part * sum(row[name] for row in first)


@pytest.mark.long
def test_a_stopped_run_goes_on_to_the_same_weights_as_one_that_was_not(
    tmp_path: Path, tokenizer: Any, small_set: Dataset
) -> None:
    def run(state_file: Path, *, stop: bool) -> PictureTrainer:
        def inspect(step: int) -> None:
            if stop:
                raise KeyboardInterrupt

        trainer = picture_trainer(tokenizer, state_file)
        trainer.train(small_set, Course(6), reporter=Losses(), inspect=inspect, inspect_every=3)
        return trainer

    whole = run(tmp_path / "whole.pt", stop=False)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped.pt", stop=True)
    resumed = run(tmp_path / "stopped.pt", stop=False)
    with whole.averaged(), resumed.averaged():
        for a, b in zip(whole.transformer.parameters(), resumed.transformer.parameters(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.long
def test_an_encoder_that_was_stopped_goes_on_to_the_same_weights_as_one_that_was_not(
    tmp_path: Path, tokenizer: Any, small_set: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.shapes.encoder.SAVE_EVERY", 1)

    class Stopping(Losses):
        def step(self, bar: Progress, course: Course, losses: dict[str, float]) -> None:
            if course.step == 2:
                raise KeyboardInterrupt

    def run(name: str, reporter: Losses) -> Any:
        torch.manual_seed(5)
        encoder, head = new_encoder(tokenizer), ParseHead(HEADS)
        options = {"state_file": tmp_path / name, "seed": 2, "warm": False, "reporter": reporter}
        train_encoder(encoder, head, small_set, Course(3), **options)  # type: ignore[arg-type]
        return encoder

    whole = run("whole.pt", Losses())
    with pytest.raises(KeyboardInterrupt):
        run("stopped.pt", Stopping())
    resumed = run("stopped.pt", Losses())
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_run_goes_on_in_the_number_format_that_it_began_with(tmp_path: Path, tokenizer: Any) -> None:
    begun, resumed = (picture_trainer(tokenizer, tmp_path / "picture.pt") for _ in range(2))
    begun._half, resumed._half = True, False
    begun._save(Course(2, step=1))
    resumed._resume(Course(2))
    assert resumed._half


@pytest.mark.parametrize("app", [shapes_app, clips_app])
def test_a_work_folder_is_not_gone_on_with_by_another_recipe(
    tmp_path: Path, app: Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    for package in ("shapes", "shapes_video"):
        monkeypatch.setattr(f"training.{package}.train.train", lambda work, recipe, console: trained.append(recipe))
    call = ["run", "--work", str(tmp_path / "work"), "--threads", "1"]
    for more in ([], ["--minutes", "1"]):
        assert CliRunner().invoke(app, [*call, *more]).exit_code == 0
    for name, value in (("seed", "2"), ("from", "elsewhere"), ("captions", "70000")):
        refused = CliRunner().invoke(app, [*call, f"--{name}", value])
        assert refused.exit_code == 2
        assert re.search(rf"begun with\W+{name}", refused.output)
    assert len(trained) == 2


def test_a_set_with_more_pictures_than_captions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1100 captions leave 100 to train on.*101 pictures"):
        DatasetSize(pictures=101, captions=1100, seed=1)


def test_an_encoder_taken_from_a_checkpoint_takes_a_new_vocabulary(tokenizer: Any) -> None:
    start = embedded_path("triptych/shapes")
    encoder = new_encoder(tokenizer, start=start)
    assert encoder.shared.weight.shape[0] == len(tokenizer)
    assert torch.isfinite(encoder.shared.weight).all()


def test_pictures_drawn_together_equal_pictures_drawn_alone(tokenizer: Any) -> None:
    torch.manual_seed(1)
    transformer = new_transformer()
    torch.nn.init.normal_(transformer.final_layer.linear.weight, std=0.1)
    pipeline = assemble(transformer.eval(), new_encoder(tokenizer).eval(), tokenizer)
    captions, seeds = ["a red circle", "two blue stars"], [4, 9]
    together = draw(pipeline, captions, seeds, steps=3)
    for caption, seed, picture in zip(captions, seeds, together, strict=True):
        generator = torch.Generator().manual_seed(seed)
        alone = pipeline(
            caption,
            num_inference_steps=3,
            guidance_scale=3.0,
            generator=generator,
            use_resolution_binning=False,
            output_type="np",
        ).images[0]
        assert np.abs(alone * 255 - picture).max() <= 1
    assert np.abs(together[0].astype(int) - together[1]).max() > 1


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(1)
    for shape in ((3, 24, 40), (2, 40, 24)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert values.min() > 0.5
        assert values.max() < 1.4


def test_a_course_ends_by_steps_or_by_time_and_its_rate_ends_at_zero() -> None:
    by_steps, by_time = Course(4), Course(1000, seconds=10.0)
    for _ in range(4):
        by_steps.advance(100.0)
        by_time.advance(3.0)
    assert by_steps.done
    assert by_time.done
    assert by_time.rate(warm_up=1, decay=0.5) == 0
    assert Course(10).rate(warm_up=5, decay=0.5) == pytest.approx(0.2)


def test_states_are_written_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    assert load_state(path) is None
    save_state(path, {"step": 1})
    save_state(path, {"step": 2})
    assert load_state(path) == {"step": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]


def test_results_sheet_and_card_come_from_judged_pictures(tmp_path: Path) -> None:
    start = embedded_path("triptych/shapes")
    results, judged = evaluate(load_pipeline(start), {"single": 1, "inside": 1}, seed=1)
    assert [result.asked for result in results.values()] == [1, 1]
    save_results(tmp_path / "results.json", results)
    sheet_of(tmp_path / "sheet.png", judged)
    write_card(tmp_path, load_results(tmp_path / "results.json"), sheet=tmp_path / "sheet.png", history="Not trained.")
    card = (tmp_path / "README.md").read_text()
    assert "| single |" in card
    assert "Not trained." in card
    assert (tmp_path / SHEET).stat().st_size < 200_000
