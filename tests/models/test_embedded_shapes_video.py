"""The embedded clip model draws what it is asked: a handful of held-out captions, checked from pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from training.shapes_video.autoencoder import new_autoencoder
from training.shapes_video.evaluation import evaluate_clips, total
from training.shapes_video.pipeline import load_clip_pipeline
from triptych.models import embedded_path

CAPTIONS = 6
WRONG = {"motion": 1, "color": 1, "background": 1, "shape": 2, "count": 2}  # of them, at most


@pytest.fixture(scope="module")
def folder() -> Path:
    return embedded_path("triptych/shapes-video")


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:
    return load_clip_pipeline(folder)


def test_held_out_captions_come_true_as_clips(pipeline: Any) -> None:
    results, _ = evaluate_clips(pipeline, CAPTIONS, seed=21)
    for name, (good, asked) in total(results).attributes.items():
        assert good >= asked - WRONG[name], (name, results)


def test_the_autoencoder_is_the_one_that_the_recipe_sets(pipeline: Any) -> None:
    wanted = new_autoencoder().state_dict()
    for name, weight in pipeline.vae.state_dict().items():
        torch.testing.assert_close(weight, wanted[name])


def test_the_settings_stand_beside_the_weights_and_name_what_can_be_asked(folder: Path) -> None:
    settings = json.loads((folder / "triptych.json").read_text())
    defaults = settings["default_sampling_params"]
    assert settings["sizes"] == [[defaults["width"], defaults["height"]]] == [[64, 64]]
    assert settings["frame_counts"] == [defaults["num_frames"]] == [13]
