"""A text added to an encoded MP4 without touching its streams: one more box at the end, which players skip."""

from __future__ import annotations

import struct

__all__ = ["append_text"]


def append_text(mp4: bytes, text: str) -> bytes:
    """`mp4` with the UTF-8 text in a `free` box behind all others. Raises ValueError if it is no MP4."""
    if mp4[4:8] != b"ftyp":
        raise ValueError("not an MP4")
    content = text.encode()
    return b"".join((mp4, struct.pack(">I4s", 8 + len(content), b"free"), content))
