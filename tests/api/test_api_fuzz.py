"""Whatever JSON a client sends, the answer is never a 5xx and always an envelope or a result."""

from __future__ import annotations

import base64
import functools
from typing import Any

import msgspec
import pytest
from api_fakes import EDIT_MODEL, IMAGE_MODEL, FakeOrchestrator, client_of, make_app
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.api.fields import CHAT_FIELDS, EDIT_FIELDS, IMAGE_FIELDS
from triptych.messages import ModelInfo

pytestmark = pytest.mark.anyio

TINY_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
TINY_URL = f"data:image/png;base64,{base64.b64encode(TINY_PNG).decode()}"
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(["auto", "64x64", "user", "text", "png", "a cat", "0x0", "99999x99999"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "name"]) | st.text(max_size=4), inner)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(sorted(CHAT_FIELDS.common | CHAT_FIELDS.own | IMAGE_FIELDS.own | {"prompt", "extra_body"}))
FIELDS = st.dictionaries(NAMES | st.text(max_size=6), VALUES, max_size=6)


@functools.cache
def app_of(model: ModelInfo) -> Any:
    return make_app(FakeOrchestrator(model))


async def post(path: str, body: Any, *, model: ModelInfo = IMAGE_MODEL, content_type: str = "application/json") -> None:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    async with client_of(app_of(model)) as client:
        response = await client.post(path, content=content, headers={"content-type": content_type})
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.content) < 4096


@given(
    body=FIELDS | VALUES,
    value=VALUES | st.sampled_from([TINY_URL, [TINY_URL]]) | st.just([{"role": "user", "content": "x"}]),
    mask=st.none() | VALUES | st.just(TINY_URL),
)
@settings(max_examples=300, deadline=None)
async def test_no_body_makes_a_route_fail(body: Any, value: Any, mask: Any) -> None:
    """Making up a body takes longer than answering it, so each goes to every route."""
    for path, fields, model in (
        ("/v1/images/generations", {"prompt": "x"}, IMAGE_MODEL),
        ("/v1/chat/completions", {"messages": value}, IMAGE_MODEL),
        ("/v1/images/edits", {"prompt": "x", "image": value, "mask": mask}, EDIT_MODEL),
    ):
        await post(path, fields | body if isinstance(body, dict) else body, model=model)


@given(content=st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
@settings(max_examples=200, deadline=None)
async def test_no_bytes_make_a_route_fail(content: bytes) -> None:
    async with client_of(app_of(IMAGE_MODEL)) as client:
        for method, path in (("POST", "/v1/images/generations"), ("PATCH", "/v1/requests/x")):
            response = await client.request(method, path, content=content, headers={"content-type": "application/json"})
            assert 400 <= response.status_code < 500


PICTURES = st.sampled_from([b"", b"no picture", TINY_PNG, TINY_PNG[:40]])
PARTS = st.lists(
    st.tuples(
        st.sampled_from([*sorted(EDIT_FIELDS.common | EDIT_FIELDS.own), "image[]", "image[", "lora[name]", "a[b][c]"]),
        PICTURES
        | st.text(max_size=8).map(str.encode)
        | st.sampled_from([b"NaN", b"1e999", b"true", b"null", b"[[", b"3"]),
        st.none() | st.text(st.characters(codec="ascii", exclude_characters='"\\\r\n'), max_size=6),
    ),
    max_size=6,
)


@given(parts=PARTS, cut=st.integers(0, 40))
@settings(max_examples=150, deadline=None)
async def test_no_form_makes_the_edit_route_fail(parts: list[tuple[str, bytes, str | None]], cut: int) -> None:
    lines = []
    for name, content, filename in [("prompt", b"x", None), ("image", TINY_PNG, "a.png"), *parts]:
        named = f'; filename="{filename}"' if filename is not None else ""
        lines += [b"--b", f'content-disposition: form-data; name="{name}"{named}'.encode(), b"", content]
    body = b"\r\n".join([*lines, b"--b--", b""])
    content_type = "multipart/form-data; boundary=b"
    await post("/v1/images/edits", body[: len(body) - cut // 20 * cut], model=EDIT_MODEL, content_type=content_type)
