"""Health and version: `/livez` says that the loop turns, `/readyz`, `/health` and `/ping` whether work is taken.

None of them generates anything. One replica lost of several is still ready, with its id in `degraded`.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from triptych import __version__
from triptych.api.body import json_response
from triptych.api.context import ApiContext

__all__ = ["routes"]


def routes(context: ApiContext) -> list[BaseRoute]:
    """The health routes."""

    async def live(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        readiness = context.orchestrator.readiness()
        if not readiness.ready:
            raise context.unready()
        if readiness.degraded:
            return json_response({"status": "degraded", "degraded": readiness.degraded})
        return json_response({"status": "ok"})

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    return [
        Route("/livez", live, methods=["GET"]),
        *(Route(path, ready, methods=["GET"]) for path in ("/readyz", "/health", "/ping")),
        Route("/version", version, methods=["GET"]),
    ]
