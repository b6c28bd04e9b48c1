"""The outer layers of the app: request ids on every answer, the access log, every failure as an error envelope.

Each HTTP request gets a unique internal id; a sane `x-request-id` of the client is echoed and kept beside it.
Plain ASGI, so that a layer costs no task and no copy of the body.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.api.access import owner_of
from triptych.api.errors import error_response, router_error_response
from triptych.api.results import RESULTS_PATH
from triptych.errors import CODES, ErrorCode, TriptychError

__all__ = ["Boundary", "Envelopes", "RequestIds", "give_request_ids", "request_ids"]

_log = logging.getLogger(__name__)
_access_log = logging.getLogger("triptych.access")

_MAX_ID_BYTES = 128
_SCOPE_KEY = "triptych.request_ids"
_MAX_LOGGED_PATH = 256
_PROBES = frozenset({"/livez", "/readyz", "/health", "/ping", "/metrics"})


@dataclass(frozen=True, slots=True)
class RequestIds:
    """The unique internal id of an HTTP request and the client's own `x-request-id`, when it sent a sane one."""

    internal: str
    client: str | None

    @property
    def shown(self) -> bytes:
        """What the answer's `x-request-id` says."""
        return (self.client or self.internal).encode("ascii")


def request_ids(scope: Scope) -> RequestIds:
    """The ids that `Boundary` gave to this request."""
    ids: RequestIds = scope[_SCOPE_KEY]
    return ids


def give_request_ids(scope: MutableMapping[str, Any]) -> RequestIds:
    """The ids of this request, made when it has none yet."""
    ids: RequestIds | None = scope.get(_SCOPE_KEY)
    if ids is None:
        ids = scope[_SCOPE_KEY] = RequestIds(f"req_{secrets.token_hex(16)}", _client_id(scope))
    return ids


class Boundary:
    """The outermost layer: gives the ids, echoes them on every answer and writes the access log.

    `root_path` is the prefix of a proxy, which may strip it or leave it on.
    """

    def __init__(self, app: ASGIApp, *, root_path: str = "") -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        ids = give_request_ids(scope)
        scope["root_path"] = self._root_path
        id_header = (b"x-request-id", ids.shown)
        status = CODES[ErrorCode.REQUEST_ABORTED].status  # until one is sent: nobody was there to take it

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], id_header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            _log_access(scope, ids, status, time.monotonic() - began_s)


class Envelopes:
    """Nothing that goes wrong behind it leaves as anything but an error envelope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self  # Starlette's routes then raise 404 and 405 instead of answering in plain text
        started = False

        async def send_noting_the_start(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noting_the_start)
            return
        except ClientDisconnect:
            return
        except TriptychError as error:
            response = error_response(error)
        except HTTPException as error:
            response = router_error_response(error, scope)
        except Exception:
            ids = request_ids(scope)
            _log.exception("request %s failed: %s %s", ids.internal, scope["method"], scope["path"])
            if started:
                raise  # too late for an envelope: the server closes the connection, so the client sees a cut answer
            message = f"internal error; the server's log has the details under {ids.internal}"
            response = error_response(TriptychError(ErrorCode.ENGINE_ERROR, message))
        await response(scope, receive, send)


def _log_access(scope: Scope, ids: RequestIds, status: int, seconds: float) -> None:
    """One line per request; neither key nor body nor query. Probes are for debugging only."""
    before, is_secret, _ = scope["path"].partition(RESULTS_PATH)
    path = f"{before}{RESULTS_PATH}..." if is_secret else before  # the name of a result is all that protects it
    level = logging.DEBUG if path in _PROBES else logging.INFO
    if not _access_log.isEnabledFor(level):
        return
    extra = {"request": ids.internal, "method": scope["method"], "path": path[:_MAX_LOGGED_PATH], "status": status}
    if (owner := owner_of(scope)) is not None:
        extra["caller"] = owner
    _access_log.log(level, "answered", extra={**extra, "seconds": round(seconds, 4)})


def _client_id(scope: Mapping[str, Any]) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            sane = 0 < len(value) <= _MAX_ID_BYTES and all(0x20 <= byte <= 0x7E for byte in value) and value.strip()
            return str(value, "ascii") if sane else None
    return None
