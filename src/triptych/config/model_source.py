"""Where weights come from: a local diffusers directory, a Hugging Face id, or a model inside the package.

`resolve_model` decides by name alone and touches no network; `fetch_model` brings a hub model to disk once, before the
replicas start; `weight_bytes` and `weight_dtypes` tell what lies on disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from triptych.errors import ConfigError
from triptych.models import EMBEDDED_MODELS, embedded_path

__all__ = ["ModelSource", "cached_path", "fetch_model", "resolve_model", "weight_bytes", "weight_dtypes"]

_INDEX = "model_index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_WANTED = "a local diffusers directory, a Hugging Face id ORG/NAME, or one of " + ", ".join(EMBEDDED_MODELS)
_MAX_HEADER_BYTES = 100 * 1024**2  # as the safetensors format has it
# Whatever a component folder holds besides the weights that are loaded: other frameworks, other variants, demos.
_NOT_LOADED = ["*.msgpack", "*.h5", "*.onnx", "*.onnx_data", "*.ckpt", "*.fp16.*", "*.bf16.*", "*.non_ema.*", "*.py"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the weights are. `path` is None for a hub model (until fetched), and where there are no weights."""

    kind: Literal["local", "hub", "embedded", "none"]
    name: str
    path: str | None = None


def resolve_model(name: str, *, where: str) -> ModelSource:
    """Tell what `name` means. Raises `ConfigError` when it can be neither directory, hub id nor embedded name."""
    if name in EMBEDDED_MODELS:
        return ModelSource("embedded", name, str(embedded_path(name)))
    directory = Path(name).expanduser()
    if directory.is_dir():
        _check_directory(directory, name, where=where)
        return ModelSource("local", name, str(directory.resolve()))
    if directory.is_file():
        raise ConfigError("is a single file", where=where, found=name, wanted="a diffusers pipeline directory")
    if name.startswith("triptych/"):
        raise ConfigError(
            "no such embedded model", where=where, found=name, wanted=f"one of {', '.join(EMBEDDED_MODELS)}"
        )
    if name.startswith(("/", "./", "../", "~")):
        raise ConfigError("no such directory", where=where, found=name, wanted=_WANTED)
    if not _HUB_ID.fullmatch(name) or ".." in name or "--" in name:
        raise ConfigError("not a model", where=where, found=name, wanted=_WANTED)
    return ModelSource("hub", name)


def _check_directory(directory: Path, name: str, *, where: str) -> None:
    wanted = "a diffusers pipeline directory"
    if not (directory / _INDEX).is_file():
        raise ConfigError(f"the directory holds no {_INDEX}", where=where, found=name, wanted=wanted)
    try:
        _components(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_INDEX} cannot be read: {error}", where=where, found=name, wanted=wanted) from error


def fetch_model(source: ModelSource, revision: str | None) -> str:
    """Path of the model on this machine, downloaded where needed (minutes). Raises `ConfigError` with one line."""
    if source.path is not None:
        return source.path
    if source.kind != "hub":
        return source.name
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    # The bases are the errors of whichever HTTP client this version of the hub library uses, and OSError.
    transport: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, OSError, ValueError)
    try:
        return _snapshot(source.name, revision)
    except transport as error:
        reason = _first_line(error)
        if isinstance(error, GatedRepoError):
            reason = "access is gated: accept the terms and set HF_TOKEN"
        elif isinstance(error, RepositoryNotFoundError):
            reason = "no such repository, or it is private and HF_TOKEN is not set"
        at = f" at revision {revision}" if revision else ""
        raise ConfigError(
            f"cannot be fetched{at}: {reason}",
            where=f"model {source.name}",
            wanted="a reachable Hugging Face repository of a diffusers pipeline",
        ) from error


def _snapshot(repository: str, revision: str | None, *, local_files_only: bool = False) -> str:
    from huggingface_hub import hf_hub_download, snapshot_download

    options: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
    index = Path(hf_hub_download(repository, _INDEX, **options))
    patterns = [_INDEX, *(f"{component}/*" for component in _components(index.parent))]
    path = snapshot_download(repository, allow_patterns=patterns, ignore_patterns=[*_NOT_LOADED, "*.bin"], **options)
    if not local_files_only and not any(Path(path).glob("*/*.safetensors")):
        path = snapshot_download(repository, allow_patterns=patterns, ignore_patterns=_NOT_LOADED, **options)
    return str(path)


def cached_path(source: ModelSource, revision: str | None) -> str | None:
    """Where the model already lies on this machine, or None; never asks the network."""
    if source.kind != "hub":
        return source.path
    try:
        return _snapshot(source.name, revision, local_files_only=True)
    except (OSError, ValueError):  # not in the cache, or not wholly
        return None


def weight_bytes(path: str) -> int | None:
    """Size of the weights that a pipeline directory would load, in bytes; None when it holds none."""
    total = 0
    for component in _components(Path(path)):
        folder = Path(path) / component
        weights = _loaded(folder.glob("*.safetensors")) or _loaded(folder.glob("*.bin"))
        total += sum(file.stat().st_size for file in weights)
    return total or None


def weight_dtypes(path: str) -> frozenset[str]:
    """Floating-point types of the weights, as safetensors names them (F32, BF16, ...); empty for other files."""
    folders = [Path(path) / component for component in _components(Path(path))]
    files = [file for folder in folders for file in _loaded(folder.glob("*.safetensors"))]
    return frozenset(dtype for file in files for dtype in _header_dtypes(file) if dtype.startswith(("F", "BF")))


def _header_dtypes(file: Path) -> list[str]:
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        try:
            header = json.loads(data.read(min(length, _MAX_HEADER_BYTES)))
        except ValueError:
            header = None  # no safetensors file: whoever loads it will say so
    entries = header.values() if isinstance(header, dict) else ()
    return [str(entry["dtype"]) for entry in entries if isinstance(entry, dict) and "dtype" in entry]


def _loaded(files: Any) -> Sequence[Path]:
    return [file for file in files if not re.search(r"\.(fp16|bf16|non_ema)[.-]", file.name)]


def _components(path: Path) -> list[str]:
    """Folders that `model_index.json` names. Raises `ValueError` when it cannot be read."""
    index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
    if not isinstance(index, dict):
        raise ValueError(f"{_INDEX} is not a mapping")
    return [
        name
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and value[1] is not None and not name.startswith("_")
    ]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
