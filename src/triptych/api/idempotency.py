"""`Idempotency-Key`: a request that is sent twice is worked on once.

The same key with the same body gets the same answer, also while the first one is still being made; with another body it
is refused. Failures and streams are not remembered, so a repeat tries again. Keys belong to their callers.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from triptych.api.access import owner_of
from triptych.api.body import ChunkedJson, read_body
from triptych.config.parameters import shown
from triptych.errors import ErrorCode, TriptychError
from triptych.jobs.job import IdempotencyKey

__all__ = ["Answers", "Endpoint", "check_same_request", "idempotency_of", "idempotent"]

_SCOPE_KEY = "triptych.idempotency"
_HEADER = "idempotency-key"
_MAX_KEY = 255
_KEEP_S = 600.0
_MAX_KEPT = 1000
_MAX_KEPT_BYTES = 256 * 1024**2

Endpoint = Callable[[Request], Awaitable[Response]]
_Slot = tuple[str | None, str, str]  # owner, path, key


def idempotent(endpoint: Endpoint, answers: Answers, *, max_body_size: int) -> Endpoint:
    """The endpoint, made to heed the header; a request without it goes straight through."""

    async def once(request: Request) -> Response:
        key = request.headers.get(_HEADER)
        if key is None:
            return await endpoint(request)
        if not (0 < len(key) <= _MAX_KEY and key.isprintable()):
            message = f"{_HEADER} must have 1 to {_MAX_KEY} printable characters, got {shown(key)}"
            raise TriptychError(ErrorCode.INVALID_VALUE, message, param=_HEADER)
        body = bytes(await read_body(request, max_bytes=max_body_size))
        digest = await asyncio.to_thread(_digest, request.headers.get("content-type", ""), body)
        named = IdempotencyKey(key, digest)
        slot = (owner_of(request.scope), request.url.path, key)
        again = Request({**request.scope, _SCOPE_KEY: named}, _replayed(body, request))
        del body  # it is with `again` until it is read
        return await answers.once(slot, named, lambda: endpoint(again))

    return once


def idempotency_of(request: Request) -> IdempotencyKey | None:
    """The key and the digest of this request, when it has a key."""
    named: IdempotencyKey | None = request.scope.get(_SCOPE_KEY)
    return named


def check_same_request(named: IdempotencyKey, earlier: IdempotencyKey) -> None:
    """Raise `conflict` when an earlier request had this key and another body."""
    if named.digest != earlier.digest:
        message = f"{_HEADER} {shown(named.key)} was used for another request; a new request needs a new key"
        raise TriptychError(ErrorCode.CONFLICT, message, param=_HEADER)


@dataclass(slots=True)
class _Entry:
    named: IdempotencyKey
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    response: ChunkedJson | None = None
    expires_at_s: float = float("inf")


class Answers:
    """What was answered lately, by caller, path and key: bounded in number, bytes and time."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[_Slot, _Entry] = {}
        self._bytes = 0

    async def once(self, slot: _Slot, named: IdempotencyKey, make: Callable[[], Awaitable[Response]]) -> Response:
        """The remembered answer, or a new one; who comes while it is being made waits for it."""
        self._forget()
        while (entry := self._entries.get(slot)) is not None:
            check_same_request(named, entry.named)
            if entry.response is not None:
                return entry.response
            await entry.ended.wait()
        entry = self._entries[slot] = _Entry(named)
        try:
            response = await make()
            if isinstance(response, ChunkedJson) and response.size_bytes <= _MAX_KEPT_BYTES:
                entry.response, entry.expires_at_s = response, self._clock() + _KEEP_S
                self._bytes += response.size_bytes
            return response
        finally:
            del self._entries[slot]
            if entry.response is not None:
                self._entries[slot] = entry  # in the order in which they expire
                self._forget()
            entry.ended.set()

    def _forget(self) -> None:
        now = self._clock()
        for slot, entry in list(self._entries.items()):
            if entry.response is None:
                continue
            if entry.expires_at_s > now and len(self._entries) <= _MAX_KEPT and self._bytes <= _MAX_KEPT_BYTES:
                return
            del self._entries[slot]
            self._bytes -= entry.response.size_bytes


def _digest(content_type: str, body: bytes) -> str:
    """Of type and body; the boundary of a form is another one in each try."""
    kind, _, rest = content_type.partition(";")
    boundary = rest.partition("boundary=")[2].strip().strip('"').encode("latin-1")
    plain = body.replace(boundary, b"") if boundary else body
    return hashlib.sha256(kind.strip().lower().encode() + b"\0" + plain).hexdigest()


def _replayed(body: bytes, request: Request) -> Callable[[], Awaitable[Message]]:
    """A `receive` that gives the body away, then tells what the connection has to say."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return first.pop() if first else await request.receive()

    return receive
