"""Output formats by name; a new one is one entry here and in `messages.OutputSpec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from triptych.media.images import encode_jpeg, encode_png, encode_webp
from triptych.media.video import encode_mp4

__all__ = ["CODECS", "Codec"]


@dataclass(frozen=True, slots=True)
class Codec:
    """One output format. `encode` takes pixels (of a clip: with frames in front), frames a second and compression."""

    kind: Literal["image", "video"]
    mime: str
    encode: Callable[[npt.NDArray[np.uint8], int, int | None], bytes]


CODECS: Mapping[str, Codec] = {
    "png": Codec("image", "image/png", lambda p, fps, c: encode_png(p, compression=c)),
    "jpeg": Codec("image", "image/jpeg", lambda p, fps, c: encode_jpeg(p, compression=c)),
    "webp": Codec("image", "image/webp", lambda p, fps, c: encode_webp(p, compression=c)),
    "mp4": Codec("video", "video/mp4", lambda p, fps, c: encode_mp4(p, fps=fps)),
}
