"""The official OpenAI client against a real uvicorn on a loopback port, without changing anything in it."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from api_fakes import PNG, FakeOrchestrator, make_app

from support.live_app import serve
from triptych.errors import ErrorCode, TriptychError


@pytest.fixture
def live(orchestrator: FakeOrchestrator) -> Iterator[str]:
    """Base URL of the app on a real port."""
    with serve(make_app(orchestrator)) as base_url:
        yield base_url


@pytest.fixture
def client(live: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live, api_key="none", max_retries=0) as client:
        yield client


def test_images_generate(client: openai.OpenAI, orchestrator: FakeOrchestrator) -> None:
    response = client.images.generate(
        model="Qwen/Qwen-Image",
        prompt="a cat",
        n=2,
        size="256x256",
        output_format="jpeg",
        response_format="b64_json",
        extra_body={"seed": 4, "num_inference_steps": 3},
    )
    assert response.data is not None
    assert [base64.b64decode(image.b64_json or "") for image in response.data] == [PNG, PNG]
    assert (response.output_format, response.size) == ("jpeg", "256x256")
    params = orchestrator.submitted[0].params
    assert (params.seed, params.num_inference_steps, params.width) == (4, 3, 256)


@pytest.mark.parametrize("nested", [False, True])
def test_chat_completions_with_flat_and_nested_extra_body(
    client: openai.OpenAI, orchestrator: FakeOrchestrator, nested: bool
) -> None:
    extra: dict[str, Any] = {"seed": 4, "width": 64, "height": 32}
    completion = client.chat.completions.create(
        model="alias",
        messages=[{"role": "user", "content": "a cat"}],
        n=2,
        temperature=1,
        extra_body={"extra_body": extra} if nested else extra,
    )
    content: Any = completion.choices[0].message.content
    assert [part["seed"] for part in content] == [4, 5]
    assert content[0]["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert (completion.usage, completion.choices[0].finish_reason) == (None, "stop")
    assert (orchestrator.submitted[0].params.width, orchestrator.submitted[0].params.height) == (64, 32)


def test_chat_completions_without_extra_body(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(model="alias", messages=[{"role": "user", "content": "a cat"}])
    content: Any = completion.choices[0].message.content
    assert len(content) == 1


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["Qwen/Qwen-Image", "alias"]
    assert client.models.retrieve("Qwen/Qwen-Image").id == "Qwen/Qwen-Image"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_refusal_is_a_bad_request_error_that_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="x", n=11)
    assert (caught.value.code, caught.value.param, caught.value.type) == ("invalid_value", "n", "invalid_request_error")
    assert caught.value.request_id


@pytest.mark.parametrize(
    ("code", "error", "tries"),
    [
        (ErrorCode.ENGINE_ERROR, openai.InternalServerError, 1),
        (ErrorCode.DEADLINE_EXCEEDED, openai.InternalServerError, 1),
        (ErrorCode.CONFLICT, openai.ConflictError, 1),
        (ErrorCode.NOT_READY, openai.InternalServerError, 2),
        (ErrorCode.QUEUE_FULL, openai.RateLimitError, 2),
    ],
)
def test_the_client_repeats_only_what_a_repeat_may_mend_and_waits_as_long_as_it_is_told(
    live: str,
    orchestrator: FakeOrchestrator,
    monkeypatch: pytest.MonkeyPatch,
    code: ErrorCode,
    error: type[openai.APIStatusError],
    tries: int,
) -> None:
    calls, waits = [], list[float]()
    monkeypatch.setattr(time, "sleep", waits.append)

    def submit(request: Any) -> Any:
        calls.append(request)
        raise TriptychError(code, "in words", retry_after_s=7.0)

    orchestrator.submit = submit  # type: ignore[method-assign]
    with openai.OpenAI(base_url=live, api_key="none", max_retries=1) as client, pytest.raises(error, match="in words"):
        client.images.generate(prompt="x")
    assert (len(calls), waits) == (tries, [7.0] * (tries - 1))


def test_closing_the_connection_aborts_the_request(live: str, orchestrator: FakeOrchestrator) -> None:
    closed = threading.Event()
    submit = orchestrator.submit

    def submit_and_hold(request: Any) -> Any:
        orchestrator.hold = asyncio.Event()
        stream = submit(request)
        close = stream.close
        stream.close = lambda: (closed.set(), close())[1]  # type: ignore[method-assign]
        return stream

    orchestrator.submit = submit_and_hold  # type: ignore[method-assign]
    with (
        openai.OpenAI(base_url=live, api_key="none", max_retries=0, timeout=0.5) as client,
        pytest.raises(openai.APITimeoutError),
    ):
        client.images.generate(prompt="x")
    assert closed.wait(10)
