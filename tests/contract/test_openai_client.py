"""The official `openai` client, unchanged, against a server: what it sends is understood, what it reads is right.

Imports nothing but the client and pytest, so that it runs in the environment of any client version.
"""

from __future__ import annotations

import base64
import importlib.metadata
import os
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from contract_target import Target

PNG = b"\x89PNG\r\n\x1a\n"
MAGIC = {"png": PNG, "jpeg": b"\xff\xd8\xff", "webp": b"RIFF"}


@pytest.fixture(scope="module")
def client(target: Target) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{target.url}/v1", api_key=target.key, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def size_of(png: bytes) -> tuple[int, int]:
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def pictures(answer: Any) -> list[bytes]:
    return [base64.b64decode(image.b64_json, validate=True) for image in answer.data]


def test_this_is_the_version_that_was_asked_for() -> None:
    version = importlib.metadata.version("openai")
    assert openai.__version__ == version
    assert os.environ.get("TRIPTYCH_CONTRACT_CLIENT", f"openai-{version}") == f"openai-{version}"


def test_models_are_listed_and_retrieved(client: openai.OpenAI, model: str) -> None:
    assert model in [entry.id for entry in client.models.list()]
    one = client.models.retrieve(model)
    assert (one.id, one.object, one.owned_by) == (model, "model", "triptych")


def test_generate_with_nothing_but_a_prompt(client: openai.OpenAI) -> None:
    answer = client.images.generate(prompt="a red circle")
    (picture,) = pictures(answer)
    assert picture.startswith(PNG)
    assert answer.usage is None
    assert answer.created > 1_700_000_000


def test_generate_with_every_option_of_the_client(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"background": "auto", "moderation": "low", "quality": "high", "style": "vivid"}
    answer = client.images.generate(
        model=model,
        prompt="a red circle",
        n=2,
        size="256x256",
        output_format="png",
        output_compression=50,
        response_format="b64_json",
        partial_images=0,
        stream=False,
        user="me",
        extra_headers={"x-request-id": "contract-1"},
        **options,
    )
    assert [size_of(picture) for picture in pictures(answer)] == [(256, 256), (256, 256)]
    assert (answer.size, answer.output_format) == ("256x256", "png")
    extra = answer.model_extra or {}
    assert extra["ignored_parameters"] == sorted(options)
    assert len(extra["metrics"]) == 2


def test_generate_with_our_options_in_extra_body(client: openai.OpenAI) -> None:
    ours = {
        "negative_prompt": "blue",
        "num_inference_steps": 2,
        "guidance_scale": 4.5,
        "seed": 41,
        "width": 128,
        "height": 64,
        "priority": -1,
        "timeout": 30,
        "session": "s",
    }
    answer = client.images.generate(prompt="a red circle", n=2, extra_body=ours)
    assert [size_of(picture) for picture in pictures(answer)] == [(128, 64)] * 2
    assert answer.data is not None
    assert [(image.model_extra or {})["seed"] for image in answer.data] == [41, 42]


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_generate_in_every_format(client: openai.OpenAI, output_format: Any) -> None:
    answer = client.images.generate(prompt="x", size="256x256", output_format=output_format, output_compression=80)
    (picture,) = pictures(answer)
    assert picture.startswith(MAGIC[output_format])
    assert answer.output_format == output_format


def test_generate_with_links(client: openai.OpenAI) -> None:
    answer = client.images.generate(prompt="x", size="256x256", response_format="url")
    assert answer.data is not None
    (image,) = answer.data
    assert image.b64_json is None
    assert image.url is not None
    with urllib.request.urlopen(image.url, timeout=30) as link:
        assert link.headers["content-type"] == "image/png"
        assert size_of(link.read()) == (256, 256)


def drawn(client: openai.OpenAI) -> bytes:
    """A picture that can be an input."""
    return pictures(client.images.generate(prompt="x", size="256x256"))[0]


@pytest.mark.parametrize("count", [1, 3])
def test_an_edit_takes_one_picture_or_several(client: openai.OpenAI, model: str, count: int) -> None:
    picture = drawn(client)
    files: Any = [(f"{index}.png", picture, "image/png") for index in range(count)]
    answer = client.images.edit(
        model=model,
        image=files if count > 1 else picture,
        prompt="make it blue",
        n=2,
        size="256x256",
        output_format="webp",
        output_compression=70,
        extra_body={"seed": 0, "num_inference_steps": 2},
    )
    assert [edited[:4] for edited in pictures(answer)] == [b"RIFF"] * 2
    assert answer.data is not None
    assert [(image.model_extra or {})["seed"] for image in answer.data] == [0, 1]


def test_an_edit_takes_a_mask(client: openai.OpenAI) -> None:
    picture = drawn(client)
    answer = client.images.edit(image=picture, mask=picture, prompt="make it blue", extra_body={"strength": 0.5})
    assert [size_of(edited) for edited in pictures(answer)] == [(256, 256)]
    with pytest.raises(openai.BadRequestError, match="is no picture in a known format") as caught:
        client.images.edit(image=picture, mask=b"not a picture", prompt="x")
    assert (caught.value.code, caught.value.param) == ("invalid_image", "mask")


def test_a_stream_of_an_edit_has_the_events_of_edits(client: openai.OpenAI) -> None:
    stream = client.images.edit(image=drawn(client), prompt="x", size="256x256", stream=True, partial_images=2)
    events: list[Any] = list(stream)
    assert [event.type for event in events] == ["image_edit.partial_image"] * 2 + ["image_edit.completed"]


def test_a_file_that_is_no_picture_is_a_bad_request_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.edit(image=b"not a picture", prompt="x")
    assert (caught.value.code, caught.value.param) == ("invalid_image", "image")


