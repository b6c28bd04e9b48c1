"""Chat and picture routes: shapes of the answers, fields, and the same parameters meaning the same on both."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
from api_fakes import PNG, VIDEO_MODEL, FakeOrchestrator, client_of, make_app
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triptych.messages import GenerationRequest

pytestmark = pytest.mark.anyio

IMAGES, CHAT = "/v1/images/generations", "/v1/chat/completions"
USER = [{"role": "user", "content": "a cat"}]


async def refused(client: httpx.AsyncClient, path: str, body: dict[str, Any], code: str, param: str | None) -> str:
    response = await client.post(path, json=body)
    error = response.json().get("error")
    assert error is not None, response.text[:200]
    assert (error["code"], error["param"]) == (code, param), error
    assert response.status_code == (404 if code == "model_not_found" else 400)
    message: str = error["message"]
    return message


async def test_pictures_have_openais_shape_and_name_every_seed(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    body = {"prompt": "a cat", "n": 3, "seed": 7, "size": "32x64", "output_format": "webp", "user": "u", "priority": -3}
    response = await client.post(IMAGES, json=body | {"model": "alias", "quality": "high", "style": "vivid"})
    answer = response.json()
    assert [image["seed"] for image in answer["data"]] == [7, 8, 9]
    assert all(base64.b64decode(image["b64_json"]) == PNG for image in answer["data"])
    assert (answer["output_format"], answer["size"]) == ("webp", "32x64")
    assert answer["ignored_parameters"] == ["quality", "style"]
    assert [set(metrics) for metrics in answer["metrics"]] == [
        {"replica", "queue_s", "inference_s", "steps", "batch_size_mean", "peak_memory_mb", "attempts"}
    ] * 3
    assert isinstance(answer["created"], int)
    assert int(response.headers["content-length"]) == len(response.content)
    request = orchestrator.submitted[0]
    assert (request.model, request.user, request.priority, request.n) == ("Qwen/Qwen-Image", "u", -3, 3)
    assert (request.params.width, request.params.height, request.output.format) == (32, 64, "webp")


async def test_chat_answers_one_choice_whose_parts_are_the_pictures(client: httpx.AsyncClient) -> None:
    body = {"messages": USER, "extra_body": {"seed": 5, "num_outputs_per_prompt": 2}, "temperature": 1, "top_p": 0.5}
    answer = (await client.post(CHAT, json=body)).json()
    (choice,) = answer["choices"]
    assert (answer["object"], answer["model"], choice["finish_reason"]) == (
        "chat.completion",
        "Qwen/Qwen-Image",
        "stop",
    )
    assert choice["message"]["role"] == "assistant"
    assert [part["seed"] for part in choice["message"]["content"]] == [5, 6]
    for part in choice["message"]["content"]:
        head, _, data = part["image_url"]["url"].partition(",")
        assert (part["type"], head, base64.b64decode(data)) == ("image_url", "data:image/png;base64", PNG)
    assert len(answer["metrics"]) == 2
    assert answer["ignored_parameters"] == ["temperature", "top_p"]
    assert "usage" not in answer


async def test_chat_can_carry_pictures_beside_an_empty_content(orchestrator: FakeOrchestrator) -> None:
    async with client_of(make_app(orchestrator, chat_image_format="images")) as client:
        answer = (await client.post(CHAT, json={"messages": USER, "n": 2, "seed": 1})).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == ""
    assert [(image["type"], image["index"], image["seed"]) for image in message["images"]] == [
        ("image_url", 0, 1),
        ("image_url", 1, 2),
    ]
    assert message["images"][0]["image_url"]["url"].startswith("data:image/png;base64,")


@pytest.mark.parametrize("image_format", ["parts", "images"])
async def test_a_video_model_answers_chat_with_mp4_parts_and_refuses_the_picture_route(image_format: str) -> None:
    orchestrator = FakeOrchestrator(VIDEO_MODEL)
    async with client_of(make_app(orchestrator, chat_image_format=image_format)) as client:
        answer = (await client.post(CHAT, json={"messages": USER, "seconds": 1, "seed": 3})).json()
        (part,) = answer["choices"][0]["message"]["content"]
        assert (part["type"], part["seed"]) == ("video_url", 3)
        assert part["video_url"]["url"].startswith("data:video/mp4;base64,")
        assert orchestrator.submitted[0].params.num_frames == 17
        await refused(client, IMAGES, {"prompt": "x"}, "invalid_value", "model")


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "b"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "a"),
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "a", "name": "n"}], "a"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "a\nb"),
        ([{"role": "assistant", "content": None}, {"role": "user", "content": "null"}], "null"),
    ],
)
async def test_the_prompt_is_the_text_of_the_last_user_message(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, messages: list[Any], prompt: str
) -> None:
    assert (await client.post(CHAT, json={"messages": messages})).status_code == 200
    assert orchestrator.submitted[0].params.prompt == prompt


@pytest.mark.parametrize(
    "messages",
    [
        *([], "x", {}, [3], [{}], [{"role": 3}], [{"role": "system", "content": "x"}], [{"role": "user"}]),
        *([{"role": "user", "content": value}] for value in (None, 3, {}, "", "  ", [], [3], [{}], ["x"])),
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
        [{"role": "user", "content": "x" * 32001}],
    ],
)
async def test_messages_without_a_prompt_are_refused(client: httpx.AsyncClient, messages: Any) -> None:
    await refused(client, CHAT, {"messages": messages}, "invalid_value", "messages")


async def test_null_is_called_null_and_a_second_extra_body_is_not_its_own_nearest_name(
    client: httpx.AsyncClient,
) -> None:
    for messages in ([{"role": "user", "content": None}], [None]):
        message = await refused(client, CHAT, {"messages": messages}, "invalid_value", "messages")
        assert message.endswith("got null")
    body = {"prompt": "x", "extra_body": {"extra_body": {}}}
    message = await refused(client, IMAGES, body, "unknown_parameter", "extra_body")
    assert message == "extra_body may not hold another extra_body"


async def test_missing_messages_and_missing_prompt_are_missing(client: httpx.AsyncClient) -> None:
    await refused(client, CHAT, {}, "missing_parameter", "messages")
    await refused(client, IMAGES, {"prompt": None}, "missing_parameter", "prompt")


async def test_a_prompt_beside_messages_is_unknown(client: httpx.AsyncClient) -> None:
    await refused(client, CHAT, {"messages": USER, "prompt": "x"}, "unknown_parameter", "prompt")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"stream": "yes"}, "invalid_value", "stream"),
        ({"stream": 1}, "invalid_value", "stream"),
        ({"model": "other"}, "model_not_found", "model"),
        ({"model": 3}, "invalid_value", "model"),
        ({"lora": {"name": "x"}}, "invalid_value", "lora.name"),
        ({"num_inference_step": 3}, "unknown_parameter", "num_inference_step"),
        ({"x" * 1000: 3}, "unknown_parameter", "x" * 256),
        ({"extra_params": {}}, "unknown_parameter", "extra_params"),
        ({"seed": 3, "extra_body": {"seed": 3}}, "invalid_value", "seed"),
        ({"extra_body": {"extra_body": {}}}, "unknown_parameter", "extra_body"),
        ({"extra_body": []}, "invalid_value", "extra_body"),
        ({"strength": 0.5}, "unsupported_parameter", "strength"),
        ({"num_frames": 5}, "unsupported_parameter", "num_frames"),
        ({"extra_args": {"latents": 1}}, "unsupported_parameter", "extra_args.latents"),
        ({"size": "4096x4096"}, "invalid_value", "size"),
        ({"num_inference_steps": 1001}, "invalid_value", "num_inference_steps"),
        ({"timeout": 601}, "invalid_value", "timeout"),
    ],
)
async def test_bad_fields_are_refused_alike_on_both_routes(
    client: httpx.AsyncClient, fields: dict[str, Any], code: str, param: str
) -> None:
    by_images = await refused(client, IMAGES, {"prompt": "x"} | fields, code, param)
    by_chat = await refused(client, CHAT, {"messages": USER} | fields, code, param)
    assert by_images == by_chat


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"response_format": "file"}, "invalid_value", "response_format"),
        ({"response_format": {"type": "text"}}, "invalid_value", "response_format"),
        ({"partial_images": 2}, "invalid_value", "partial_images"),
        ({"partial_images": 4}, "invalid_value", "partial_images"),
        ({"partial_images": -1}, "invalid_value", "partial_images"),
        ({"partial_images": True}, "invalid_value", "partial_images"),
        ({"temperature": 1}, "unknown_parameter", "temperature"),
    ],
)
async def test_fields_of_the_picture_route_are_checked(
    client: httpx.AsyncClient, fields: dict[str, Any], code: str, param: str
) -> None:
    await refused(client, IMAGES, {"prompt": "x"} | fields, code, param)


async def test_harmless_values_of_fields_that_are_not_built_pass(client: httpx.AsyncClient) -> None:
    fields = {"stream": False, "partial_images": 0, "response_format": "b64_json", "lora": None, "extra_body": None}
    assert (await client.post(IMAGES, json={"prompt": "x"} | fields)).status_code == 200
    chat = {"messages": USER, "stream": False, "stream_options": None, "response_format": {"type": "text"}}
    answer = (await client.post(CHAT, json=chat)).json()
    assert answer["ignored_parameters"] == ["response_format"]


async def test_the_session_comes_from_the_body_or_else_from_the_header(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    headers = {"x-session-id": "h"}
    await client.post(IMAGES, json={"prompt": "x"}, headers=headers)
    await client.post(IMAGES, json={"prompt": "x", "session": "b"}, headers=headers)
    assert [request.session for request in orchestrator.submitted] == ["h", "b"]
    response = await client.post(IMAGES, json={"prompt": "x"}, headers={"x-session-id": "h" * 257})
    assert response.json()["error"]["param"] == "session"


async def test_presets_of_the_stage_file_apply_and_useless_ones_are_warned_about(
    orchestrator: FakeOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(orchestrator, defaults={"num_inference_steps": 4, "strength": 0.5})
    async with client_of(app) as client:
        for _ in range(2):
            await client.post(IMAGES, json={"prompt": "x"})
    assert orchestrator.submitted[0].params.num_inference_steps == 4
    assert caplog.text.count("strength") == 1


def shape(request: GenerationRequest) -> tuple[Any, ...]:
    return (
        request.params,
        request.n,
        request.output,
        request.priority,
        request.timeout_s,
        request.session,
        request.user,
    )


PARAMETERS = st.fixed_dictionaries(
    {"seed": st.integers(-1, 3) | st.just(2**63 - 1)},
    optional={
        "negative_prompt": st.none() | st.text(max_size=3) | st.integers(),
        "n": st.none() | st.integers(0, 11) | st.booleans(),
        "num_outputs_per_prompt": st.integers(1, 2),
        "size": st.sampled_from(["32x32", "auto", "33x32", "8192x8192", "x", 3]),
        "width": st.sampled_from([32, 48, 0, 32.0]),
        "num_inference_steps": st.sampled_from([1, 1000, 1001, 0, "3"]),
        "guidance_scale": st.sampled_from([0, 3.5, 100, 101]),
        "output_format": st.sampled_from(["png", "jpeg", "gif"]),
        "priority": st.integers(-101, 101),
        "timeout": st.sampled_from([1, 0, 600, 601]),
        "session": st.text(max_size=3),
        "extra_args": st.sampled_from([{}, {"max_sequence_length": 3}, {"eta": 1}, None]),
    },
)


@given(parameters=PARAMETERS, nested=st.booleans())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
async def test_the_same_parameters_give_the_same_request_or_the_same_refusal_on_both_routes(
    parameters: dict[str, Any], nested: bool
) -> None:
    orchestrator = FakeOrchestrator()
    sent = {"extra_body": parameters} if nested else parameters
    async with client_of(make_app(orchestrator)) as client:
        images = await client.post(IMAGES, json={"prompt": "a cat"} | parameters)
        chat = await client.post(CHAT, json={"messages": USER} | sent)
    assert images.status_code == chat.status_code
    if images.status_code == 200:
        first, second = orchestrator.submitted
        assert shape(first) == shape(second)
    else:
        assert images.json() == chat.json()
