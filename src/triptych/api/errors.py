"""Failures as HTTP answers: always `{"error": {"message", "type", "param", "code"}}` and the retry headers.

Everything that goes wrong in a route is a `TriptychError`; what Starlette's router raises (404, 405) is translated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from triptych.errors import CODES, ErrorCode, TriptychError

__all__ = ["envelope", "error_response", "router_error_response"]

_MAX_PARAM_CHARACTERS = 256


def envelope(error: TriptychError) -> dict[str, Any]:
    """The error object of an answer body or of a stream."""
    return {
        "error": {
            "message": error.message,
            "type": CODES[error.code].type,
            "param": None if error.param is None else error.param[:_MAX_PARAM_CHARACTERS],
            "code": error.code.value,
        }
    }


def error_response(error: TriptychError, headers: Mapping[str, str] | None = None) -> Response:
    """The whole answer: status, envelope, `x-should-retry`, `retry-after` in whole seconds."""
    sent = dict(headers or {})
    if error.should_retry is not None:
        sent["x-should-retry"] = "true" if error.should_retry else "false"
    if error.retry_after_s is not None:
        sent["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.code is ErrorCode.INVALID_API_KEY:
        sent["www-authenticate"] = "Bearer"
    body = msgspec.json.encode(envelope(error))
    return Response(body, status_code=error.status, headers=sent, media_type="application/json")


def router_error_response(error: HTTPException, scope: Scope) -> Response:
    """Answer for a path or method that no route takes; `OPTIONS` on a known path is answered with `Allow`."""
    headers = dict(error.headers or {})
    method, path = scope["method"], scope["path"][:256]
    if error.status_code == 405 and method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    if error.status_code == 405:
        message = f"{method[:32]} is not allowed on {path}; allowed: {headers.get('Allow', 'nothing')}"
        return error_response(TriptychError(ErrorCode.METHOD_NOT_ALLOWED, message), headers)
    return error_response(TriptychError(ErrorCode.NOT_FOUND, f"nothing is served at {path}"), headers)
