"""From what a pipeline returns to uint8 pixels on the host: one rounding, the same as diffusers' own.

A picture with values that are no numbers is a failure with a message, never a black picture.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from triptych.errors import ErrorCode, TriptychError

__all__ = ["pixels_of", "to_pixels"]


def to_pixels(output: Any) -> npt.NDArray[np.uint8]:
    """Pixels of the first picture (height x width x 3) or clip (frames in front). Raises `TriptychError`."""
    if any(getattr(output, "nsfw_content_detected", None) or ()):
        message = "the model's safety checker rejected the picture; try another prompt or seed"
        raise TriptychError(ErrorCode.INVALID_VALUE, message, param="prompt")
    batch = output.frames if hasattr(output, "frames") else output.images
    value = batch[0]
    if isinstance(value, torch.Tensor):
        pixels = pixels_of(value)
    elif isinstance(value, np.ndarray):
        _require_finite(bool(np.isfinite(value).all()))
        pixels = value if value.dtype == np.uint8 else (value * 255).round().astype(np.uint8)
    elif isinstance(value, list):
        pixels = np.stack([np.asarray(frame.convert("RGB")) for frame in value])
    else:
        pixels = np.asarray(value.convert("RGB"))
    if pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, 3, axis=-1)
    return pixels


def pixels_of(value: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Pixels of a picture (or of frames) in 0..1 with its channels third from last. Raises `TriptychError`."""
    channels_last = value.float().movedim(-3, -1)
    _require_finite(bool(torch.isfinite(channels_last).all()))
    return (channels_last * 255).round_().to(torch.uint8).contiguous().cpu().numpy()


def _require_finite(finite: bool) -> None:
    if not finite:
        message = "the model produced values that are no numbers (NaN or infinity); try more steps or another dtype"
        raise TriptychError(ErrorCode.ENGINE_ERROR, message)
