"""Reading an answer: is there really a picture in it, and what does the server say about its making?

Bodies are megabytes of base64, so they are decoded into structs that name only the fields needed, and of each
picture only the first bytes are looked at, unless the pictures are saved.
"""

from __future__ import annotations

import binascii
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

__all__ = ["Answer", "AnswerError", "Media", "error_of", "read_chat", "read_images", "read_video"]

_Body = TypeVar("_Body", bound=msgspec.Struct)

_MAGIC = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (8, b"WEBP", "image/webp"),
    (4, b"ftyp", "video/mp4"),
)


class AnswerError(Exception):
    """A 200 that is not an answer; `error_class` is the key under which the report counts it."""

    def __init__(self, error_class: str, message: str) -> None:
        super().__init__(message)
        self.error_class = error_class


@dataclass(frozen=True, slots=True)
class Media:
    """One picture or clip: base64 text, raw bytes, or the address where the server keeps it."""

    mime: str | None
    base64_text: str | None = field(default=None, repr=False)
    data: bytes | None = field(default=None, repr=False)
    url: str | None = None

    def content(self) -> bytes | None:
        """The encoded bytes, where the answer holds them. Raises `AnswerError` for bad base64."""
        if self.data is not None or self.base64_text is None:
            return self.data
        try:
            return binascii.a2b_base64(self.base64_text)
        except binascii.Error as error:
            raise AnswerError("invalid_answer", f"bad base64: {error}") from error


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request yielded; times in seconds, memory in MB, None where the server does not say."""

    outputs: tuple[Media, ...]
    replicas: tuple[int, ...] = ()
    queue_s: float | None = None
    inference_s: float | None = None
    peak_memory_mb: float | None = None
    attempts: int | None = None


class _Url(msgspec.Struct):
    url: str | None = None


class _Part(msgspec.Struct):
    image_url: _Url | None = None
    video_url: _Url | None = None
    peak_memory_mb: float | None = None


class _Message(msgspec.Struct):
    content: list[_Part] | str | None = None
    images: list[_Part] | None = None


class _Choice(msgspec.Struct):
    message: _Message = msgspec.field(default_factory=_Message)


class _ChatBody(msgspec.Struct):
    choices: list[_Choice] = []
    metrics: Any = None


class _ImageItem(msgspec.Struct):
    b64_json: str | None = None
    url: str | None = None


class _ImagesBody(msgspec.Struct):
    data: list[_ImageItem] = []
    metrics: Any = None


def read_chat(body: bytes) -> Answer:
    """Answer of `/v1/chat/completions`. Raises `AnswerError`."""
    chat = _decode(body, _ChatBody)
    parts: list[_Part] = []
    for choice in chat.choices:
        if isinstance(choice.message.content, list):
            parts += choice.message.content
        parts += choice.message.images or []
    urls = [link.url for part in parts for link in (part.image_url, part.video_url) if link and link.url]
    memory = max((part.peak_memory_mb for part in parts if part.peak_memory_mb), default=None)
    return _answer(tuple(_media(url) for url in urls), chat.metrics, peak_memory_mb=memory)


def read_images(body: bytes) -> Answer:
    """Answer of `/v1/images/generations` and `/v1/images/edits`. Raises `AnswerError`."""
    images = _decode(body, _ImagesBody)
    outputs = [
        _checked(Media(None, base64_text=item.b64_json)) if item.b64_json else _media(item.url)
        for item in images.data
        if item.b64_json or item.url
    ]
    return _answer(tuple(outputs), images.metrics, peak_memory_mb=None)


def read_video(content: bytes, job: dict[str, Any]) -> Answer:
    """Answer of the video job API: the file and the job that made it. Raises `AnswerError`."""
    return _answer((_checked(Media(None, data=content)),), job.get("metrics"), peak_memory_mb=None)


def error_of(status: int, body: bytes) -> tuple[str, str]:
    """Class and message of an answer that is not 200: the envelope's code where there is one, else the status."""
    text = body[:300].decode("utf-8", "replace")
    try:
        envelope = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return f"http_{status}", text
    error = envelope.get("error") if isinstance(envelope, dict) else None
    if not isinstance(error, dict):
        return f"http_{status}", text
    code = error.get("code")
    return code if isinstance(code, str) and code else f"http_{status}", str(error.get("message", text))[:300]


def _decode(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise AnswerError("invalid_answer", f"{error}: {body[:100].decode('utf-8', 'replace')}") from error


def _media(url: str | None) -> Media:
    if url is not None and url.startswith("data:"):
        _, separator, text = url.partition(";base64,")
        if not separator:
            raise AnswerError("invalid_answer", f"a data URL without base64: {url[:60]}")
        return _checked(Media(None, base64_text=text))
    return Media(None, url=url)


def _checked(media: Media) -> Media:
    """The same media with its type, told from the first bytes."""
    try:
        head = media.data[:16] if media.data is not None else binascii.a2b_base64((media.base64_text or "")[:32])
    except (binascii.Error, ValueError) as error:
        raise AnswerError("invalid_answer", f"bad base64: {error}") from error
    for offset, magic, mime in _MAGIC:
        if head[offset:].startswith(magic):
            return Media(mime, base64_text=media.base64_text, data=media.data)
    raise AnswerError("invalid_answer", f"neither a picture nor a clip: it begins with {head[:12]!r}")


def _answer(outputs: tuple[Media, ...], metrics: Any, *, peak_memory_mb: float | None) -> Answer:
    if not outputs:
        raise AnswerError("no_output", "status 200 without a picture or clip")
    entries = metrics if isinstance(metrics, list) else [metrics]
    entries = [entry for entry in entries if isinstance(entry, dict)]
    replicas = [entry["replica"] for entry in entries if isinstance(entry.get("replica"), int)]
    return Answer(
        outputs=outputs,
        replicas=tuple(replicas),
        queue_s=_largest(entries, "queue_s"),
        inference_s=_largest(entries, "inference_s"),
        peak_memory_mb=_largest(entries, "peak_memory_mb") or peak_memory_mb,
        attempts=int(attempts) if (attempts := _largest(entries, "attempts")) is not None else None,
    )


def _largest(entries: list[dict[str, Any]], key: str) -> float | None:
    values = [entry[key] for entry in entries if isinstance(entry.get(key), int | float)]
    return max((float(value) for value in values if math.isfinite(value)), default=None)
