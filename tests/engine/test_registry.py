"""Finding engines by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.engine.registry import engine_entry, engine_names, import_engine
from triptych.engine.simulated import SimulatedEngine
from triptych.errors import ConfigError


def test_built_in_engines_are_found_and_only_diffusers_preloads_torch() -> None:
    assert {"diffusers", "simulated"} <= set(engine_names())
    assert import_engine(engine_entry("simulated")) is SimulatedEngine
    assert "triptych.engine.preload_diffusers" not in engine_entry("simulated").preload
    assert "triptych.engine.preload_diffusers" in engine_entry("diffusers").preload
    assert engine_entry("diffusers").preload[0] == engine_entry("simulated").preload[0] == "triptych.engine.preload"


def test_an_installed_package_adds_an_engine_and_its_module_is_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "fancy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fancy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[triptych.engines]\nfancy = fancy_engine:It\nsimulated = fancy_engine:No\n")
    (tmp_path / "fancy_engine.py").write_text("It = 'the factory'\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry = engine_entry("fancy")
    assert entry.preload[-1] == "fancy_engine"
    assert import_engine(entry) == "the factory"
    assert engine_entry("simulated").factory == "triptych.engine.simulated:SimulatedEngine"  # a built-in name wins


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"found 'diffuser'; wanted one of .*diffusers.*simulated"):
        engine_entry("diffuser")
