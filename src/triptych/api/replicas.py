"""`GET /v1/replicas`: state, devices, load and restarts of every replica.

Writing to replicas (count, drain, restart) is refused until it is built.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from triptych.api.body import json_response
from triptych.api.context import ApiContext
from triptych.errors import ErrorCode, TriptychError

__all__ = ["routes"]


def routes(context: ApiContext) -> list[BaseRoute]:
    """The replica routes."""

    async def replicas(request: Request) -> Response:
        if request.method == "PUT":
            message = "changing the number of replicas is not available in this version"
            raise TriptychError(ErrorCode.NOT_AVAILABLE, message)
        return json_response({"object": "list", "data": list(context.orchestrator.replicas())})

    return [Route("/v1/replicas", replicas, methods=["GET", "PUT"])]
