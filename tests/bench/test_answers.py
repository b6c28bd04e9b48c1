"""An answer counts only when there is a picture or clip in it."""

from __future__ import annotations

import base64
import json

import pytest

from triptych.bench.answers import AnswerError, error_of, read_chat, read_images, read_video

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
PNG_TEXT = base64.b64encode(PNG).decode()


def chat(*parts: object, **more: object) -> bytes:
    return json.dumps({"choices": [{"message": {"content": parts}}], **more}).encode()


def picture(url: str = f"data:image/png;base64,{PNG_TEXT}") -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}, "seed": 3}


def test_a_chat_answer_yields_its_pictures_and_the_largest_metrics() -> None:
    metrics = [
        {"replica": 1, "queue_s": 0.5, "inference_s": 2.0, "peak_memory_mb": 10.0, "attempts": 1},
        {"replica": 0, "queue_s": 1.5, "inference_s": 1.0, "peak_memory_mb": 30.0, "attempts": 2},
    ]
    answer = read_chat(chat({"type": "text", "text": "here"}, picture(), picture(), metrics=metrics))
    assert [media.mime for media in answer.outputs] == ["image/png", "image/png"]
    assert answer.outputs[0].content() == PNG
    assert (answer.replicas, answer.queue_s, answer.inference_s) == ((1, 0), 1.5, 2.0)
    assert (answer.peak_memory_mb, answer.attempts) == (30.0, 2)


def test_a_chat_answer_may_keep_its_pictures_beside_the_text() -> None:
    body = json.dumps({"choices": [{"message": {"content": "", "images": [picture()]}}]}).encode()
    assert len(read_chat(body).outputs) == 1


def test_memory_beside_the_picture_and_an_unknown_metrics_object_are_understood() -> None:
    answer = read_chat(chat({**picture(), "peak_memory_mb": 77.0}, metrics={"stage_durations": {}}))
    assert answer.peak_memory_mb == 77.0
    assert answer.queue_s is None


def test_an_images_answer_yields_base64_and_addresses() -> None:
    body = json.dumps({"data": [{"b64_json": PNG_TEXT}, {"url": "http://host/x.png"}], "metrics": None}).encode()
    first, second = read_images(body).outputs
    assert first.content() == PNG
    assert (second.url, second.content()) == ("http://host/x.png", None)


def test_a_video_is_told_by_its_first_bytes() -> None:
    answer = read_video(b"\x00\x00\x00\x18ftypisom", {"status": "completed"})
    assert answer.outputs[0].mime == "video/mp4"


@pytest.mark.parametrize(
    ("body", "error_class"),
    [
        (b"", "invalid_answer"),
        (b"<html>", "invalid_answer"),
        (b"[]", "invalid_answer"),
        (b"{}", "no_output"),
        (chat(), "no_output"),
        (chat({"type": "text", "text": "sorry"}), "no_output"),
        (json.dumps({"choices": [{"message": {"content": "sorry"}}]}).encode(), "no_output"),
        (chat(picture("data:image/png,plain")), "invalid_answer"),
        (chat(picture("data:image/png;base64,")), "invalid_answer"),
        (chat(picture("data:image/png;base64,aGVsbG8gd29ybGQgaGVsbG8gd29ybGQ=")), "invalid_answer"),
    ],
)
def test_a_200_without_a_picture_is_a_failure(body: bytes, error_class: str) -> None:
    with pytest.raises(AnswerError) as caught:
        read_chat(body)
    assert caught.value.error_class == error_class


def test_errors_are_classed_by_the_code_of_the_envelope_else_by_status() -> None:
    envelope = {"error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}}
    assert error_of(429, json.dumps(envelope).encode()) == ("queue_full", "full")
    assert error_of(502, b"Bad gateway")[0] == "http_502"
    assert error_of(500, b'{"error": {"message": "x", "code": 500}}') == ("http_500", "x")
    assert error_of(500, b'{"detail": "x"}')[0] == "http_500"
