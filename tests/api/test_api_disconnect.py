"""A client that goes away: its request is aborted at once, wherever it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from api_fakes import NAMES, FakeOrchestrator, make_app
from starlette.requests import Request

from triptych.api.access import ApiKeys
from triptych.api.context import ApiContext
from triptych.api.fields import IMAGE_FIELDS
from triptych.api.generation import closing_on_disconnect, submit
from triptych.api.media import MediaReader
from triptych.api.middleware import give_request_ids
from triptych.api.results import Results
from triptych.config.parameters import Limits, SamplingDefaults

pytestmark = pytest.mark.anyio

SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/v1/images/generations",
    "headers": [(b"content-type", b"application/json")],
    "query_string": b"",
    "root_path": "",
}
BODY = {"type": "http.request", "body": b'{"prompt":"x"}', "more_body": False}


async def run(orchestrator: FakeOrchestrator, messages: asyncio.Queue[dict[str, Any]]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await asyncio.wait_for(make_app(orchestrator)(dict(SCOPE), messages.get, send), 10)
    return sent


async def test_a_disconnect_while_outputs_are_awaited_aborts_the_request(orchestrator: FakeOrchestrator) -> None:
    orchestrator.hold = asyncio.Event()
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    messages.put_nowait(BODY)
    running = asyncio.create_task(run(orchestrator, messages))
    await asyncio.wait_for(orchestrator.arrived.wait(), 10)
    assert not orchestrator.streams[0].closed
    messages.put_nowait({"type": "http.disconnect"})
    sent = await running
    assert orchestrator.streams[0].closed
    assert sent[0]["status"] == 499


async def test_a_disconnect_within_the_body_starts_nothing(orchestrator: FakeOrchestrator) -> None:
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": b'{"prompt"', "more_body": True})
    messages.put_nowait({"type": "http.disconnect"})
    assert await run(orchestrator, messages) == []
    assert orchestrator.submitted == []


async def test_a_cancelled_handler_aborts_its_request(orchestrator: FakeOrchestrator) -> None:
    orchestrator.hold = asyncio.Event()
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    messages.put_nowait(BODY)
    running = asyncio.create_task(run(orchestrator, messages))
    await asyncio.wait_for(orchestrator.arrived.wait(), 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert orchestrator.streams[0].closed


async def test_submit_and_the_watch_on_the_connection_work_apart(
    orchestrator: FakeOrchestrator, tmp_path: Path
) -> None:
    app_context = ApiContext(
        orchestrator=cast(Any, orchestrator),
        jobs=cast(Any, None),
        served_model_names=NAMES,
        defaults=SamplingDefaults(),
        limits=Limits(max_pixels=1 << 20, max_num_frames=1, max_num_inference_steps=50, request_timeout_s=60),
        max_body_size=1024,
        chat_image_format="parts",
        started_at=0,
        keys=ApiKeys((), None),
        log_prompts=False,
        public_url=None,
        results=Results(tmp_path),
        media=MediaReader(max_pixels=1 << 20, max_fetched_bytes=0, fetcher=None),
    )
    http = Request(dict(SCOPE))
    give_request_ids(http.scope)
    stream = submit(app_context, http, IMAGE_FIELDS.sort({"prompt": "x"}))
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    with closing_on_disconnect(messages.get, stream):
        assert not orchestrator.streams[0].closed
        messages.put_nowait({"type": "http.disconnect"})
        async with asyncio.timeout(10):
            while not orchestrator.streams[0].closed:  # noqa: ASYNC110 - the fake has no event for it
                await asyncio.sleep(0)


async def test_no_watcher_outlives_its_request(orchestrator: FakeOrchestrator) -> None:
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    messages.put_nowait(BODY)
    sent = await run(orchestrator, messages)
    assert sent[0]["status"] == 200
    await asyncio.sleep(0)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in others if "_close_on_disconnect" in repr(task)]
