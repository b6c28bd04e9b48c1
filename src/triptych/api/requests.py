"""`/v1/requests`: what every request is doing, and the two ways to change one (PATCH) or end it (DELETE).

An id is the internal one or the client's `x-request-id`. Units show their replica, step, queue position and estimate.
With API keys a caller meets only its own requests.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from triptych.api.access import visible_to
from triptych.api.body import json_response, read_json_object
from triptych.api.context import ApiContext
from triptych.config.parameters import Priority, check_timeout, parameter_error
from triptych.errors import ErrorCode, TriptychError
from triptych.orchestrator.events import RequestView

__all__ = ["routes"]


class RequestPatch(BaseModel):
    """Body of PATCH; `timeout` is in seconds from now."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    priority: Priority | None = None
    timeout: float | None = Field(default=None, gt=0)


def routes(context: ApiContext) -> list[BaseRoute]:
    """The request routes."""
    orchestrator = context.orchestrator

    async def list_requests(request: Request) -> Response:
        data = [_shown(view) for view in orchestrator.live_requests(owner=visible_to(request.scope))]
        return json_response({"object": "list", "data": data})

    class OneRequest(HTTPEndpoint):
        async def get(self, request: Request) -> Response:
            return json_response(
                _shown(orchestrator.find(request.path_params["request_id"], owner=visible_to(request.scope)))
            )

        async def patch(self, request: Request) -> Response:
            patch = _patch(await read_json_object(request, max_bytes=context.max_command_size), context)
            view = orchestrator.find(request.path_params["request_id"], owner=visible_to(request.scope))
            orchestrator.update(view.id, priority=patch.priority, timeout_s=patch.timeout)
            return json_response(_shown(orchestrator.find(view.id)))

        async def delete(self, request: Request) -> Response:
            view = orchestrator.find(request.path_params["request_id"], owner=visible_to(request.scope))
            orchestrator.abort(view.id)
            return json_response(_shown(orchestrator.find(view.id)))

    return [
        Route("/v1/requests", list_requests, methods=["GET"]),
        Route("/v1/requests/{request_id:path}", OneRequest),
    ]


def _shown(view: RequestView) -> dict[str, Any]:
    return {
        "id": view.id,
        "object": "request",
        "client_request_id": view.client_request_id,
        "model": view.model,
        "status": view.status,
        "priority": view.priority,
        "timeout_s": view.timeout_s,
        "created_at": view.created_at,
        "finished_at": view.finished_at,
        "units": view.units,
    }


def _patch(body: dict[str, Any], context: ApiContext) -> RequestPatch:
    try:
        patch = RequestPatch.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        raise parameter_error(error, RequestPatch.model_fields) from None
    if patch.priority is None and patch.timeout is None:
        raise TriptychError(ErrorCode.MISSING_PARAMETER, "priority or timeout is required", param="priority")
    if patch.timeout is not None:
        check_timeout(patch.timeout, context.limits)
    return patch
