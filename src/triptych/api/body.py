"""Request bodies in, answers out: bounded JSON objects and forms, and JSON answers that are sent as they are.

Large answers are lists of byte chunks (see `generation`), so base64 text is never scanned or copied by a JSON encoder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych.api.forms import parse_form
from triptych.errors import ErrorCode, TriptychError

__all__ = ["ChunkedJson", "json_response", "read_body", "read_json_object", "read_json_or_form"]

_JSON, _FORM = "application/json", "multipart/form-data"
_MAX_JSON_VALUES = 250_000  # pictures are one each, and megabytes of chat have fewer
_BEFORE_VALUES = (b",", b"[", b"{")
_COUNTED_BYTES = 1 << 20


async def read_json_object(request: Request, *, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object. Raises `TriptychError` for wrong type, size or syntax."""
    _check_headers(request, max_bytes, _JSON)
    return await _json_object(await _read(request.receive, max_bytes))


async def read_json_or_form(request: Request, *, max_bytes: int) -> tuple[dict[str, Any], bool]:
    """The fields of the body, and whether it is a form: then values are text, or bytes of files (see `forms`)."""
    is_form = _check_headers(request, max_bytes, _JSON, _FORM) == _FORM
    body = await _read(request.receive, max_bytes)
    if is_form:
        # Finding the parts of a large form takes as long as many small requests.
        return await asyncio.to_thread(parse_form, body, request.headers["content-type"]), True
    return await _json_object(body), False


async def read_body(request: Request, *, max_bytes: int) -> bytes | bytearray:
    """The body as it came. Raises `TriptychError` when it is too large."""
    return await _read(request.receive, max_bytes)


async def _json_object(body: bytes | bytearray) -> dict[str, Any]:
    if len(body) > _MAX_JSON_VALUES:
        await asyncio.to_thread(_check_values, body)  # in steps, between which the event loop has its turns
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise TriptychError(ErrorCode.INVALID_JSON, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise TriptychError(ErrorCode.INVALID_JSON, "the body is JSON nested too deeply") from None
    if not isinstance(value, dict):
        raise TriptychError(ErrorCode.INVALID_JSON, f"the body must be a JSON object, got {_kind(value)}")
    return value


def _check_values(body: bytes | bytearray) -> None:
    """Refuse what is small as text and large once it is decoded: a list of empty lists becomes twenty times as much."""
    values = 0
    for start in range(0, len(body), _COUNTED_BYTES):
        values += sum(body.count(mark, start, start + _COUNTED_BYTES) for mark in _BEFORE_VALUES)
    if values > _MAX_JSON_VALUES:
        message = f"the body must have at most {_MAX_JSON_VALUES} commas and opening brackets, got {values}"
        raise TriptychError(ErrorCode.PAYLOAD_TOO_LARGE, message)


def json_response(value: object, *, status: int = 200) -> Response:
    """A small JSON answer; dataclasses and enums are encoded as they are."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


class ChunkedJson(Response):
    """A 200 JSON answer from ready-made chunks, sent one message each with a content-length."""

    def __init__(self, chunks: Sequence[bytes], *, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._chunks = chunks
        self.status_code = 200
        self.background = None
        self.size_bytes = length = sum(map(len, chunks))
        self.raw_headers = [(b"content-type", b"application/json"), (b"content-length", str(length).encode()), *headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = len(self._chunks) - 1
        for index, chunk in enumerate(self._chunks):
            await send({"type": "http.response.body", "body": chunk, "more_body": index < last})


def _check_headers(request: Request, max_bytes: int, *wanted: str) -> str:
    """The type of the body, one of those wanted."""
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in wanted:
        message = f"content-type must be {' or '.join(wanted)}, got {content_type[:128] or 'none'}"
        raise TriptychError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, message)
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        message = f"content-encoding must be identity, got {encoding[:128]}"
        raise TriptychError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, message)
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
        raise _too_large(f"{length[:32]} bytes", max_bytes)
    return kind


async def _read(receive: Receive, max_bytes: int) -> bytes | bytearray:
    first = await _receive_body(receive)
    if not first.get("more_body", False):
        body: bytes = first.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(f"{len(body)} bytes", max_bytes)
        return body
    collected = bytearray(first.get("body", b""))
    more = True
    while more:
        if len(collected) > max_bytes:
            raise _too_large(f"more than {max_bytes} bytes", max_bytes)
        message = await _receive_body(receive)
        collected += message.get("body", b"")
        more = message.get("more_body", False)
    if len(collected) > max_bytes:
        raise _too_large(f"{len(collected)} bytes", max_bytes)
    return collected


async def _receive_body(receive: Receive) -> Any:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message


def _too_large(got: str, max_bytes: int) -> TriptychError:
    message = f"the body must be at most {max_bytes} bytes, got {got}"
    return TriptychError(ErrorCode.PAYLOAD_TOO_LARGE, message)


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
