"""A text chunk added to an encoded PNG without touching its pixels."""

from __future__ import annotations

import struct
import zlib

__all__ = ["splice_text"]

_HEADER_END = 8 + 12 + 13  # signature, then the IHDR chunk with its 13 bytes


def splice_text(png: bytes, keyword: str, text: str) -> bytes:
    """`png` with one more tEXt chunk right behind its header.

    `keyword` (1..79 characters) and `text` are Latin-1. Raises ValueError for anything else.
    """
    if png[:8] != b"\x89PNG\r\n\x1a\n" or png[12:16] != b"IHDR":
        raise ValueError("not a PNG")
    if not 1 <= len(keyword) <= 79:
        raise ValueError("the keyword of a PNG text chunk has 1 to 79 characters")
    content = b"tEXt" + keyword.encode("latin-1") + b"\0" + text.encode("latin-1")
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    return b"".join((png[:_HEADER_END], chunk, memoryview(png)[_HEADER_END:]))
