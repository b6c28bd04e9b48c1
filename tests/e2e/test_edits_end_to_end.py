"""Edits by the official client: a real server with a tiny pipeline, one picture, a mask, a chat, and a refusal."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image


def png(image: Image.Image) -> bytes:
    target = io.BytesIO()
    image.save(target, "PNG")
    return target.getvalue()


def pixels(text: str | None) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text or "", validate=True))))


@pytest.mark.slow
def test_the_official_client_edits_pictures_with_a_text_to_image_model(
    start_server: Callable[..., Any], tiny_pipelines: Path
) -> None:
    server = start_server(str(tiny_pipelines / "sd15"), "--served-model-name", "tiny/sd15", ready=1)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 32, 3), np.uint8))
    picture, mask = png(noise), png(Image.new("RGBA", noise.size, (0, 0, 0, 0)))
    options: dict[str, Any] = {"seed": 3, "num_inference_steps": 4, "strength": 0.5}

    redrawn, again = (
        client.images.edit(image=picture, prompt="a cat", size="auto", extra_body=options) for _ in range(2)
    )
    assert redrawn.data is not None
    assert again.data is not None
    result = pixels(redrawn.data[0].b64_json)
    assert result.shape == (48, 32, 3)
    np.testing.assert_array_equal(result, pixels(again.data[0].b64_json))

    filled = client.images.edit(image=[picture], mask=mask, prompt="a cat", extra_body=options)
    assert filled.data is not None
    assert not np.array_equal(result, pixels(filled.data[0].b64_json))

    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    content: Any = [{"type": "text", "text": "a cat"}, {"type": "image_url", "image_url": {"url": url}}]
    messages: Any = [{"role": "user", "content": content}]
    chat: Any = client.chat.completions.create(model="tiny/sd15", messages=messages, extra_body=options)
    np.testing.assert_array_equal(
        result, pixels(chat.choices[0].message.content[0]["image_url"]["url"].partition(",")[2])
    )

    with pytest.raises(openai.BadRequestError) as caught:
        client.images.edit(image=[picture, picture], prompt="a cat")
    assert (caught.value.code, caught.value.param) == ("invalid_value", "image")
    assert "StableDiffusionImg2ImgPipeline takes one input picture, got 2" in str(caught.value)
