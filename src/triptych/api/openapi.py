"""`GET /openapi.json`: what this server takes and answers, as an OpenAPI 3.1 document.

Paths and methods come from the routes themselves, bodies from the tables and models that validate them, answers from
the types that are encoded (see `openapi_schemas`), statuses from the table of error codes. `_OPERATIONS` only says
which belongs to which; a route without an entry is listed with everything that a route may answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from triptych import __version__
from triptych.api.body import json_response
from triptych.api.context import ApiContext
from triptych.api.openapi_schemas import reference, schemas
from triptych.errors import CODES, ErrorCode

__all__ = ["document", "routes"]

_CONVERTER = re.compile(r"\{(\w+)(?::\w+)?\}")
_JSON = "application/json"
_ID_HEADER = {"x-request-id": {"required": True, "schema": {"type": "string", "minLength": 1}}}

_ANY = frozenset(
    {ErrorCode.INVALID_VALUE, ErrorCode.METHOD_NOT_ALLOWED, ErrorCode.READ_TIMEOUT, ErrorCode.HEADERS_TOO_LARGE}
)
_BODY = frozenset({ErrorCode.PAYLOAD_TOO_LARGE, ErrorCode.UNSUPPORTED_MEDIA_TYPE})
_READY = frozenset({ErrorCode.NOT_READY, ErrorCode.DRAINING, ErrorCode.NO_REPLICA})
_WORK = _READY | _BODY | {ErrorCode.MODEL_NOT_FOUND, ErrorCode.QUEUE_FULL, ErrorCode.REQUEST_ABORTED}
_WORK |= {ErrorCode.ENGINE_ERROR, ErrorCode.OUT_OF_MEMORY, ErrorCode.POISON_REQUEST, ErrorCode.DEADLINE_EXCEEDED}
_OPERATE = _BODY | {ErrorCode.PERMISSION_DENIED, ErrorCode.NOT_FOUND, ErrorCode.CONFLICT, ErrorCode.DRAINING}
_ONE = frozenset({ErrorCode.REQUEST_NOT_FOUND, ErrorCode.CONFLICT})
_VIDEO = frozenset({ErrorCode.VIDEO_NOT_FOUND})
_CONTENT = _VIDEO | {ErrorCode.CONFLICT, ErrorCode.NOT_FOUND, ErrorCode.RANGE_NOT_SATISFIABLE}
_STREAMED = (_JSON, "text/event-stream")
_PICTURE_TYPES = ("image/png", "image/jpeg", "image/webp")


@dataclass(frozen=True, slots=True)
class _Operation:
    """What a route takes and answers; `body`, `form` and `answer` name schemas, `codes` the ways to fail.

    One that answers `in_parts` heeds `Range`.
    """

    summary: str
    answer: str | None = None
    body: str | None = None
    codes: frozenset[ErrorCode] = frozenset()
    form: str | None = None
    answer_types: tuple[str, ...] = (_JSON,)
    body_required: bool = True
    in_parts: bool = False
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_OPERATIONS: dict[tuple[str, str], _Operation] = {
    ("POST", "/v1/images/generations"): _Operation(
        "Make pictures", "Images", "ImagesBody", _WORK | {ErrorCode.CONFLICT}, answer_types=_STREAMED
    ),
    ("POST", "/v1/images/edits"): _Operation(
        "Edit pictures",
        "Images",
        "EditBody",
        _WORK | {ErrorCode.INVALID_IMAGE, ErrorCode.CONFLICT},
        form="EditForm",
        answer_types=_STREAMED,
    ),
    ("POST", "/v1/chat/completions"): _Operation(
        "Make outputs in a chat", "ChatCompletion", "ChatBody", _WORK, answer_types=_STREAMED
    ),
    ("POST", "/v1/videos"): _Operation(
        "Make a video", "Video", "VideoBody", _WORK | {ErrorCode.CONFLICT}, form="VideoForm"
    ),
    ("GET", "/v1/videos"): _Operation(
        "List videos",
        "VideoList",
        query={
            "after": {"type": "string", "description": "id of the last video of the page before"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 100},
            "order": {"enum": ["asc", "desc"]},
        },
    ),
    ("GET", "/v1/videos/{video_id}"): _Operation("Get a video job", "Video", None, _VIDEO),
    ("DELETE", "/v1/videos/{video_id}"): _Operation(
        "Stop a video job and forget it", "VideoDeleted", None, _VIDEO | {ErrorCode.ENGINE_ERROR}
    ),
    ("GET", "/v1/videos/{video_id}/content"): _Operation(
        "Get the file of a video, or parts of it",
        None,
        None,
        _CONTENT,
        answer_types=("video/mp4", "image/webp"),
        query={"variant": {"enum": ["video", "thumbnail"]}},
        in_parts=True,
    ),
    ("GET", "/v1/models"): _Operation("List the served names", "ModelList"),
    ("GET", "/v1/models/{model_id}"): _Operation("Get a served name", "Model", None, frozenset({ErrorCode.NOT_FOUND})),
    ("GET", "/v1/requests"): _Operation("List what waits and runs", "RequestList"),
    ("GET", "/v1/requests/{request_id}"): _Operation("Get a request", "Request", None, _ONE),
    ("PATCH", "/v1/requests/{request_id}"): _Operation(
        "Change priority or timeout", "Request", "RequestPatch", _ONE | _BODY
    ),
    ("DELETE", "/v1/requests/{request_id}"): _Operation("End a request", "Request", None, _ONE),
    ("GET", "/v1/replicas"): _Operation("List the replicas", "ReplicaList"),
    ("PUT", "/v1/replicas"): _Operation("Say how many replicas run", "ReplicaList", "ReplicaCount", _OPERATE),
    ("POST", "/v1/replicas/{replica_id}/drain"): _Operation(
        "Let a replica finish and end", "ReplicaView", "Nothing", _OPERATE, body_required=False
    ),
    ("POST", "/v1/replicas/{replica_id}/restart"): _Operation(
        "Let a replica finish and start anew", "ReplicaView", "Nothing", _OPERATE, body_required=False
    ),
    ("GET", "/results/{name}"): _Operation(
        "Get a picture that an answer links to",
        None,
        None,
        frozenset({ErrorCode.NOT_FOUND, ErrorCode.ENGINE_ERROR}),
        answer_types=_PICTURE_TYPES,
    ),
    ("GET", "/livez"): _Operation("Whether the loop turns", "Status"),
    **{
        ("GET", path): _Operation("Whether work is taken", "Status", None, _READY)
        for path in ("/readyz", "/health", "/ping")
    },
    ("GET", "/version"): _Operation("The version", "Version"),
    ("GET", "/"): _Operation("The front page"),
    ("GET", "/openapi.json"): _Operation("This document"),
}


def routes(context: ApiContext, *, closed: Sequence[BaseRoute], opened: Sequence[BaseRoute]) -> list[BaseRoute]:
    """The route of the document, which describes these routes and itself."""

    async def openapi(request: Request) -> Response:
        return json_response(
            document(context, closed=[*closed, own], opened=opened, root_path=request.scope["root_path"])
        )

    own = Route("/openapi.json", openapi, methods=["GET"])
    return [own]


def document(
    context: ApiContext, *, closed: Sequence[BaseRoute], opened: Sequence[BaseRoute], root_path: str = ""
) -> dict[str, Any]:
    """The document of these routes; `closed` ones need a key where there are keys."""
    paths: dict[str, dict[str, Any]] = {}
    for route in (*closed, *opened):
        assert isinstance(route, Route)
        path = _CONVERTER.sub(r"{\1}", route.path)
        for method in _methods(route):
            operation = _OPERATIONS.get((method, path)) or _plain(f"{method} {path}")
            needs_key = context.keys.are_required and route in closed
            paths.setdefault(path, {})[method.lower()] = _described(operation, path, needs_key=needs_key)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Triptych", "version": __version__, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": context.public_url or root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas(context.limits, context.orchestrator.model),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _plain(summary: str) -> _Operation:
    """A route of which nothing more is said here."""
    return _Operation(summary, codes=frozenset(ErrorCode), answer_types=())


def _methods(route: Route) -> list[str]:
    """In alphabetical order; HEAD goes without saying beside GET."""
    named = route.methods or {name for name in ("DELETE", "GET", "PATCH") if hasattr(route.endpoint, name.lower())}
    return sorted(set(named) - {"HEAD"})


def _described(operation: _Operation, path: str, *, needs_key: bool) -> dict[str, Any]:
    codes = _ANY | operation.codes | ({ErrorCode.INVALID_API_KEY} if needs_key else set())
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _CONVERTER.findall(path)
    ]
    parameters += [{"name": name, "in": "query", "schema": dict(schema)} for name, schema in operation.query.items()]
    described: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": parameters,
        "responses": {"200": _answer(operation), **_parts(operation), **_failures(codes)},
        "security": [{"key": []}] if needs_key else [],
    }
    if operation.body is not None:
        content = {_JSON: {"schema": reference(operation.body)}}
        if operation.form is not None:
            content["multipart/form-data"] = {"schema": reference(operation.form)}
        described["requestBody"] = {"required": operation.body_required, "content": content}
    return described


def _answer(operation: _Operation) -> dict[str, Any]:
    schema = {} if operation.answer is None else {"schema": reference(operation.answer)}
    content = {media_type: schema if media_type == _JSON else {} for media_type in operation.answer_types}
    return {"description": "as asked", "headers": _ID_HEADER, "content": content}


def _parts(operation: _Operation) -> dict[str, Any]:
    """Nothing for routes that only answer the whole."""
    if not operation.in_parts:
        return {}
    content: dict[str, Any] = {operation.answer_types[0]: {}, "multipart/byteranges": {}}
    return {"206": {"description": "the parts that `Range` names", "headers": _ID_HEADER, "content": content}}


def _failures(codes: Iterable[ErrorCode]) -> dict[str, Any]:
    by_status: dict[int, list[str]] = {}
    for code in sorted(codes):
        by_status.setdefault(CODES[code].status, []).append(code.value)
    content = {_JSON: {"schema": reference("Error")}}
    return {
        str(status): {"description": ", ".join(names), "headers": _ID_HEADER, "content": content}
        for status, names in sorted(by_status.items())
    }
