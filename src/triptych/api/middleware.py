"""The outermost layer of the app: request ids on every answer, and every failure as an error envelope.

Each HTTP request gets a unique internal id; a sane `x-request-id` of the client is echoed and kept beside it.
Plain ASGI, so that it costs no task and no copy of the body.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.api.errors import error_response, router_error_response
from triptych.errors import ErrorCode, TriptychError

__all__ = ["Boundary", "RequestIds", "give_request_ids", "request_ids"]

_log = logging.getLogger(__name__)

_MAX_ID_BYTES = 128
_SCOPE_KEY = "triptych.request_ids"


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
    """Wraps the router; nothing that goes wrong behind it leaves as anything but an error envelope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ids = give_request_ids(scope)
        scope["app"] = self  # Starlette's routes then raise 404 and 405 instead of answering in plain text
        id_header = (b"x-request-id", ids.shown)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], id_header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
            return
        except ClientDisconnect:
            return
        except TriptychError as error:
            response = error_response(error)
        except HTTPException as error:
            response = router_error_response(error, scope)
        except Exception:
            _log.exception("request %s failed: %s %s", ids.internal, scope["method"], scope["path"])
            if started:
                raise  # too late for an envelope: the server closes the connection, so the client sees a cut answer
            message = f"internal error; the server's log has the details under {ids.internal}"
            response = error_response(TriptychError(ErrorCode.ENGINE_ERROR, message))
        await response(scope, receive, send_with_id)


def _client_id(scope: Mapping[str, Any]) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            sane = 0 < len(value) <= _MAX_ID_BYTES and all(0x20 <= byte <= 0x7E for byte in value) and value.strip()
            return str(value, "ascii") if sane else None
    return None
