"""What input pictures and a mask change in a request: the call of the model that takes them, and the output's size.

A model may take none, one or several, and other parameters beside them than with a prompt alone (`ModelInfo.image`,
`.mask`); the output is as large as the first picture unless the request says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from triptych.config.limits import Limits
from triptych.errors import ErrorCode, TriptychError
from triptych.messages import MediaInput, ModelInfo

__all__ = ["call_with", "check_strength"]


def call_with(inputs: Sequence[MediaInput], info: ModelInfo, limits: Limits) -> ModelInfo:
    """The model as these inputs call it, its default size that of the output. Raises `TriptychError`."""
    pictures = [media for media in inputs if media.kind == "image"]
    mask = next((media for media in inputs if media.kind == "mask"), None)
    if not pictures:
        return _without_pictures(info, mask)
    call = info.image if mask is None else info.mask
    if call is None:
        raise _takes_no(info, mask)
    if len(pictures) > call.max_images:
        takes = "one input picture" if call.max_images == 1 else f"at most {call.max_images} input pictures"
        message = f"{call.pipeline} takes {takes}, got {len(pictures)}"
        raise TriptychError(ErrorCode.INVALID_VALUE, message, param="image")
    first = pictures[0]
    if mask is not None and (mask.width, mask.height) != (first.width, first.height):
        message = f"mask must be as large as the picture, {first.width}x{first.height}, got {mask.width}x{mask.height}"
        raise TriptychError(ErrorCode.INVALID_VALUE, message, param="mask")
    width, height = _size_like(first, call, limits)
    return msgspec.structs.replace(call, default_width=width, default_height=height)


def check_strength(strength: float | None, steps: int | None, info: ModelInfo) -> None:
    """Refuse a strength that leaves no denoising step to run. Raises `TriptychError`."""
    if info.default_strength is None or steps is None:
        return
    effective = info.default_strength if strength is None else strength
    if effective * steps >= 1:
        return
    param = "num_inference_steps" if strength is None else "strength"
    message = f"strength {effective:g} of {steps} steps leaves none to run; their product must be at least 1"
    raise TriptychError(ErrorCode.INVALID_VALUE, message, param=param)


def _without_pictures(info: ModelInfo, mask: MediaInput | None) -> ModelInfo:
    if mask is not None:
        raise TriptychError(ErrorCode.MISSING_PARAMETER, "image is required beside a mask", param="image")
    if info.needs_image:
        message = f"image is required: {info.pipeline} works on input pictures"
        raise TriptychError(ErrorCode.MISSING_PARAMETER, message, param="image")
    return info


def _takes_no(info: ModelInfo, mask: MediaInput | None) -> TriptychError:
    if mask is None and info.mask is not None:
        message = f"{info.pipeline} needs a mask beside the input picture"
        return TriptychError(ErrorCode.MISSING_PARAMETER, message, param="mask")
    if mask is not None and info.image is not None:
        message = f"{info.pipeline} takes input pictures, but no mask"
        return TriptychError(ErrorCode.UNSUPPORTED_PARAMETER, message, param="mask")
    message = f"{info.pipeline} takes no input pictures"
    return TriptychError(ErrorCode.UNSUPPORTED_PARAMETER, message, param="image")


def _size_like(picture: MediaInput, info: ModelInfo, limits: Limits) -> tuple[int, int]:
    """Size of the output for a picture: its own; a clip has its shape and as many pixels as the model likes."""
    if info.sizes:
        shape = math.log(picture.width / picture.height)
        return min(info.sizes, key=lambda size: abs(math.log(size[0] / size[1]) - shape))
    pixels = limits.max_pixels
    if info.kind == "video":
        pixels = min(pixels, info.default_width * info.default_height)
    scale = min(1.0, math.sqrt(pixels / (picture.width * picture.height)))
    multiple = info.size_multiple
    width, height = (max(1, int(side * scale) // multiple) * multiple for side in (picture.width, picture.height))
    return width, height
