"""The embedded picture model draws what it is asked: a handful of held-out captions per form, checked from pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from training.shapes.evaluation import evaluate
from training.shapes.pipeline import load_pipeline
from triptych.models import embedded_path

CAPTIONS = 6
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def folder() -> Path:
    path = embedded_path("triptych/shapes")
    assert path is not None
    return path


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:
    return load_pipeline(folder)


@pytest.mark.parametrize("form", ["single", "pair"])
def test_held_out_captions_come_true(pipeline: Any, form: str) -> None:
    results, _ = evaluate(pipeline, {form: CAPTIONS}, seed=21, batch=CAPTIONS)
    assert results[form].right >= CAPTIONS - 1, results[form]


def test_all_embedded_weights_together_stay_below_40_megabytes(folder: Path) -> None:
    sizes = [file.stat().st_size for file in folder.parent.rglob("*") if file.is_file()]
    assert sum(sizes) < 40 * MEGABYTE


def test_default_sampling_parameters_and_sizes_stand_beside_the_weights(folder: Path) -> None:
    settings = json.loads((folder / "triptych.json").read_text())
    defaults = settings["default_sampling_params"]
    assert settings["sizes"] == [[defaults["width"], defaults["height"]]] == [[64, 64]]
    assert "What it does not know" in (folder / "README.md").read_text()
