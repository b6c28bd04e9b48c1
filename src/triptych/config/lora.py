"""LoRAs: where the weights of one are, and which one a request chose."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.config.parameter_errors import invalid, shown
from triptych.errors import ConfigError
from triptych.messages import Lora

if TYPE_CHECKING:
    from triptych.config.parameters import LoraParameter

__all__ = ["lora_file", "resolve_lora"]

_SUFFIX = ".safetensors"
_DIFFUSERS_NAME = "pytorch_lora_weights.safetensors"


def lora_file(path: str, *, where: str) -> Path:
    """The file that `path` names, or the one in that folder; errors speak of `where`. Raises `ConfigError`."""
    given = Path(path)
    if given.is_file() and given.suffix == _SUFFIX:
        return given.absolute()
    if not given.is_dir():
        problem = "not a safetensors file" if given.exists() else "no such file or folder"
        raise ConfigError(problem, where=where, found=path, wanted=f"a {_SUFFIX} file, or a folder with one")
    files = sorted(given.glob(f"*{_SUFFIX}"))
    named = [file for file in files if file.name == _DIFFUSERS_NAME] or files
    if len(named) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ConfigError(f"{len(files)} {_SUFFIX} files are there", where=where, found=found, wanted="one")
    return named[0].absolute()


def resolve_lora(lora: LoraParameter | None, *, registered: Collection[str]) -> Lora | None:
    """The LoRA that a request chose among those that are registered. Raises `TriptychError`."""
    if lora is None:
        return None
    if lora.name not in registered:
        wanted = f"must be one of {', '.join(registered)}" if registered else "cannot be chosen, none is registered"
        raise invalid("lora.name", f"{wanted}, got {shown(lora.name)}")
    return Lora(lora.name, lora.scale)
