"""Checkpoints that come with the package, by name: diffusers directories beside this file."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DEFAULT_MODEL", "EMBEDDED_MODELS", "embedded_path"]

DEFAULT_MODEL = "triptych/shapes"
EMBEDDED_MODELS = (DEFAULT_MODEL, "triptych/shapes-video")


def embedded_path(name: str) -> Path:
    """Directory of an embedded model. Raises `KeyError` for other names."""
    if name not in EMBEDDED_MODELS:
        raise KeyError(name)
    return Path(__file__).parent / name.partition("/")[2]
