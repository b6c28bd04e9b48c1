"""A clip through chat: a real server with a tiny text-to-video pipeline, and an mp4 that plays."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import pytest


@pytest.mark.slow
def test_chat_with_a_video_model_answers_with_a_clip_that_plays(
    start_server: Callable[..., Any], tiny_pipelines: Path
) -> None:
    server = start_server(str(tiny_pipelines / "wan"), "--served-model-name", "tiny/wan", ready=1)
    message = {"role": "user", "content": "a red circle moves"}
    size = {"width": 32, "height": 32, "num_frames": 5, "fps": 8, "num_inference_steps": 2, "seed": 4}
    answer = server.client.post("/v1/chat/completions", json={"model": "tiny/wan", "messages": [message], **size})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    (part,) = body["choices"][0]["message"]["content"]
    assert (part["type"], part["seed"]) == ("video_url", 4)
    head, _, text = part["video_url"]["url"].partition(",")
    assert head == "data:video/mp4;base64"
    with av.open(io.BytesIO(base64.b64decode(text, validate=True))) as clip:
        (stream,) = clip.streams.video
        frames = [frame.to_ndarray(format="rgb24") for frame in clip.decode(stream)]
        assert stream.average_rate == 8
    assert [frame.shape for frame in frames] == [(32, 32, 3)] * 5
    assert body["metrics"][0]["replica"] == 0
