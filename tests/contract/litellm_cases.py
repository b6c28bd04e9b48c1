"""LiteLLM's client library, unchanged, against a server with `--chat-image-format images`; see `test_client_versions`.

Imports nothing but the client and pytest.
"""

from __future__ import annotations

import base64
import importlib.metadata
import os
from typing import Any

import pytest
from contract_target import Target

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import asks the internet for prices
import litellm

PNG = b"\x89PNG\r\n\x1a\n"
CIRCLE: Any = [{"role": "user", "content": "a red circle"}]


@pytest.fixture
def options(litellm_target: Target) -> dict[str, Any]:
    return {
        "model": "openai/simulated",
        "api_base": f"{litellm_target.url}/v1",
        "api_key": litellm_target.key,
        "max_retries": 0,
    }


def pictures(images: Any) -> list[bytes]:
    urls = [image["image_url"]["url"] for image in images]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    return [base64.b64decode(url.partition(",")[2], validate=True) for url in urls]


def test_this_is_the_version_that_was_asked_for() -> None:
    assert os.environ["TRIPTYCH_CONTRACT_CLIENT"] == f"litellm-{importlib.metadata.version('litellm')}"


def test_a_chat_has_its_pictures_in_images(options: dict[str, Any]) -> None:
    answer: Any = litellm.completion(messages=CIRCLE, extra_body={"seed": 3, "n": 2}, **options)
    message = answer.choices[0].message
    assert not message.content
    first, second = pictures(message.images)
    assert first.startswith(PNG)
    assert first != second
    assert answer.choices[0].finish_reason == "stop"


def test_a_chat_takes_a_picture(options: dict[str, Any]) -> None:
    answer: Any = litellm.completion(messages=CIRCLE, **options)
    content = [{"type": "text", "text": "make it blue"}, dict(answer.choices[0].message.images[0])]
    edited: Any = litellm.completion(messages=[{"role": "user", "content": content}], **options)
    assert pictures(edited.choices[0].message.images)[0].startswith(PNG)


def test_a_chat_stream_has_its_picture_in_a_delta(options: dict[str, Any]) -> None:
    chunks: list[Any] = list(litellm.completion(messages=CIRCLE, stream=True, **options))
    found = [images for chunk in chunks if (images := getattr(chunk.choices[0].delta, "images", None))]
    assert len(found) == 1
    assert pictures(found[0])[0].startswith(PNG)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_pictures_are_generated_and_edited(options: dict[str, Any]) -> None:
    made: Any = litellm.image_generation(prompt="a red circle", n=2, size="128x64", **options)
    drawn = [base64.b64decode(image.b64_json, validate=True) for image in made.data]
    assert [(picture[16:20], picture[20:24]) for picture in drawn] == [((128).to_bytes(4), (64).to_bytes(4))] * 2
    edited: Any = litellm.image_edit(image=drawn[0], prompt="make it blue", **options)
    assert base64.b64decode(edited.data[0].b64_json, validate=True).startswith(PNG)


def test_refusals_and_failures_are_the_errors_of_their_kind_with_our_words(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="prompt must not be blank"):
        litellm.completion(messages=[{"role": "user", "content": " "}], **options)
    with pytest.raises(litellm.NotFoundError, match="'none' does not exist"):
        litellm.completion(messages=CIRCLE, **(options | {"model": "openai/none"}))
    with pytest.raises(litellm.AuthenticationError, match="API key is needed"):
        litellm.completion(messages=CIRCLE, **(options | {"api_key": "wrong"}))
    with pytest.raises(litellm.InternalServerError, match="simulated fault"):
        litellm.completion(messages=[{"role": "user", "content": "[[error]]"}], **options)
