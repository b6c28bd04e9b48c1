"""Streams over HTTP: what each event looks like, when the answer begins, and how it ends."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import pytest
from api_fakes import PNG, VIDEO_MODEL, FakeOrchestrator, client_of, make_app
from openai.types import ImageGenCompletedEvent, ImageGenPartialImageEvent
from openai.types.chat import ChatCompletionChunk

from triptych.api import sse
from triptych.api.chat_chunks import ChatChunks
from triptych.api.image_events import ImageEvents
from triptych.api.sse import event
from triptych.errors import ErrorCode, TriptychError
from triptych.orchestrator.events import UnitPreview, UnitProgress

pytestmark = pytest.mark.anyio

IMAGES, CHAT = "/v1/images/generations", "/v1/chat/completions"
PREVIEW = UnitPreview(0, 0, "image/png", b"partial", 256, 128)


def events_of(text: str) -> list[tuple[str | None, Any]]:
    """Name and data of every event; comments are left out."""
    found: list[tuple[str | None, Any]] = []
    for block in text.split("\n\n")[:-1]:
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if lines:
            name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else None
            (data,) = lines
            assert data.startswith("data: ")
            found.append((name, data[6:] if data[6:] == "[DONE]" else json.loads(data[6:])))
    return found


async def streamed(client: httpx.AsyncClient, path: str = IMAGES, **body: Any) -> httpx.Response:
    own = {"messages": [{"role": "user", "content": "a cat"}]} if path == CHAT else {"prompt": "a cat"}
    return await client.post(path, json={**own, "stream": True, "seed": 4, **body})


def test_an_event_is_one_data_line_in_as_many_parts_as_it_came() -> None:
    assert b"".join(event([b"{", b"}"])) == b"data: {}\n\n"
    assert b"".join(event([b"{}"], name="a.b")) == b"event: a.b\ndata: {}\n\n"


async def test_pictures_come_as_the_official_events_with_index_seed_and_metrics(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    orchestrator.happens = [UnitProgress(0, 3, 20), PREVIEW, UnitPreview(1, 0, "image/png", b"other", 256, 128)]
    answer = await streamed(client, n=2, partial_images=1, quality="high")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert orchestrator.submitted[0].previews == 1
    names, data = zip(*events_of(answer.text), strict=True)
    assert names == ("image_generation.partial_image",) * 2 + ("image_generation.completed",) * 2
    assert [entry["type"] for entry in data] == list(names)
    assert [entry["image_index"] for entry in data] == [0, 1, 0, 1]
    partial = ImageGenPartialImageEvent.model_validate(data[0])
    assert (base64.b64decode(partial.b64_json), partial.partial_image_index) == (b"partial", 0)
    assert (partial.size, partial.output_format) == ("256x128", "png")
    final = ImageGenCompletedEvent.model_validate(data[3])
    assert base64.b64decode(final.b64_json) == PNG
    assert final.usage.total_tokens == final.usage.input_tokens_details.text_tokens == 0
    assert data[3]["seed"] == 5
    assert data[3]["metrics"]["replica"] == 1
    assert data[3]["ignored_parameters"] == ["quality"]


def test_events_of_edits_have_their_own_names() -> None:
    (event_of_edit,) = events_of(b"".join(ImageEvents("image_edit", ignored=[]).encode(PREVIEW)).decode())
    assert event_of_edit[0] == event_of_edit[1]["type"] == "image_edit.partial_image"


async def test_chat_streams_the_role_then_progress_then_the_pictures_then_the_end(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    orchestrator.happens = [UnitProgress(1, 20, 20)]
    answer = await streamed(client, CHAT, n=2, max_tokens=9)
    (*chunks, done) = [data for _, data in events_of(answer.text)]
    assert done == "[DONE]"
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert (chunk["id"], chunk["model"]) == (chunks[0]["id"], "Qwen/Qwen-Image")
        assert "usage" not in chunk
    role, progress, content, last = chunks
    assert ChatCompletionChunk.model_validate(role).choices[0].delta.role == "assistant"
    assert (progress["choices"][0]["delta"], progress["progress"]) == ({}, {"index": 1, "step": 20, "steps": 20})
    parts = content["choices"][0]["delta"]["content"]
    assert [part["seed"] for part in parts] == [4, 5]
    assert parts[0]["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert [metrics["replica"] for metrics in last["metrics"]] == [0, 1]
    assert last["ignored_parameters"] == ["max_tokens"]


async def test_chat_usage_is_a_chunk_of_its_own_when_asked_for(client: httpx.AsyncClient) -> None:
    answer = await streamed(client, CHAT, stream_options={"include_usage": True})
    (*chunks, usage, done) = [data for _, data in events_of(answer.text)]
    assert done == "[DONE]"
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 0)


async def test_chat_pictures_stand_in_images_where_the_server_was_told_so(orchestrator: FakeOrchestrator) -> None:
    async with client_of(make_app(orchestrator, chat_image_format="images")) as client:
        answer = await streamed(client, CHAT)
    deltas = [data["choices"][0]["delta"] for _, data in events_of(answer.text)[:-1]]
    assert deltas[1]["content"] == ""
    assert deltas[1]["images"][0]["image_url"]["url"].startswith("data:image/png;base64,")


async def test_a_clip_streams_through_chat() -> None:
    async with client_of(make_app(FakeOrchestrator(VIDEO_MODEL))) as client:
        answer = await streamed(client, CHAT)
    content = events_of(answer.text)[1][1]["choices"][0]["delta"]["content"]
    assert content[0]["video_url"]["url"].startswith("data:video/mp4;base64,")


def test_chat_progress_is_told_a_few_times_a_second_for_each_output() -> None:
    now = [0.0]
    chunks = ChatChunks({}, image_format="parts", usage=False, ignored=[], clock=lambda: now[0])
    told = []
    for at, unit, step in [
        (0.0, 0, 1),
        (0.05, 0, 2),
        (0.05, 1, 1),
        (0.15, 0, 3),
        (0.25, 0, 4),
        (0.3, 0, 9),
        (0.3, 0, 9),
    ]:
        now[0] = at
        told += [(unit, step) for _ in range(bool(chunks.encode(UnitProgress(unit, step, 9))))]
    assert told == [(0, 1), (1, 1), (0, 4), (0, 9)]


@pytest.mark.parametrize("path", [IMAGES, CHAT])
@pytest.mark.parametrize("code", [ErrorCode.QUEUE_FULL, ErrorCode.DRAINING])
async def test_what_is_not_accepted_is_answered_plainly(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, path: str, code: ErrorCode
) -> None:
    orchestrator.submit_error = TriptychError(code, "not now", retry_after_s=3)
    answer = await streamed(client, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429 if code == "queue_full" else 503, code)
    assert answer.headers["retry-after"] == "3"


async def test_a_failure_before_the_first_sign_of_the_engine_is_answered_plainly(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    orchestrator.happens = [TriptychError(ErrorCode.INVALID_VALUE, "too odd", param="prompt")]
    answer = await streamed(client, CHAT)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("path", [IMAGES, CHAT])
async def test_a_later_failure_is_the_last_event(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, path: str
) -> None:
    orchestrator.happens = [UnitProgress(0, 1, 20), TriptychError(ErrorCode.POISON_REQUEST, "it kills", param="prompt")]
    answer = await streamed(client, path)
    assert answer.status_code == 200
    name, data = events_of(answer.text)[-1]
    field = "messages" if path == CHAT else "prompt"
    expected = {"message": "it kills", "type": "server_error", "param": field, "code": "poison_request"}
    assert (name, data) == ("error", {"error": expected})


async def test_silence_is_filled_with_comments_that_begin_the_answer(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    orchestrator.hold = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, orchestrator.hold.set)
    answer = await streamed(client, CHAT)
    blocks = answer.text.split("\n\n")
    assert '"role":"assistant"' in blocks[0]
    assert blocks[1] == ": keep-alive"
    assert events_of(answer.text)[-1] == (None, "[DONE]")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (IMAGES, {"partial_images": 2, "stream": False}, "partial_images"),
        (IMAGES, {"response_format": "url"}, "response_format"),
        (CHAT, {"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        (CHAT, {"stream_options": "usage"}, "stream_options"),
        (CHAT, {"stream_options": {"include_usage": "yes"}}, "stream_options"),
    ],
)
async def test_stream_fields_are_checked(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await streamed(client, path, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert param.split(".")[0] in answer.json()["error"]["message"]


async def test_partial_images_zero_without_a_stream_is_a_plain_answer(client: httpx.AsyncClient) -> None:
    answer = await client.post(IMAGES, json={"prompt": "a cat", "partial_images": 0, "stream": False})
    assert (answer.status_code, len(answer.json()["data"])) == (200, 1)
