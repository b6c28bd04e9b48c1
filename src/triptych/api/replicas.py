"""`/v1/replicas`: state, devices, load and restarts of every replica, and the three ways to change them.

Writing needs an operator (see `access`): the admin key, or where there are no keys a caller on this machine.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from triptych.api.access import check_operator
from triptych.api.body import json_response, read_json_object
from triptych.api.context import ApiContext
from triptych.config.parameters import parameter_error, shown
from triptych.errors import ErrorCode, TriptychError

__all__ = ["routes"]


class ReplicaCount(BaseModel):
    """Body of PUT: how many replicas shall run."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    count: int


def routes(context: ApiContext) -> list[BaseRoute]:
    """The replica routes."""
    orchestrator = context.orchestrator

    async def replicas(request: Request) -> Response:
        if request.method != "PUT":
            return _listing(orchestrator.replicas())
        check_operator(request, context.keys)
        count = _count(await read_json_object(request, max_bytes=context.max_command_size))
        return _listing(orchestrator.resize(count))

    async def drain(request: Request) -> Response:
        check_operator(request, context.keys)
        await _check_empty(request, context)
        return json_response(orchestrator.drain_replica(_replica_id(request)))

    async def restart(request: Request) -> Response:
        check_operator(request, context.keys)
        await _check_empty(request, context)
        return json_response(orchestrator.restart_replica(_replica_id(request)))

    return [
        Route("/v1/replicas", replicas, methods=["GET", "PUT"]),
        Route("/v1/replicas/{replica_id}/drain", drain, methods=["POST"]),
        Route("/v1/replicas/{replica_id}/restart", restart, methods=["POST"]),
    ]


def _listing(views: object) -> Response:
    return json_response({"object": "list", "data": views})


def _replica_id(request: Request) -> int:
    text = request.path_params["replica_id"]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise TriptychError(ErrorCode.NOT_FOUND, f"there is no replica {shown(text)}")
    return int(text)


def _count(body: dict[str, Any]) -> int:
    given = {name: value for name, value in body.items() if value is not None}
    try:
        return ReplicaCount.model_validate(given).count
    except ValidationError as error:
        raise parameter_error(error, ReplicaCount.model_fields) from None


async def _check_empty(request: Request, context: ApiContext) -> None:
    """These routes take no fields; an empty body or an empty object is fine."""
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return
    for name in await read_json_object(request, max_bytes=context.max_command_size):
        raise TriptychError(ErrorCode.UNKNOWN_PARAMETER, f"unknown parameter {shown(name)}", param=name)
