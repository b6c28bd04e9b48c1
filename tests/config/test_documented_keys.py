"""The user's page names every key that a stage file may hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from triptych.config.switches import CompileConfig, NamedSwitch, QuantizationConfig
from triptych.config.tree import EngineArgs, ParallelConfig, RuntimeConfig, SimulatedConfig, StageConfig, StageFile

PAGE = re.sub(
    r"```.*?```", "", (Path(__file__).parents[2] / "docs/diffusion_multi_replica.md").read_text(), flags=re.DOTALL
)
NAMES = {name for code in re.findall(r"`([^`]+)`", PAGE) for name in re.findall(r"\w+", code)}


@pytest.mark.parametrize(
    "section",
    [
        *(StageFile, StageConfig, RuntimeConfig, EngineArgs, ParallelConfig, SimulatedConfig),
        *(CompileConfig, QuantizationConfig, NamedSwitch),
    ],
)
def test_every_key_of_a_stage_file_is_on_the_page(section: type[BaseModel]) -> None:
    assert set(section.model_fields) - NAMES == set()


def test_every_section_of_the_tree_is_looked_at() -> None:
    from triptych.config import tree

    sections = {name for name, kind in vars(tree).items() if isinstance(kind, type) and issubclass(kind, BaseModel)}
    assert sections - {"BaseModel", "Section"} == {
        *("StageFile", "StageConfig", "RuntimeConfig", "EngineArgs", "ParallelConfig", "SimulatedConfig"),
    }
