"""The bodies of all requests together have a bound, and one that waits with its pictures decoded is not in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from api_fakes import FakeOrchestrator, client_of, make_app

pytestmark = pytest.mark.anyio

IMAGES = "/v1/images/generations"
WAIT_S = 20


@pytest.fixture
async def client(orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr("triptych.api.app._BODY_ROOM_BYTES", 0)
    async with client_of(make_app(orchestrator, max_body_size=500_000)) as client:
        yield client


def body_of(size: int) -> bytes:
    return b'{"prompt":"x"}'.ljust(size)


async def post(client: httpx.AsyncClient, content: bytes | AsyncIterator[bytes]) -> httpx.Response:
    return await client.post(IMAGES, content=content, headers={"content-type": "application/json"})


async def test_bodies_together_are_bounded_until_their_requests_wait(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    sent, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield body_of(450_000)
        sent.release()
        await go_on.wait()

    async def accepted(count: int) -> None:
        while len(orchestrator.submitted) < count:
            orchestrator.arrived.clear()
            await orchestrator.arrived.wait()

    orchestrator.hold = asyncio.Event()
    async with asyncio.timeout(WAIT_S):
        answers = [asyncio.create_task(post(client, slowly())) for _ in range(2)]
        for _ in range(2):
            await sent.acquire()
        refused = await post(client, body_of(450_000))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "5"
        assert "take 900000 bytes, the limit is 1000000 bytes" in refused.json()["error"]["message"]
        answers.append(asyncio.create_task(post(client, body_of(60_000))))  # too small to need room
        await accepted(1)
        go_on.set()
        for count in (3, 4, 5, 6):  # what waits for its picture is not counted
            await accepted(count)
            answers.append(asyncio.create_task(post(client, body_of(450_000))))
        await accepted(7)
        orchestrator.hold.set()
        assert [(await answer).status_code for answer in answers] == [200] * 7


async def test_a_body_that_is_refused_leaves_its_room(client: httpx.AsyncClient) -> None:
    answers = [await post(client, body_of(450_000)[1:]) for _ in range(3)]
    answers.append(await post(client, body_of(450_000)))
    assert [answer.status_code for answer in answers] == [400, 400, 400, 200]
