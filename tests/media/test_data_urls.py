"""Data URLs as clients really write them."""

from __future__ import annotations

import base64
import tracemalloc
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import ErrorCode, TriptychError
from triptych.media.data_urls import decode_data_url


@given(data=st.binary(max_size=40), chosen=st.sampled_from(["standard", "url-safe"]), padded=st.booleans())
def test_both_alphabets_are_read_with_and_without_padding(data: bytes, chosen: str, padded: bool) -> None:
    encode = base64.b64encode if chosen == "standard" else base64.urlsafe_b64encode
    text = encode(data).decode() if padded else encode(data).decode().rstrip("=")
    assert decode_data_url(f"data:image/png;base64,{text}", param="image") == data
    assert decode_data_url(f"DATA:;charset=utf-8;BASE64,\r\n{text}\n", param="image") == data
    assert decode_data_url(text, param="image") == data


def test_percent_signs_are_read() -> None:
    assert decode_data_url("data:image/png;base64,AA%3D%3D", param="image") == b"\0"
    assert decode_data_url("data:,a%20b", param="image") == b"a b"


@given(text=st.text(alphabet="%4aFgö", max_size=20))
def test_escapes_are_read_as_the_library_reads_them(text: str) -> None:
    assert decode_data_url(f"data:,{text}", param="image") == unquote_to_bytes(text)


def test_a_text_of_nothing_but_escapes_takes_a_few_times_its_size() -> None:
    url = "data:," + "%41" * 100_000
    tracemalloc.start()
    try:
        decode_data_url(url, param="image")
        assert tracemalloc.get_traced_memory()[1] < 15 * len(url)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "without a comma"),
        ("data:image/png;base64,A", "damaged or cut off"),
        ("data:image/png;base64,AAA*", "damaged or cut off"),
        ("data:image/png;base64,äöü=", "not ASCII"),
        ("file:///etc/passwd", "must be a data URL"),
        ("ftp://example.com/a.png", "must be a data URL"),
    ],
)
def test_what_cannot_be_read_is_refused(url: str, message: str) -> None:
    with pytest.raises(TriptychError, match=message) as caught:
        decode_data_url(url, param="images[0]")
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_IMAGE, "images[0]")


@given(url=st.text(max_size=30) | st.text(max_size=30).map("data:;base64,".__add__))
def test_any_text_is_bytes_or_a_refusal(url: str) -> None:
    try:
        assert isinstance(decode_data_url(url, param="image"), bytes)
    except TriptychError as error:
        assert error.code == ErrorCode.INVALID_IMAGE
