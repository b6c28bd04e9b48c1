"""Clips through chat and as jobs: a real server with the embedded clip model, and mp4s that show what was asked."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest

from support.server_process import wait_until
from training.shapes.checker import look
from training.shapes_video.checker import motion_of


def frames_of(mp4: bytes) -> list[npt.NDArray[np.uint8]]:
    """The frames of a clip of eight frames a second."""
    with av.open(io.BytesIO(mp4)) as clip:
        (stream,) = clip.streams.video
        assert stream.average_rate == 8
        return [frame.to_ndarray(format="rgb24") for frame in clip.decode(stream)]


def shown(frames: list[npt.NDArray[np.uint8]]) -> tuple[str, str, str]:
    """Colour and shape in the middle of a clip, and the motion from its first frame to its last."""
    (first, *_), (middle, *_), (last, *_) = (look(frames[k], nested=False).items for k in (0, 6, 12))
    return middle.color, middle.shape, motion_of(first, last)


@pytest.mark.slow
def test_clips_through_chat_and_as_jobs_show_what_was_asked(start_server: Callable[..., Any]) -> None:
    server = start_server("triptych/shapes-video", ready=1)
    message = {"role": "user", "content": "a red circle moving to the right"}
    answer = server.client.post("/v1/chat/completions", json={"messages": [message], "seed": 4})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    (part,) = body["choices"][0]["message"]["content"]
    assert (part["type"], part["seed"]) == ("video_url", 4)
    head, _, text = part["video_url"]["url"].partition(",")
    assert head == "data:video/mp4;base64"
    frames = frames_of(base64.b64decode(text, validate=True))
    assert [frame.shape for frame in frames] == [(64, 64, 3)] * 13
    assert shown(frames) == ("red", "circle", "right")
    assert body["metrics"][0]["replica"] == 0

    job = server.client.post("/v1/videos", json={"prompt": "a blue square that grows", "seed": 4}).json()

    def completed() -> bool:
        time.sleep(0.1)
        state = server.client.get(f"/v1/videos/{job['id']}").json()["status"]
        assert state != "failed"
        return bool(state == "completed")

    wait_until(completed, 60, "a completed video job")
    clip = server.client.get(f"/v1/videos/{job['id']}/content").content
    assert shown(frames_of(clip)) == ("blue", "square", "grow")


@pytest.mark.slow
def test_sizes_and_lengths_that_the_clip_model_cannot_draw_are_refused(start_server: Callable[..., Any]) -> None:
    server = start_server("triptych/shapes-video", ready=1)
    for asked, words in (({"size": "128x128"}, "64x64"), ({"num_frames": 17}, "13")):
        answer = server.client.post("/v1/videos", json={"prompt": "a red circle moving up", **asked})
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]
