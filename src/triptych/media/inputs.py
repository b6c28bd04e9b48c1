"""Pictures that clients send: foreign bytes in, raw RGB pixels or an edit mask out, or a refusal that names the field.

The format is sniffed, never believed; size and pixels are bounded before anything is decoded; the first frame counts.
Decoding takes up to some hundred milliseconds: call it in a thread (`api/media.py` does).
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from triptych.errors import ErrorCode, TriptychError
from triptych.messages import MediaInput

__all__ = ["INPUT_FORMATS", "MAX_INPUT_PIXELS", "Picture", "decode_image", "decode_mask", "framed", "invalid_image"]

INPUT_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF")
MAX_INPUT_PIXELS = 64 * 1024 * 1024
_NAMES = ", ".join(INPUT_FORMATS)
_SIXTEEN_BIT = 257  # 65535 / 255
_BACKGROUND = (255, 255, 255, 255)


@dataclass(frozen=True, slots=True)
class Picture:
    """Decoded pixels: `height x width x len(mode)` bytes, row-major. In a mask (`L`) 255 is where to draw anew."""

    mode: Literal["RGB", "L"]
    width: int
    height: int
    data: bytes


def invalid_image(param: str, message: str) -> TriptychError:
    """`invalid_image` of a field; the message goes on after its name."""
    return TriptychError(ErrorCode.INVALID_IMAGE, f"{param} {message}", param=param)


def decode_image(data: bytes | bytearray, *, param: str, max_pixels: int) -> Picture:
    """An upright RGB picture of at most `max_pixels`: larger ones are scaled down, transparency turns white.

    Raises `TriptychError` (`invalid_image`) for what is no whole picture in a known format.
    """
    image = _fitted(_opaque(_first_frame(data, param)), max_pixels)
    return Picture("RGB", *image.size, image.tobytes())


def decode_mask(data: bytes | bytearray, *, param: str, max_pixels: int) -> Picture:
    """A mask: transparent means edit, as in the OpenAI API; without any transparency, white means edit.

    Raises `TriptychError` as `decode_image` does, and for a mask that leaves nothing to edit.
    """
    frame = _eight_bit(_first_frame(data, param))
    mask = frame.convert("L")
    if frame.has_transparency_data:
        alpha = frame.convert("RGBA").getchannel("A")
        if alpha.getextrema() != (255, 255):
            mask = ImageOps.invert(alpha)
    if mask.getextrema() == (0, 0):
        raise invalid_image(param, "marks nothing to edit: it is black everywhere and nowhere transparent")
    mask = _fitted(mask, max_pixels)
    return Picture("L", *mask.size, mask.tobytes())


def framed(pictures: Sequence[Picture]) -> tuple[tuple[MediaInput, ...], tuple[bytes, ...]]:
    """What travels to an engine: a description of each picture, and their pixels as raw frames in the same order."""
    inputs = tuple(
        MediaInput("mask" if picture.mode == "L" else "image", picture.mode, picture.width, picture.height, number)
        for number, picture in enumerate(pictures)
    )
    return inputs, tuple(picture.data for picture in pictures)


def _first_frame(data: bytes | bytearray, param: str) -> Image.Image:
    """The first frame, decoded and upright. Whatever a decoder raises over foreign bytes is their sender's fault."""
    if not data:
        raise invalid_image(param, "is empty")
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=INPUT_FORMATS)
        _check_pixels(image.size, param)
        image.load()
        return ImageOps.exif_transpose(image)
    except (TriptychError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise invalid_image(param, f"is no picture in a known format; wanted {_NAMES}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise invalid_image(param, f"must have at most {MAX_INPUT_PIXELS} pixels") from None
    except Exception as error:  # noqa: BLE001 - decoders raise a dozen types
        raise invalid_image(param, f"cannot be decoded: {_one_line(error)}") from None


def _check_pixels(size: tuple[int, int], param: str) -> None:
    width, height = size
    if width * height > MAX_INPUT_PIXELS:
        raise invalid_image(param, f"must have at most {MAX_INPUT_PIXELS} pixels, got {width}x{height}")
    if width < 1 or height < 1:
        raise invalid_image(param, f"must have at least one pixel, got {width}x{height}")


def _eight_bit(image: Image.Image) -> Image.Image:
    """Gray of 16 bits as gray of 8; Pillow's own conversion cuts off everything above 255."""
    if image.mode.startswith("I"):
        values: Any = np.asarray(image).clip(0, 65535).astype(np.uint32)
        values += _SIXTEEN_BIT // 2
        values //= _SIXTEEN_BIT
        return Image.fromarray(values.astype(np.uint8))
    return image


def _opaque(image: Image.Image) -> Image.Image:
    image = _eight_bit(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, _BACKGROUND), layer).convert("RGB")


def _fitted(image: Image.Image, max_pixels: int) -> Image.Image:
    """The picture scaled down to `max_pixels`, if it has more; its shape is kept."""
    if image.width * image.height <= max_pixels:
        return image
    scale = math.sqrt(max_pixels / (image.width * image.height))
    width, height = max(1, int(image.width * scale)), max(1, int(image.height * scale))
    return image.resize((min(width, max_pixels), min(height, max_pixels)), Image.Resampling.LANCZOS)


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
