"""A text chunk spliced into a PNG leaves its pixels alone."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from triptych.media.png_text import splice_text


def png() -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (3, 2), (1, 2, 3)).save(encoded, "PNG")
    return encoded.getvalue()


def test_the_text_is_read_back_and_the_pixels_are_the_same() -> None:
    with Image.open(io.BytesIO(splice_text(splice_text(png(), "one", "é"), "two", ""))) as image:
        image.load()  # also checks the sums of all chunks
        assert image.text == {"one": "é", "two": ""}  # type: ignore[attr-defined]
        assert image.getpixel((2, 1)) == (1, 2, 3)


@pytest.mark.parametrize(
    ("data", "keyword", "text"), [(b"GIF89a", "k", "t"), (png(), "", "t"), (png(), "k" * 80, "t"), (png(), "k", "日")]
)
def test_what_cannot_be_spliced_is_refused(data: bytes, keyword: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"PNG|latin-1"):
        splice_text(data, keyword, text)
