"""The memory that bodies take while they are received and decoded, all requests together: an ASGI layer that counts it.

A body counts from its first bytes until `forget_body`, which says that its pictures are decoded and counted by the
orchestrator, or until its answer. Small bodies, which have no pictures, need no room.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.errors import ErrorCode, TriptychError
from triptych.orchestrator.admission import COME_BACK_S

__all__ = ["BodyRoom", "forget_body"]

_SMALL_BYTES = 64 << 10
_SCOPE_KEY = "triptych.body"


class BodyRoom:
    """Refuses the rest of a body with `queue_full` when those of all requests would take more than the room."""

    def __init__(self, app: ASGIApp, *, room_bytes: int) -> None:
        self._app = app
        self._room_bytes = room_bytes
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = scope[_SCOPE_KEY] = _Body(self)

        async def counted() -> Message:
            message = await receive()
            if part := message.get("body"):
                body.grow(len(part))
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            body.forget()

    def resize(self, before: int, after: int) -> None:
        """One body takes `after` bytes instead of `before`. Raises `TriptychError` when there is no room for more."""
        held_bytes = self._held_bytes + after - before
        if after > before and held_bytes > self._room_bytes:
            message = (
                f"bodies of requests that arrive take {self._held_bytes} bytes, the limit is {self._room_bytes} bytes, "
                f"this one has {after} bytes so far"
            )
            raise TriptychError(ErrorCode.QUEUE_FULL, message, retry_after_s=COME_BACK_S)
        self._held_bytes = held_bytes


class _Body:
    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._received_bytes = 0
        self._held_bytes = 0

    def grow(self, size_bytes: int) -> None:
        self._received_bytes += size_bytes
        if self._received_bytes > _SMALL_BYTES:
            self._hold(self._received_bytes)

    def forget(self) -> None:
        self._hold(0)

    def _hold(self, size_bytes: int) -> None:
        self._room.resize(self._held_bytes, size_bytes)
        self._held_bytes = size_bytes


def forget_body(scope: Mapping[str, Any]) -> None:
    """What was sent is not kept any longer; nothing is counted of requests that came around the layer."""
    body: _Body | None = scope.get(_SCOPE_KEY)
    if body is not None:
        body.forget()
