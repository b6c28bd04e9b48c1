"""A request that is sent twice under one key is worked on once."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from api_fakes import FakeOrchestrator, client_of, make_app

from triptych.api.body import ChunkedJson
from triptych.api.idempotency import Answers
from triptych.errors import ErrorCode, TriptychError
from triptych.jobs.job import IdempotencyKey

pytestmark = pytest.mark.anyio
PATH = "/v1/images/generations"


async def post(client: httpx.AsyncClient, key: str | None, **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"idempotency-key": key}
    return await client.post(PATH, json={"prompt": "a cat"} | fields, headers=headers)


async def test_the_same_key_and_body_get_the_same_answer_and_other_keys_their_own(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    answers = [await post(client, key) for key in ("a", "a", "b", None)]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert answers[0].content == answers[1].content
    assert len({answer.json()["data"][0]["seed"] for answer in answers}) == 3
    assert len({answer.headers["x-request-id"] for answer in answers}) == 4
    assert len(orchestrator.submitted) == 3


async def test_the_same_key_with_another_body_is_a_conflict(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    await post(client, "a")
    answer = await post(client, "a", n=2)
    assert (answer.status_code, answer.json()["error"]["param"]) == (409, "idempotency-key")
    assert answer.headers["x-should-retry"] == "false"
    assert len(orchestrator.submitted) == 1


async def test_duplicates_wait_for_the_first_one(client: httpx.AsyncClient, orchestrator: FakeOrchestrator) -> None:
    orchestrator.hold = asyncio.Event()
    pending = [asyncio.create_task(post(client, "a")) for _ in range(3)]
    await orchestrator.arrived.wait()
    assert (await post(client, "a", n=2)).status_code == 409
    orchestrator.hold.set()
    assert len({(await answer).content for answer in pending}) == 1
    assert len(orchestrator.submitted) == 1


async def test_a_failure_is_not_remembered(client: httpx.AsyncClient, orchestrator: FakeOrchestrator) -> None:
    orchestrator.end_error = TriptychError(ErrorCode.ENGINE_ERROR, "it broke")
    assert (await post(client, "a")).status_code == 500
    orchestrator.end_error = None
    assert (await post(client, "a")).status_code == 200


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
async def test_a_key_that_cannot_be_one_is_refused(client: httpx.AsyncClient, key: str) -> None:
    answer = await post(client, key)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "idempotency-key")


async def test_a_form_is_the_same_whatever_its_boundary(orchestrator: FakeOrchestrator) -> None:
    named = []
    async with client_of(make_app(orchestrator)) as client:
        for boundary in ("one", "another"):
            body = f'--{boundary}\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n--{boundary}--\r\n'
            headers = {"idempotency-key": "k", "content-type": f"multipart/form-data; boundary={boundary}"}
            named.append(await client.post("/v1/images/edits", content=body, headers=headers))
    assert [answer.json()["error"]["code"] for answer in named] == ["missing_parameter"] * 2


async def test_two_callers_do_not_share_keys(orchestrator: FakeOrchestrator) -> None:
    app = make_app(orchestrator, api_keys=("one", "two"))
    for key in ("one", "two"):
        async with client_of(app, key=key) as client:
            assert (await post(client, "a", n=len(key) if key == "one" else 1)).status_code == 200
    assert len(orchestrator.submitted) == 2


async def test_answers_are_kept_for_a_time_and_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    answers = Answers(clock=lambda: now[0])
    made: list[str] = []

    async def ask(key: str, size: int = 10) -> None:
        async def make() -> ChunkedJson:
            made.append(key)
            return ChunkedJson([bytes(size)])

        await answers.once((None, "/", key), IdempotencyKey(key, "d"), make)

    monkeypatch.setattr("triptych.api.idempotency._MAX_KEPT_BYTES", 100)
    monkeypatch.setattr("triptych.api.idempotency._MAX_KEPT", 3)
    for key in ("a", "b", "a", "c", "d", "e", "e"):
        await ask(key)
    assert made == ["a", "b", "c", "d", "e"]
    await ask("a")
    assert made[-1] == "a"
    await ask("large", 101)
    await ask("large", 101)
    assert made[-2:] == ["large", "large"]
    now[0] = 601.0
    await ask("e")
    assert made[-1] == "e"
    await asyncio.gather(*(ask(key, 60) for key in ("f", "g", "h")))
    assert answers._bytes <= 100
