"""Loaded engines shared by the engine tests: each model is loaded once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from triptych.models import embedded_path


@pytest.fixture(scope="session")
def model_path(tiny_pipelines: Path) -> Callable[[str], Path]:
    """Folder of a tiny family, or of the embedded model by the name `shapes`."""

    def path(name: str) -> Path:
        return embedded_path("triptych/shapes") if name == "shapes" else tiny_pipelines / name

    return path


@pytest.fixture(scope="session")
def engine_run(model_path: Callable[[str], Path]):  # type: ignore[no-untyped-def]
    """`engine_run(name, slots=1)`: a loaded engine, the same one for the same arguments."""
    from tiny.engine_run import EngineRun

    @functools.cache
    def run(name: str, slots: int = 1) -> EngineRun:
        return EngineRun(model_path(name), slots=slots)

    return run
