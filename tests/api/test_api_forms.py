"""Forms become the fields that the same request would have as JSON; broken ones are refused in plain words."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.api.forms import parse_form
from triptych.errors import TriptychError

HEAD = 'Content-Disposition: form-data; name="{}"'


def encoded(data: dict[str, Any], files: Any) -> tuple[bytes, str]:
    request = httpx.Request("POST", "http://x", data=data, files=files)
    return request.read(), request.headers["content-type"]


def by_hand(*parts: tuple[str, bytes], end: bytes = b"--B--\r\n") -> bytes:
    return b"".join(b"--B\r\n%b\r\n\r\n%b\r\n" % (head.encode(), data) for head, data in parts) + end


def test_text_files_lists_and_objects() -> None:
    body, content_type = encoded(
        {"prompt": "ein Kreis, größer", "lora[name]": "x", "lora[scale]": "2", "seed": "0"},
        [("image[]", ("a.png", b"\x00\r\n--\xff")), ("image[]", ("b.png", b"2")), ("mask", ("m", b""))],
    )
    assert parse_form(body, content_type) == {
        "prompt": "ein Kreis, größer",
        "lora": {"name": "x", "scale": "2"},
        "seed": "0",
        "image": [b"\x00\r\n--\xff", b"2"],
        "mask": b"",
    }


def test_a_file_field_that_was_left_empty_is_not_there() -> None:
    body = by_hand((HEAD.format("prompt"), b"a"), (HEAD.format("mask") + '; filename=""', b""))
    assert parse_form(body, "multipart/form-data; boundary=B") == {"prompt": "a"}


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b"", "multipart/form-data", "names no boundary"),
        (b"nothing", "multipart/form-data; boundary=B", "not a valid form"),
        (by_hand((HEAD.format("a"), b"1"), end=b""), "multipart/form-data; boundary=B", "its end is missing"),
        (by_hand(("X: y", b"1")), "multipart/form-data; boundary=B", "a part has no name"),
        (by_hand(*[(HEAD.format("a"), b"1")] * 2), "multipart/form-data; boundary=B", "'a' is given twice"),
        (by_hand(*[(HEAD.format("a[b]"), b"1")] * 2), "multipart/form-data; boundary=B", "given twice"),
        (
            by_hand((HEAD.format("a"), b"1"), (HEAD.format("a[]"), b"1")),
            "multipart/form-data; boundary=B",
            "given twice",
        ),
        (by_hand((HEAD.format("prompt"), b"\xff\xfe")), "multipart/form-data; boundary=B", "not UTF-8"),
        (
            by_hand(*[(HEAD.format("a[]"), b"1")] * 257),
            "multipart/form-data; boundary=B",
            "more than 256 parts",
        ),
    ],
)
def test_a_broken_form_is_told_what_is_wrong(body: bytes, content_type: str, message: str) -> None:
    with pytest.raises(TriptychError, match=message) as caught:
        parse_form(body, content_type)
    assert caught.value.status == 400


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400))
def test_nothing_but_an_error_of_the_client_comes_out_of_garbage(garbage: bytes, position: int) -> None:
    body = by_hand((HEAD.format("prompt"), b"a"), (HEAD.format("image[]") + '; filename="x"', b"\x89PNG"))
    for damaged in (garbage, body[:position] + garbage + body[position:], body[:position]):
        with contextlib.suppress(TriptychError):
            parse_form(damaged, "multipart/form-data; boundary=B")