@pytest.mark.parametrize("previews", [0, 1, 3])
def test_a_stream_of_partial_pictures_ends_with_the_final_one(client: openai.OpenAI, previews: int) -> None:
    options: dict[str, Any] = {"prompt": "x", "size": "256x256", "extra_body": {"seed": 3, "num_inference_steps": 8}}
    stream = client.images.generate(**options, stream=True, partial_images=previews)
    events: list[Any] = list(stream)
    names = [event.type for event in events]
    assert names == ["image_generation.partial_image"] * previews + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:-1]] == list(range(previews))
    for event in events:
        assert size_of(base64.b64decode(event.b64_json, validate=True)) == (256, 256)
    (final,) = pictures(client.images.generate(**options))
    assert base64.b64decode(events[-1].b64_json) == final


def test_a_failure_within_a_stream_is_an_api_error(client: openai.OpenAI, model: str) -> None:
    if model != "simulated":
        pytest.skip("only the simulated engine fails when it is told to")
    with pytest.raises(openai.APIError) as caught:
        list(client.images.generate(prompt="[[error]]", size="256x256", stream=True, partial_images=2))
    assert caught.value.code == "engine_error"
    assert caught.value.message


def test_a_chat_stream_carries_the_picture_in_its_last_content(client: openai.OpenAI, model: str) -> None:
    messages: Any = [{"role": "user", "content": "a red circle"}]
    chunks: list[Any] = list(client.chat.completions.create(model=model, messages=messages, stream=True))
    contents = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    (part,) = contents[-1]
    assert part["image_url"]["url"].startswith("data:image/png;base64,")
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


@pytest.mark.parametrize("extra", [None, {"seed": 5, "num_inference_steps": 2}, {"extra_body": {"seed": 5, "n": 2}}])
def test_chat_with_and_without_extra_body(client: openai.OpenAI, model: str, extra: Any) -> None:
    messages: Any = [
        {"role": "system", "content": "You draw."},
        {"role": "user", "content": [{"type": "text", "text": "a red circle"}]},
    ]
    completion = client.chat.completions.create(model=model, messages=messages, temperature=0.5, extra_body=extra)
    assert completion.choices[0].finish_reason == "stop"
    content: Any = completion.choices[0].message.content
    assert len(content) == (2 if extra and "extra_body" in extra else 1)
    for index, part in enumerate(content):
        assert part["type"] == "image_url"
        kind, _, data = part["image_url"]["url"].partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(PNG)
        assert extra is None or part["seed"] == 5 + index
    assert completion.usage is None


def test_the_raw_answer_has_id_and_timing(client: openai.OpenAI) -> None:
    raw = client.images.with_raw_response.generate(
        prompt="x", size="256x256", extra_headers={"x-request-id": "contract-2"}
    )
    assert raw.headers["x-request-id"] == "contract-2"
    assert raw.headers["server-timing"].startswith("queue;dur=")
    assert len(pictures(raw.parse())) == 1


@pytest.mark.parametrize(
    ("options", "code", "param", "words"),
    [
        ({"n": 11}, "invalid_value", "n", "10"),
        ({"size": "100000x100000"}, "invalid_value", "size", "100000"),
        ({"extra_body": {"seeed": 1}}, "unknown_parameter", "seeed", "seed"),
        ({"prompt": "  "}, "invalid_value", "prompt", "blank"),
    ],
)
def test_what_the_caller_can_mend_is_a_bad_request_error(
    client: openai.OpenAI, options: Any, code: str, param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(**{"prompt": "x", **options})
    error = caught.value
    assert (error.code, error.param, error.type) == (code, param, "invalid_request_error")
    assert words in error.message
    assert error.request_id


def test_an_unknown_model_or_id_is_a_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(model="no-such-model", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "no-such-model" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such")


def test_a_wrong_key_is_an_authentication_error(target: Target) -> None:
    if target.key == "none":
        pytest.skip("this server has no keys")
    with (
        openai.OpenAI(base_url=f"{target.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="API key is needed") as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_another_request_under_a_used_key_is_a_conflict_error_that_is_not_repeated(client: openai.OpenAI) -> None:
    headers = {"idempotency-key": uuid.uuid4().hex}
    first, again = (client.images.generate(prompt="x", extra_headers=headers) for _ in range(2))
    assert pictures(first) == pictures(again)
    with pytest.raises(openai.ConflictError) as caught:
        client.with_options(max_retries=2).images.generate(prompt="y", extra_headers=headers)
    assert (caught.value.code, caught.value.param) == ("conflict", "idempotency-key")
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


def test_what_only_the_operator_may_do_is_a_permission_denied_error(client: openai.OpenAI, target: Target) -> None:
    if target.key == "none":
        pytest.skip("this server has no keys")
    with pytest.raises(openai.PermissionDeniedError, match="admin") as caught:
        client.put("/replicas", body={"count": 1}, cast_to=object)
    assert caught.value.code == "permission_denied"


def test_a_failure_of_the_engine_is_an_internal_server_error_that_is_not_repeated(
    client: openai.OpenAI, model: str
) -> None:
    if model != "simulated":
        pytest.skip("only the simulated engine fails when it is told to")
    with pytest.raises(openai.InternalServerError) as caught:
        client.with_options(max_retries=2).images.generate(prompt="[[error]]", size="256x256")
    assert caught.value.code == "engine_error"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


def test_a_deadline_is_an_internal_server_error_that_is_not_repeated(client: openai.OpenAI, model: str) -> None:
    if model != "simulated":
        pytest.skip("only the simulated engine is slow when it is told to")
    with pytest.raises(openai.InternalServerError) as caught:
        client.with_options(max_retries=2).images.generate(
            prompt="[[slow:20]]", size="256x256", extra_body={"timeout": 0.3}
        )
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"
