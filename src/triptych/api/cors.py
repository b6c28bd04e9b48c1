"""Cross-origin calls from web pages, for the origins that the operator named; without any the answers say nothing.

Starlette's middleware does it; a preflight that it refuses becomes an error envelope like every other refusal.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from triptych.api.errors import error_response
from triptych.errors import ErrorCode, TriptychError

__all__ = ["Cors"]

_READABLE = ("x-request-id", "retry-after", "server-timing")


class Cors(CORSMiddleware):
    """Any method and header, from these origins (`*`: from all), without cookies."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app, allow_origins=origins, allow_methods=("*",), allow_headers=("*",), expose_headers=_READABLE
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Headers and words are Starlette's."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        vary = {name: value for name, value in response.headers.items() if name.startswith(("access-control", "vary"))}
        refusal = TriptychError(ErrorCode.INVALID_VALUE, str(response.body, "utf-8"))
        return error_response(refusal, vary)
