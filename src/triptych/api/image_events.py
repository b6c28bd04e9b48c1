"""OpenAI's picture events, for generations and edits: `<kind>.partial_image` and `<kind>.completed`.

Beside the official fields stand `image_index` (which of the n pictures) and, in the final one, seed and metrics.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from triptych.api.fields import BodyFields
from triptych.api.generation import base64_of, option
from triptych.api.sse import event
from triptych.config.parameters import shown
from triptych.errors import ErrorCode, TriptychError
from triptych.orchestrator.events import Event, UnitOutput, UnitPreview

__all__ = ["ImageEvents", "partial_images"]

_MAX_PARTIAL_IMAGES = 3
# The official events have it always; pictures are not counted in tokens here.
_NO_USAGE = {
    "total_tokens": 0,
    "input_tokens": 0,
    "output_tokens": 0,
    "input_tokens_details": {"text_tokens": 0, "image_tokens": 0},
}


def partial_images(fields: BodyFields, *, stream: bool) -> int:
    """The field `partial_images`: how many of each picture. Raises `TriptychError`."""
    count = option(fields, "partial_images")
    if count is None:
        return 0
    if type(count) is not int or not 0 <= count <= _MAX_PARTIAL_IMAGES:
        message = f"partial_images must be an integer from 0 to {_MAX_PARTIAL_IMAGES}, got {shown(count)}"
        raise TriptychError(ErrorCode.INVALID_VALUE, message, param="partial_images")
    if count and not stream:
        message = f"partial_images needs stream: true, got {count} without it"
        raise TriptychError(ErrorCode.INVALID_VALUE, message, param="partial_images")
    return count


class ImageEvents:
    """An `EventEncoder`; `ignored` are the names of the request's meaningless fields."""

    def __init__(self, kind: Literal["image_generation", "image_edit"], *, ignored: list[str]) -> None:
        self._kind = kind
        self._ignored = ignored

    def begin(self) -> list[bytes]:
        """Nothing comes first."""
        return []

    def encode(self, happened: Event) -> list[bytes]:
        """Partial and final pictures; steps have no official event."""
        if isinstance(happened, UnitPreview):
            return self._event("partial_image", happened, {"partial_image_index": happened.index})
        if isinstance(happened, UnitOutput):
            extra = {"seed": happened.seed, "metrics": happened.metrics, "ignored_parameters": self._ignored}
            return self._event("completed", happened, {"usage": _NO_USAGE, **extra})
        return []

    def end(self) -> list[bytes]:
        """Nothing comes last: official streams of pictures just end."""
        return []

    def _event(self, what: str, picture: UnitPreview | UnitOutput, more: dict[str, Any]) -> list[bytes]:
        name = f"{self._kind}.{what}"
        fields = {
            "type": name,
            "created_at": int(time.time()),
            "size": f"{picture.width}x{picture.height}",
            "quality": "auto",
            "background": "opaque",
            "output_format": picture.mime.removeprefix("image/"),
            "image_index": picture.unit,
            **more,
        }
        return event([msgspec.json.encode(fields)[:-1], b',"b64_json":"', base64_of(picture), b'"}'], name=name)
