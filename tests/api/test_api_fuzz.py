"""Whatever JSON a client sends, the answer is never a 5xx and always an envelope or a result."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from api_fakes import FakeOrchestrator, client_of, make_app
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.api.fields import CHAT_FIELDS, IMAGE_FIELDS

pytestmark = pytest.mark.anyio

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


async def post(path: str, body: Any) -> None:
    async with client_of(make_app(FakeOrchestrator())) as client:
        response = await client.post(
            path, content=msgspec.json.encode(body), headers={"content-type": "application/json"}
        )
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.content) < 4096


@given(body=FIELDS | VALUES, prompt=st.text(min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
async def test_no_body_makes_the_picture_route_fail(body: Any, prompt: str) -> None:
    await post("/v1/images/generations", {"prompt": prompt} | body if isinstance(body, dict) else body)


@given(body=FIELDS | VALUES, messages=VALUES | st.just([{"role": "user", "content": "x"}]))
@settings(max_examples=300, deadline=None)
async def test_no_body_makes_the_chat_route_fail(body: Any, messages: Any) -> None:
    await post("/v1/chat/completions", {"messages": messages} | body if isinstance(body, dict) else body)


@given(content=st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
@settings(max_examples=200, deadline=None)
async def test_no_bytes_make_a_route_fail(content: bytes) -> None:
    async with client_of(make_app(FakeOrchestrator())) as client:
        for method, path in (("POST", "/v1/images/generations"), ("PATCH", "/v1/requests/x")):
            response = await client.request(method, path, content=content, headers={"content-type": "application/json"})
            assert 400 <= response.status_code < 500
