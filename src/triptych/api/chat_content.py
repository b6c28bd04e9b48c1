"""The outputs of a chat answer as members of its message: content parts, or pictures beside an empty content.

Each output is a data URL with its seed, around base64 text that no encoder looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from triptych.api.generation import base64_of
from triptych.orchestrator.events import UnitOutput

__all__ = ["content_members"]


def content_members(outputs: Sequence[UnitOutput], image_format: Literal["parts", "images"]) -> list[bytes]:
    """`"content": ...` and, as `images`, `"images": ...`: parts of a JSON object's inside."""
    as_images = image_format == "images" and all(output.mime.startswith("image/") for output in outputs)
    opening = b'"content":"","images":[' if as_images else b'"content":['
    chunks = []
    for index, output in enumerate(outputs):
        part = b"video_url" if output.mime.startswith("video/") else b"image_url"
        position = b'"index":%d,' % index if as_images else b""
        lead = b'{"type":"%b",%b"%b":{"url":"data:%b;base64,' % (part, position, part, output.mime.encode())
        chunks += [(b"," if index else opening) + lead, base64_of(output), b'"},"seed":%d}' % output.seed]
    return [*chunks, b"]"]
