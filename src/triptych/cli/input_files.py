"""Pictures and a mask named on the command line, read and decoded before any weights load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from triptych.errors import ConfigError
from triptych.media.inputs import decode_image, decode_mask, framed
from triptych.messages import MediaInput

__all__ = ["read_input_files"]


def read_input_files(
    images: Sequence[Path], mask: Path | None, *, max_pixels: int
) -> tuple[tuple[MediaInput, ...], tuple[bytes, ...]]:
    """Descriptions and frames, the mask last. Raises `ConfigError` for the file, `TriptychError` for what is in it."""
    decoded = [
        decode_image(_bytes_of(path, "--image"), param=f"--image {path}", max_pixels=max_pixels) for path in images
    ]
    if mask is not None:
        decoded.append(decode_mask(_bytes_of(mask, "--mask"), param=f"--mask {mask}", max_pixels=max_pixels))
    return framed(decoded)


def _bytes_of(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=flag, found=str(path)) from error
