"""Data URLs, as clients write them: `data:image/png;base64,...` in, the bytes they carry out.

Bare base64 text is taken too, since many picture tools send it; so are line breaks, the URL-safe alphabet and missing
padding. What the URL says of its type is ignored: contents are sniffed (see `inputs`).
"""

from __future__ import annotations

import numpy as np
import pybase64

from triptych.media.inputs import invalid_image

__all__ = ["decode_data_url"]

_BLANKS = b" \t\r\n\f"
_STANDARD = bytes.maketrans(b"-_", b"+/")
_NO_DIGIT = 16
_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
_DIGITS[list(b"0123456789abcdef")] = _DIGITS[list(b"0123456789ABCDEF")] = range(16)


def decode_data_url(url: str, *, param: str) -> bytes:
    """The bytes of a data URL, or of bare base64. Raises `TriptychError` (`invalid_image`)."""
    head, comma, text = url.partition(",")
    if head[:5].lower() != "data:":
        if "://" in url[:32]:
            raise invalid_image(param, f"must be a data URL or base64 text, got {url[:64]!r}")
        return _from_base64(url, param)
    if not comma:
        raise invalid_image(param, "is a data URL without a comma before its data")
    if head.rpartition(";")[2].strip().lower() == "base64":
        return _from_base64(text, param)
    return _unescaped(text.encode())


def _from_base64(text: str, param: str) -> bytes:
    try:
        plain = text.encode("ascii")
    except UnicodeEncodeError:
        raise invalid_image(param, "is not base64: it holds characters that are not ASCII") from None
    if b"%" in plain:
        plain = _unescaped(plain)
    plain = plain.translate(_STANDARD, _BLANKS).rstrip(b"=")
    plain += b"=" * (-len(plain) % 4)
    try:
        return pybase64.b64decode(plain, validate=True)
    except ValueError:
        raise invalid_image(param, f"is not base64: it is damaged or cut off ({len(plain)} characters)") from None


def _unescaped(text: bytes) -> bytes:
    """`%41` as `A`; a sign without two digits stays. The library's own makes an object of every piece between signs."""
    data = np.frombuffer(text, np.uint8).copy()
    signs = np.flatnonzero(data[:-2] == ord("%"))
    high, low = _DIGITS[data[signs + 1]], _DIGITS[data[signs + 2]]
    escapes = (high < _NO_DIGIT) & (low < _NO_DIGIT)
    signs = signs[escapes]
    data[signs] = high[escapes] << 4 | low[escapes]
    kept = np.ones(len(data), np.bool_)
    kept[signs + 1] = kept[signs + 2] = False
    return data[kept].tobytes()
