"""The embedded picture model draws what it is asked: a handful of held-out captions per form, checked from pixels.

How often it is right over many captions stands in its card; these few are to notice that it got worse.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from training.shapes.evaluation import evaluate
from training.shapes.forms import FORMS
from training.shapes.pipeline import load_pipeline
from triptych.models import EMBEDDED_MODELS, embedded_path

CAPTIONS = 4
WRONG = {"inside": 2, "typo": 2}  # of them, at most; 1 of the other forms
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def folder() -> Path:
    return embedded_path("triptych/shapes")


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:
    return load_pipeline(folder)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_held_out_captions_come_true(pipeline: Any, form: str) -> None:
    results, _ = evaluate(pipeline, {form: CAPTIONS}, seed=22, batch=CAPTIONS)
    assert results[form].right >= CAPTIONS - WRONG.get(form, 1), results[form]


def test_all_embedded_weights_together_stay_below_40_megabytes(folder: Path) -> None:
    sizes = [file.stat().st_size for file in folder.parent.rglob("*") if file.is_file()]
    assert sum(sizes) < 40 * MEGABYTE


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_weights_card_and_sample_sheet_of_every_embedded_model_lie_together(name: str) -> None:
    folder = embedded_path(name)
    card = (folder / "README.md").read_text()
    assert "What it does not know" in card
    assert "wholly right" in card
    assert (folder / "samples.jpg").is_file()


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_every_card_counts_the_parameters_that_its_model_has(name: str) -> None:
    folder = embedded_path(name)
    counted = {}
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            shapes = [weights.get_slice(key).get_shape() for key in weights.keys()]  # noqa: SIM118 - no mapping
        counted[file.parent.name] = f"{sum(map(math.prod, shapes)) / 1e6:.1f}"
    row = re.compile(r"^\| ([a-z ]+) \| .*?([\d.]+) million parameters", re.MULTILINE)
    told = {part.replace(" ", "_"): number for part, number in row.findall((folder / "README.md").read_text())}
    if "autoencoder" in told:
        told["vae"] = told.pop("autoencoder")
    assert told == counted


def test_default_sampling_parameters_and_sizes_stand_beside_the_weights(folder: Path) -> None:
    settings = json.loads((folder / "triptych.json").read_text())
    defaults = settings["default_sampling_params"]
    assert settings["sizes"] == [[defaults["width"], defaults["height"]]] == [[64, 64]]
