"""`GET /v1/models` and `GET /v1/models/{id}`: the served names, each an OpenAI model object.

Ids may hold slashes, plain or as `%2F`; the server undoes the escape before routing.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from triptych.api.body import json_response
from triptych.api.context import ApiContext

__all__ = ["routes"]


def routes(context: ApiContext) -> list[BaseRoute]:
    """The model routes."""

    def model(name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": context.started_at, "owned_by": "triptych"}

    async def list_models(request: Request) -> Response:
        return json_response({"object": "list", "data": [model(name) for name in context.served_model_names]})

    async def retrieve_model(request: Request) -> Response:
        name = request.path_params["model_id"]
        context.check_model(name)
        return json_response(model(name))

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model_id:path}", retrieve_model, methods=["GET"]),
    ]
