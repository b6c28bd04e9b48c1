"""Answers as server-sent events: the events of one request through an encoder onto the wire.

The 200 begins with the first sign of the engine or the first keep-alive comment, so what fails before is answered
plainly with its status; what fails later is the last event, a top-level `error` object. A client that leaves aborts
its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych.api.context import ApiContext
from triptych.api.errors import envelope
from triptych.api.generation import closing_on_disconnect, log_failure
from triptych.errors import TriptychError
from triptych.orchestrator.events import Event
from triptych.orchestrator.orchestrator import EventStream

__all__ = ["DONE", "KEEP_ALIVE_S", "EventAnswer", "EventEncoder", "event"]

KEEP_ALIVE_S = 15.0  # proxies cut what is silent for a minute
DONE = b"data: [DONE]\n\n"

_COMMENT = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: Sequence[bytes], *, name: str | None = None) -> list[bytes]:
    """One event whose data is a JSON text in one line, given in parts."""
    lead = b"data: " if name is None else b"event: %b\ndata: " % name.encode()
    return [lead, *data, b"\n\n"]


class EventEncoder(Protocol):
    """What the events of a request look like on one route; all return parts of the answer's body, maybe none."""

    def begin(self) -> list[bytes]:
        """What comes first."""

    def encode(self, happened: Event) -> list[bytes]:
        """Progress, a partial picture or a result."""

    def end(self) -> list[bytes]:
        """What comes last, when all results are out."""


class EventAnswer(Response):
    """Streams one request, which is accepted already; `prompt_field` is what the route calls the prompt."""

    def __init__(
        self, context: ApiContext, stream: EventStream, encoder: EventEncoder, *, prompt_field: str = "prompt"
    ) -> None:
        self._context = context
        self._stream = stream
        self._encoder = encoder
        self._prompt_field = prompt_field
        self.status_code = 200
        self.background = None
        self.raw_headers = [*_HEADERS]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(send, self.raw_headers)
        try:
            with closing_on_disconnect(receive, self._stream):
                await self._stream_into(body)
        except TriptychError as error:
            log_failure(self._context, self._stream.request_id, error)
            if error.param == "prompt":
                error.param = self._prompt_field
            if not body.begun:
                raise
            await body.write(event([msgspec.json.encode(envelope(error))], name="error"))
        await body.end()

    async def _stream_into(self, body: _Body) -> None:
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    happened = await anext(self._stream, None)
            except TimeoutError:
                if not body.begun:
                    await body.write(self._encoder.begin())
                await body.write([_COMMENT])
                continue
            first = [] if body.begun else self._encoder.begin()
            if happened is None:
                await body.write([*first, *self._encoder.end()])
                return
            await body.write([*first, *self._encoder.encode(happened)])


class _Body:
    """The answer's body as it grows; its head goes out with the first write, even an empty one."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = False
        self._send = send
        self._headers = headers

    async def write(self, parts: Sequence[bytes]) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        if parts:
            await self._send(_part(b"".join(parts), more=True))

    async def end(self) -> None:
        await self._send(_part(b"", more=False))


def _part(body: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}
