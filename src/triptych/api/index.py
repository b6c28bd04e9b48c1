"""`GET /`: what this server is and what can be asked of it; `unavailable` routes answer that they are not built.

The page with playground and live view takes this place once it exists.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from triptych import __version__
from triptych.api.body import json_response
from triptych.api.context import ApiContext
from triptych.errors import ErrorCode, TriptychError

__all__ = ["routes", "unbuilt_routes"]

_NOT_BUILT = (
    ("/v1/videos/characters", "POST"),
    ("/v1/videos/edits", "POST"),
    ("/v1/videos/extensions", "POST"),
    ("/v1/videos/{video_id}/remix", "POST"),
    ("/metrics", "GET"),
)


def routes(context: ApiContext) -> list[BaseRoute]:
    """The front page."""

    async def index(request: Request) -> Response:
        return json_response(
            {
                "name": "triptych",
                "version": __version__,
                "models": context.served_model_names,
                "routes": [
                    "POST /v1/images/generations, POST /v1/images/edits",
                    "POST /v1/chat/completions",
                    "GET, POST /v1/videos",
                    "GET, DELETE /v1/videos/{id}, GET /v1/videos/{id}/content",
                    "GET /v1/models",
                    "GET /v1/requests",
                    "GET, PATCH, DELETE /v1/requests/{id}",
                    "GET, PUT /v1/replicas",
                    "POST /v1/replicas/{id}/drain, POST /v1/replicas/{id}/restart",
                    "GET /livez, /readyz, /health, /ping, /version",
                ],
                "documentation": "docs/diffusion_multi_replica.md of the source tree",
                "page": "playground and live view are not available in this version",
            }
        )

    return [Route("/", index, methods=["GET"])]


def unbuilt_routes(context: ApiContext) -> list[BaseRoute]:
    """The routes that later versions bring."""

    async def not_available(request: Request) -> Response:
        path = request.url.path[:256]
        message = f"{request.method} {path} is not available in this version"
        raise TriptychError(ErrorCode.NOT_AVAILABLE, message)

    return [Route(path, not_available, methods=list(methods)) for path, *methods in _NOT_BUILT]
