"""The clip recipe in its short form, and that training in coefficients is training in pixels."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from rich.console import Console
from transformers import T5EncoderModel

from support.losses import Losses
from training.shapes.encoder import ParseHead
from training.shapes.evaluation import FormResult, load_results, save_results
from training.shapes.progress import Course
from training.shapes_video.captions import training_example
from training.shapes_video.card import write_clip_card
from training.shapes_video.checker import check_clip
from training.shapes_video.clip_model import ClipTrainer, new_clip_transformer, new_column_transformer, output_scale
from training.shapes_video.clips import FRAMES, render
from training.shapes_video.columns import GRID, PATTERNS, columns_of, find_patterns, unfold
from training.shapes_video.dataset import QUESTIONS, ClipDataset, ClipDatasetSize, build_clip_dataset
from training.shapes_video.encoder import build_clip_tokenizer, new_clip_encoder
from training.shapes_video.evaluation import JudgedClip, sheet_of_clips, total
from training.shapes_video.packing import pack, unpack
from training.shapes_video.train import Recipe, train
from triptych.models import embedded_path

SHORT = Recipe(paths=40, captions=1100, encoder_steps=4, clip_steps=6, sheet_every=1000, batch=4)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_clip_tokenizer()


@pytest.fixture(scope="module")
def small_set(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> ClipDataset:
    return build_clip_dataset(tmp_path_factory.mktemp("clips"), ClipDatasetSize(40, 1100, 1), tokenizer)


@pytest.mark.long
def test_the_short_recipe_makes_a_pipeline_that_diffusers_loads_and_that_draws_one_clip(tmp_path: Path) -> None:
    model = train(tmp_path, SHORT, console=Console(quiet=True))
    pipeline = DiffusionPipeline.from_pretrained(model)
    size = {"num_frames": FRAMES, "height": 64, "width": 64, "max_sequence_length": 32}
    frames = pipeline("a red star", num_inference_steps=2, output_type="np", **size).frames[0]
    assert frames.shape == (FRAMES, 64, 64, 3)


@pytest.mark.long
def test_the_loss_of_clips_falls(tmp_path: Path, tokenizer: Any, small_set: ClipDataset) -> None:
    torch.manual_seed(5)
    reporter = Losses()
    trainer = ClipTrainer(
        new_column_transformer(),
        new_clip_encoder(tokenizer),
        ParseHead(QUESTIONS),
        scale=output_scale(small_set),
        seed=2,
        state_file=tmp_path / "clip.pt",
        batch=4,
    )
    trainer.train(small_set, Course(40), reporter=reporter, inspect=lambda step: None, inspect_every=1000)
    first, last = reporter.rows[:5], reporter.rows[-5:]
    for name, part in (("clip", 0.8), ("parse", 0.95)):  # parsing weighs a tenth here: it falls more slowly
        assert sum(row[name] for row in last) < part * sum(row[name] for row in first), name


def test_the_unfolded_transformer_does_in_pixels_what_the_trained_one_does_in_coefficients() -> None:
    torch.manual_seed(3)
    patterns = find_patterns(torch.rand(2, FRAMES, 64, 64))
    scale = torch.rand(3 * PATTERNS) + 0.5
    trained, full = new_column_transformer().eval(), new_clip_transformer().eval()
    torch.nn.init.normal_(trained.proj_out.weight, std=0.1)
    torch.nn.init.normal_(trained.proj_out.bias)
    unfold(trained, patterns, scale, full)
    coefficients = torch.randn(1, 3, PATTERNS, 1, GRID, GRID)
    shares = torch.einsum("nckthw,kv->nchwv", coefficients, patterns)
    pixels = shares.reshape(1, 3, GRID, GRID, FRAMES, 8, 8).permute(0, 1, 4, 2, 5, 3, 6).reshape(1, 3, FRAMES, 64, 64)
    call = {"timestep": torch.tensor([500.0]), "encoder_hidden_states": torch.randn(1, 5, 128), "return_dict": False}
    with torch.no_grad():
        wanted = trained(coefficients.flatten(1, 2), **call)[0] * scale.view(1, -1, 1, 1, 1)
        latents = full(pack(pixels), **call)[0]
    drawn = columns_of(unpack(latents)[0]) @ patterns.T
    torch.testing.assert_close(drawn.permute(0, 3, 1, 2).flatten(0, 1), wanted[0, :, 0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(latents[:, 24:], pack(pixels)[:, 24:])


def test_a_batch_holds_the_coefficients_of_its_clips(small_set: ClipDataset) -> None:
    batch = small_set.examples(torch.Generator().manual_seed(1), 3)
    assert batch.samples is not None
    columns = batch.samples.view(3, 3, PATTERNS, GRID, GRID).permute(0, 1, 3, 4, 2) @ small_set.patterns
    assert columns.abs().max() < 1.6  # colours, with what is lost beside strong edges
    corner = columns[:, :, 0, 0]
    assert corner.std(-1).max() < 0.05  # no shape reaches the corner


def test_the_clip_encoder_takes_over_the_picture_encoder_unchanged(tokenizer: Any) -> None:
    start = embedded_path("triptych/shapes")
    ours = new_clip_encoder(tokenizer, start=start).eval()
    theirs = T5EncoderModel.from_pretrained(start / "text_encoder")
    known = tokenizer("red star", return_tensors="pt")["input_ids"]
    pictures = DiffusionPipeline.from_pretrained(start).tokenizer("red star", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(ours(known).last_hidden_state, theirs(pictures).last_hidden_state)


def test_results_sheet_and_card_come_from_judged_clips(tmp_path: Path) -> None:
    rng = random.Random(2)
    results: dict[str, FormResult] = {}
    judged = []
    for _ in range(3):
        example = training_example(rng)
        video = render(example.clip)
        judged.append(JudgedClip(example, video, check_clip(video, example)))
        results.setdefault(example.clip.path.motion, FormResult()).add(judged[-1].verdict)
    assert total(results).right == 3
    save_results(tmp_path / "results.json", results)
    sheet_of_clips(tmp_path / "sheet.png", judged)
    read = load_results(tmp_path / "results.json")
    write_clip_card(tmp_path, read, sheet=tmp_path / "sheet.png", history="Not trained.")
    card = (tmp_path / "README.md").read_text()
    assert "| all | 3/3 |" in card
    assert "Not trained." in card
