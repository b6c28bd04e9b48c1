"""uvicorn's HTTP protocol, with an envelope for what never reaches the application and a bound on every wait.

Bytes come in through `data_received`; what the parser or a limit refuses is answered here. Upgrades are ignored, few
pipelined requests are kept, so reading goes on and a client that leaves is noticed. Everything else is the base's.
"""

from __future__ import annotations

import asyncio
import http
import logging
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from triptych.api.errors import error_response
from triptych.api.middleware import give_request_ids
from triptych.errors import ErrorCode, TriptychError
from triptych.orchestrator.admission import COME_BACK_S

__all__ = ["HttpProtocol"]

_log = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 64 << 10  # request line and headers
_MAX_PIPELINED = 16
_LINGER_S = 1.0  # time for a refused client to stop sending and read its answer
_HEADER_SEPARATORS = len(": \r\n")


class HttpProtocol(HttpToolsProtocol):
    """One connection. A subclass may set both bounds.

    `read_timeout_s` is for a head, and without a byte of a body; `write_timeout_s` for a client that takes nothing of
    an answer, which is in memory until then: long enough for a program that does something else between two reads.
    """

    read_timeout_s = 60.0
    write_timeout_s = 300.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._running: RequestResponseCycle | None = None  # the request that the application has; others queue
        self._receiving = False  # a request has begun and is not complete
        self._bare_bytes = 0  # read since the last byte of a body or the end of a request
        self._heard_at = 0.0  # loop clock: the beginning of a request, or the last byte of its body
        self._deaf = False  # what still arrives is discarded; only its end matters
        self._timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0  # of answers, when it was looked at last
        self._stuck_since = 0.0  # loop clock: when they were first that many

    # ---- transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock, too: a client that says nothing is not kept."""
        super().connection_made(transport)
        self._heard_at = self.loop.time()
        self._timer = self.loop.call_later(self.read_timeout_s, self._check_progress)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the running request, not only the newest."""
        if self._timer is not None:
            self._timer.cancel()
        self._let_go()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client left; the transport closes itself, and nothing may be written meanwhile."""
        self._let_go()

    def data_received(self, data: bytes) -> None:
        """Parse; refuse what cannot be parsed and heads over the limit."""
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        self._bare_bytes += len(data)
        try:
            self._parse(data)
        except TriptychError as error:
            self._refuse(error)
        except httptools.HttpParserCallbackError as error:
            refusal = error.__context__
            if isinstance(refusal, TriptychError):
                self._refuse(refusal)
            else:
                self.send_400_response("the request target is not a valid URL")
        except httptools.HttpParserError as error:
            self.send_400_response(str(error))
        else:
            if self._bare_bytes > _MAX_HEAD_BYTES:
                self._refuse(_head_too_large())
            elif self.pipeline:
                self._bound_pipeline()

    def send_400_response(self, msg: str) -> None:
        """In place of the base's plain text."""
        self._refuse(TriptychError(ErrorCode.INVALID_VALUE, f"malformed HTTP request: {msg}"))

    def shutdown(self) -> None:
        """The server ends: who is still sending a request is told so, what runs is answered."""
        if self._receiving and not self._deaf:
            message = "the server is shutting down"
            self._refuse(TriptychError(ErrorCode.DRAINING, message, retry_after_s=COME_BACK_S))
        else:
            super().shutdown()

    # ---- parser

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._receiving = True
        self._heard_at = self.loop.time()

    def on_headers_complete(self) -> None:
        """Check the size of the head; remember which request the application gets first."""
        if self._bare_bytes > _MAX_HEAD_BYTES and self._head_bytes() > _MAX_HEAD_BYTES:
            raise _head_too_large()
        super().on_headers_complete()
        if not self.pipeline and not self.parser.should_upgrade():
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        """Bytes of a body: the client is alive, as long as the answer has not been given without them."""
        super().on_body(body)
        self._bare_bytes = 0
        if not self.cycle.response_complete:
            self._heard_at = self.loop.time()

    def on_message_complete(self) -> None:
        """A request is complete, answered early or not."""
        super().on_message_complete()
        self._receiving = False
        self._bare_bytes = 0
        if self.cycle is not None:
            self.cycle.more_body = False

    def on_response_complete(self) -> None:
        """The base starts the next request in line."""
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + _HEADER_SEPARATORS for name, value in self.headers)

    # ---- upgrades: a server may ignore them, but the parser stops at one and takes no body

    def _should_upgrade(self) -> bool:
        return True  # the base then leaves the request alone, and `_parse` gives it back as a plain one

    def _parse(self, data: bytes) -> None:
        rest: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]
                self._begin_again_without_upgrade()
            else:
                return

    def _begin_again_without_upgrade(self) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            raise TriptychError(ErrorCode.INVALID_VALUE, "CONNECT is not available: this server is no proxy")
        head = [method, b" ", self.url, b" HTTP/", version.encode(), b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"".join([*head, b"\r\n"]))

    # ---- limits

    def _bound_pipeline(self) -> None:
        """Go on reading behind the running request: a client that leaves is seen only by reading."""
        waiting_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)
        if len(self.pipeline) > _MAX_PIPELINED or waiting_bytes > HIGH_WATER_LIMIT:
            self._take_no_more()
        else:
            self.flow.resume_reading()

    def _check_progress(self) -> None:
        """One timer a connection, set anew when it fires: no request pays for it."""
        if self._is_stuck():
            _log.info("connection cut: the client took nothing of its answer for %g s", self.write_timeout_s)
            self.transport.abort()
            return
        running = self._running
        owes = running is None or running.response_complete or running.more_body
        left_s = self.read_timeout_s
        if owes and not self.flow.read_paused:
            left_s = self._heard_at + self.read_timeout_s - self.loop.time()
        if left_s <= 0:
            if self._receiving:
                message = f"the request did not arrive: nothing more of it came for {self.read_timeout_s:g} s"
                self._refuse(TriptychError(ErrorCode.READ_TIMEOUT, message))
            elif self.timeout_keep_alive_task is None:  # else the base watches this idle connection
                self.transport.close()
            left_s = self.read_timeout_s
        self._timer = self.loop.call_later(left_s, self._check_progress)

    def _is_stuck(self) -> bool:
        unsent_bytes, now = self.transport.get_write_buffer_size(), self.loop.time()
        if unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._stuck_since = unsent_bytes, now
        return unsent_bytes > 0 and now - self._stuck_since >= self.write_timeout_s

    # ---- ends

    def _refuse(self, error: TriptychError) -> None:
        """Answer the request that is being received, unless it has an answer; then end the connection."""
        if self._deaf or self.transport.is_closing():
            return
        running = self._running
        if running is None or running.response_complete:
            if running is None or not running.more_body:  # else it was answered before it was complete
                self._answer(error)
        elif running.more_body and not running.response_started:
            self._answer(error)
        else:
            self._take_no_more()  # the fault lies behind a request that is being answered
            return
        self._let_go()
        self._linger()

    def _answer(self, error: TriptychError) -> None:
        ids = give_request_ids(cast(Scope, self.scope) if self._receiving else {"headers": ()})
        response = error_response(error)
        fields = [*self.server_state.default_headers, *response.raw_headers, (b"x-request-id", ids.shown)]
        lines = [b"HTTP/1.1 %d %s" % (error.status, http.HTTPStatus(error.status).phrase.encode())]
        lines += [b"%s: %s" % field for field in fields]
        self.transport.write(b"\r\n".join([*lines, b"connection: close", b"", bytes(response.body)]))
        _log.info("request refused", extra={"request": ids.internal, "code": error.code, "reason": error.message})

    def _take_no_more(self) -> None:
        """Answer the requests that are complete, then close. The client may send the others again."""
        self._deaf = True
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()
        last = self.pipeline[0][0] if self.pipeline else self._running
        if last is not None:
            last.keep_alive = False
        self.flow.resume_reading()

    def _let_go(self) -> None:
        """The running request has nobody to answer any more."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _linger(self) -> None:
        """Close with a delay: closed while the client still sends, the kernel would throw the answer away."""
        self._deaf = True
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)


def _head_too_large() -> TriptychError:
    message = f"request line and headers must be at most {_MAX_HEAD_BYTES} bytes together"
    return TriptychError(ErrorCode.HEADERS_TOO_LARGE, message)
