"""The bodies of all requests together have a bound, and one that waits with its pictures decoded is not in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from api_fakes import FakeOrchestrator

pytestmark = pytest.mark.anyio

IMAGES = "/v1/images/generations"
WAIT_S = 20
JSON = {"content-type": "application/json"}


def body_of(size: int) -> bytes:
    return b'{"prompt":"x"}'.ljust(size)


async def test_bodies_together_are_bounded_until_their_requests_wait(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.api.body_room._ROOM_BYTES", 1_000_000)
    half_sent, go_on = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield body_of(600_000)
        half_sent.set()
        await go_on.wait()
        yield b" "

    async def post(content: bytes | AsyncIterator[bytes]) -> httpx.Response:
        return await client.post(IMAGES, content=content, headers=JSON)

    async with asyncio.timeout(WAIT_S):
        orchestrator.hold = asyncio.Event()
        slow = asyncio.create_task(post(slowly()))
        await half_sent.wait()
        refused = await post(body_of(500_000))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "5"
        assert "take 600000 bytes, the limit is 1000000 bytes" in refused.json()["error"]["message"]
        small = asyncio.create_task(post(body_of(60_000)))
        await orchestrator.arrived.wait()
        orchestrator.arrived.clear()
        go_on.set()
        await orchestrator.arrived.wait()  # it waits for its picture now, and what it sent is gone
        orchestrator.arrived.clear()
        large = asyncio.create_task(post(body_of(5_000_000)))
        await orchestrator.arrived.wait()
        orchestrator.hold.set()
        assert [(await answer).status_code for answer in (slow, small, large)] == [200, 200, 200]


async def test_a_body_that_is_refused_leaves_its_room(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.api.body_room._ROOM_BYTES", 1_000_000)
    bodies = (body_of(900_000)[1:], body_of(900_000), body_of(900_000))
    answers = [await client.post(IMAGES, content=body, headers=JSON) for body in bodies]
    assert [answer.status_code for answer in answers] == [400, 200, 200]
