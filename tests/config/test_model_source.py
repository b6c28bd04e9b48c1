"""Fetching and measuring models, without the network."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from triptych.config.model_source import (
    ModelSource,
    cached_path,
    fetch_model,
    resolve_model,
    weight_bytes,
    weight_dtypes,
)
from triptych.errors import ConfigError

INDEX = {
    "_class_name": "SomePipeline",
    "transformer": ["diffusers", "Transformer"],
    "text_encoder": ["transformers", "TextEncoder"],
    "safety_checker": [None, None],
    "sample_size": [64, 64, 64],
}
HUB = ModelSource("hub", "org/name")


def write_files(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(json.dumps(INDEX).encode() if name == "model_index.json" else b"0123456789")


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that stands for a hub repository; the functions of the library copy from it."""
    remote, local = tmp_path / "remote", tmp_path / "local"
    write_files(remote, "model_index.json")

    def snapshot_download(
        repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str], revision: str | None, **_: Any
    ) -> str:
        assert (repo_id, revision) == ("org/name", "main")
        for path in remote.rglob("*.*"):
            name = path.relative_to(remote).as_posix()
            allowed = any(fnmatch(name, pattern) for pattern in allow_patterns)
            if allowed and not any(fnmatch(name, pattern) for pattern in ignore_patterns):
                write_files(local, name)
        return str(local)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(remote / "model_index.json"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return remote


def fetched(path: str) -> set[str]:
    return {file.relative_to(path).as_posix() for file in Path(path).rglob("*.*")}


def test_only_what_the_pipeline_loads_is_fetched(repository: Path) -> None:
    write_files(
        repository,
        "transformer/config.json",
        "transformer/model-00001-of-00002.safetensors",
        "transformer/model.fp16.safetensors",
        "transformer/model.bin",
        "text_encoder/flax_model.msgpack",
        "safety_checker/model.safetensors",
        "whole.safetensors",
    )
    assert fetched(fetch_model(HUB, "main")) == {
        "model_index.json",
        "transformer/config.json",
        "transformer/model-00001-of-00002.safetensors",
    }


def test_old_repositories_have_their_bin_files_fetched(repository: Path) -> None:
    write_files(repository, "transformer/model.bin", "transformer/model.fp16.bin")
    assert fetched(fetch_model(HUB, "main")) == {"model_index.json", "transformer/model.bin"}


def test_a_failed_fetch_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub\nsecond line")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ConfigError, match=r"^model org/name: cannot be fetched at revision v1: cannot reach the hub;"):
        fetch_model(HUB, "v1")
    assert cached_path(HUB, None) is None


def test_what_lies_on_disk_is_not_fetched(tmp_path: Path) -> None:
    write_files(tmp_path, "model_index.json")
    source = resolve_model(str(tmp_path), where="MODEL")
    assert fetch_model(source, None) == cached_path(source, None) == str(tmp_path)
    assert fetch_model(ModelSource("none", "simulated"), None) == "simulated"


def test_weights_are_counted_once_in_the_format_that_is_loaded(tmp_path: Path) -> None:
    write_files(tmp_path, "model_index.json")
    assert weight_bytes(str(tmp_path)) is None
    write_files(tmp_path, "transformer/a.safetensors", "transformer/b.safetensors", "transformer/a.bin")
    write_files(tmp_path, "transformer/a.fp16.safetensors", "text_encoder/model.bin", "other/x.safetensors")
    assert weight_bytes(str(tmp_path)) == 30


@pytest.mark.parametrize("index", ["{", "[]", "\xff"])
def test_an_unreadable_index_is_told(tmp_path: Path, index: str) -> None:
    (tmp_path / "model_index.json").write_bytes(index.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"^MODEL: model_index\.json cannot be read: .*found"):
        resolve_model(str(tmp_path), where="MODEL")


def test_the_embedded_picture_model_is_in_the_package() -> None:
    source = resolve_model("triptych/shapes", where="MODEL")
    assert source.kind == "embedded"
    assert source.path is not None
    assert (weight_bytes(source.path) or 0) > 10_000_000


def test_types_on_disk_are_those_of_the_floating_point_weights_that_are_loaded(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    write_files(tmp_path, "model_index.json", "text_encoder/model.bin")
    assert weight_dtypes(str(tmp_path)) == frozenset()
    folder = tmp_path / "transformer"
    folder.mkdir()
    tensors = {"weight": np.zeros(2, np.float32), "steps": np.zeros(2, np.int64)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({"weight": np.zeros(2, np.float16)}, folder / "model.fp16.safetensors")
    assert weight_dtypes(str(tmp_path)) == {"F32"}
    save_file({"weight": np.zeros(2, np.float16)}, folder / "more.safetensors")
    assert weight_dtypes(str(tmp_path)) == {"F32", "F16"}


def test_a_file_that_is_no_safetensors_has_no_type(tmp_path: Path) -> None:
    write_files(tmp_path, "model_index.json", "transformer/model.safetensors", "text_encoder/model.safetensors")
    (tmp_path / "transformer/model.safetensors").write_bytes(b"")
    assert weight_dtypes(str(tmp_path)) == frozenset()
