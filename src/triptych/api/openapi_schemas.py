"""The schemas of the OpenAPI document, from the declarations that validate and encode.

Bodies: the pydantic models and the field tables of the routes, with the operator's limits put in. Answers: the types
that msgspec encodes, and by hand what the routes put around them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import BaseModel

from triptych.api.fields import CHAT_FIELDS, EDIT_FIELDS, IMAGE_FIELDS, VIDEO_FIELDS, RouteFields
from triptych.api.replicas import ReplicaCount
from triptych.api.requests import RequestPatch
from triptych.config.parameters import CommonParameters, Limits, unsupported_parameters
from triptych.errors import ErrorCode
from triptych.jobs.job import JobStatus
from triptych.messages import ModelInfo
from triptych.orchestrator.events import ReplicaView, RequestStatus, UnitMetrics, UnitView

__all__ = ["reference", "schemas"]

_Schema = dict[str, Any]
_TEMPLATE = "#/components/schemas/"
_STRING: _Schema = {"type": "string"}
_INTEGER: _Schema = {"type": "integer"}
_NUMBER: _Schema = {"type": "number"}
_MAYBE_STRING: _Schema = {"type": ["string", "null"]}

_EXAMPLE = "a red circle above a blue square"
_EXAMPLE_PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAAEElEQVR42mNsYIAAJgaKGAAmCACQtTEKkQAAAABJRU5ErkJggg=="
    ""
)
_PICTURE: _Schema = {
    "description": "a picture or a list of them: data URL, base64 text, URL of an allowed host, in forms a file"
}
_UPLOAD: _Schema = {"type": "string", "format": "binary"}

# Fields that a route has of its own; the common ones are in `CommonParameters`.
_OWN: Mapping[str, _Schema] = {
    "model": {**_MAYBE_STRING, "description": "one of the served names"},
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {"type": "object", "properties": {"role": _STRING}, "required": ["role"]},
        "description": "the text of the last user message is the prompt",
    },
    "stream": {"type": ["boolean", "null"]},
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": {"type": ["boolean", "null"]}}},
    "image": _PICTURE,
    "images": _PICTURE,
    "mask": _PICTURE,
    "partial_images": {"type": ["integer", "null"], "minimum": 0, "maximum": 3},
    "response_format": {"enum": ["b64_json", "url", None]},
    "input_reference": {"description": "a picture to begin with: a file, a data URL, or an object with image_url"},
}


def reference(name: str) -> _Schema:
    """A reference to a schema of the document."""
    return {"$ref": f"{_TEMPLATE}{name}"}


def schemas(limits: Limits, info: ModelInfo | None) -> dict[str, _Schema]:
    """Every schema by name; once a model is loaded, bodies name what it takes."""
    common, definitions = _of_model(CommonParameters)
    _limit(common["properties"], limits)
    if info is not None:
        _fit(common["properties"], info)
    made: dict[str, _Schema] = {
        **definitions,
        "ImagesBody": _body(IMAGE_FIELDS, common["properties"], {"prompt": _EXAMPLE}),
        "ChatBody": _body(CHAT_FIELDS, common["properties"], {"messages": [{"role": "user", "content": _EXAMPLE}]}),
        "EditBody": _body(EDIT_FIELDS, common["properties"], {"prompt": _EXAMPLE, "image": _EXAMPLE_PICTURE}),
        "EditForm": _form(EDIT_FIELDS, common["properties"]),
        "VideoBody": _body(VIDEO_FIELDS, common["properties"], {"prompt": _EXAMPLE}),
        "VideoForm": _form(VIDEO_FIELDS, common["properties"]),
        "Nothing": {"type": "object", "maxProperties": 0},
    }
    for model in (RequestPatch, ReplicaCount):
        made[model.__name__], definitions = _of_model(model)
        made |= definitions
    _, components = msgspec.json.schema_components(
        [UnitMetrics, UnitView, ReplicaView, RequestStatus, JobStatus, ErrorCode], ref_template=_TEMPLATE + "{name}"
    )
    return {**made, **components, **_answers()}


def _answers() -> dict[str, _Schema]:
    tail = {"metrics": _list_of(reference("UnitMetrics")), "ignored_parameters": _list_of(_STRING)}
    error = {"message": _STRING, "type": _STRING, "param": _MAYBE_STRING, "code": reference("ErrorCode")}
    picture = _object({"seed": _INTEGER}, optional={"b64_json": _STRING, "url": _STRING})
    model: dict[str, _Schema] = {"id": _STRING, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _STRING}
    choice: dict[str, _Schema] = {
        "index": {"const": 0},
        "message": {"type": "object"},
        "finish_reason": {"const": "stop"},
    }
    completion: dict[str, _Schema] = {
        "id": _STRING,
        "object": {"const": "chat.completion"},
        "created": _INTEGER,
        "model": _STRING,
    }
    request: dict[str, _Schema] = {
        "id": _STRING,
        "object": {"const": "request"},
        "client_request_id": _MAYBE_STRING,
        "model": _STRING,
        "status": reference("RequestStatus"),
        "priority": _INTEGER,
        "timeout_s": _NUMBER,
        "created_at": _NUMBER,
        "finished_at": {"type": ["number", "null"]},
        "units": _list_of(reference("UnitView")),
    }
    page = dict.fromkeys(("first_id", "last_id"), _MAYBE_STRING)
    return {
        "Error": _object({"error": _object(error)}),
        "Video": _object(_video() | tail),
        "VideoList": _object({**_listing("Video")["properties"], **page, "has_more": {"type": "boolean"}}),
        "VideoDeleted": _object({"id": _STRING, "object": {"const": "video.deleted"}, "deleted": {"const": True}}),
        "Images": _object(
            {"created": _INTEGER, "data": _list_of(picture), "output_format": _STRING, "size": _STRING, **tail}
        ),
        "ChatCompletion": _object({**completion, "choices": _list_of(_object(choice)), **tail}),
        "Model": _object(model),
        "ModelList": _listing("Model"),
        "Request": _object(request),
        "RequestList": _listing("Request"),
        "ReplicaList": _listing("ReplicaView"),
        "Status": _object({"status": {"enum": ["ok", "degraded"]}}, optional={"degraded": _list_of(_INTEGER)}),
        "Version": _object({"version": _STRING}),
    }


def _video() -> dict[str, _Schema]:
    moment: _Schema = {"type": ["integer", "null"]}
    return {
        "id": _STRING,
        "object": {"const": "video"},
        "model": _STRING,
        "status": reference("JobStatus"),
        "progress": {"type": "integer", "minimum": 0, "maximum": 100},
        "created_at": _INTEGER,
        "completed_at": moment,
        "expires_at": moment,
        "error": {"type": ["object", "null"], "properties": {"code": reference("ErrorCode"), "message": _STRING}},
        "prompt": _STRING,
        "remixed_from_video_id": {"type": "null"},
        "seconds": _STRING,
        "size": _STRING,
        "num_frames": _INTEGER,
        "fps": _INTEGER,
        "seed": _INTEGER,
        "request_id": _STRING,
    }


def _body(fields: RouteFields, common: Mapping[str, _Schema], example: Mapping[str, Any]) -> _Schema:
    """`example` holds what is required."""
    properties = {name: common[name] for name in common if name in fields.common}
    properties |= {name: _OWN.get(name, {}) for name in sorted(fields.own)}
    properties |= {name: {"description": "accepted and ignored"} for name in sorted(fields.ignored)}
    properties["extra_body"] = {"type": ["object", "null"], "description": "further fields, as if at top level"}
    return {
        "type": "object",
        "properties": properties,
        "required": list(example),
        "additionalProperties": False,
        "examples": [{**example, "seed": 7}, {**example, "n": 2, "size": "auto", "output_format": "jpeg"}],
    }


def _form(fields: RouteFields, common: Mapping[str, _Schema]) -> _Schema:
    """The same fields as parts of a form: pictures are files."""
    body = _body(fields, common, {"prompt": _EXAMPLE})
    uploads: dict[str, _Schema] = {name: _UPLOAD for name in ("image", "mask", "input_reference") if name in fields.own}
    if "image" in uploads:
        uploads["image[]"] = {"type": "array", "items": _UPLOAD}
    return {**body, "properties": {**body["properties"], **uploads}}


def _limit(properties: Mapping[str, _Schema], limits: Limits) -> None:
    """What one server allows, where its models allow more."""
    for name, most in (
        ("num_inference_steps", limits.max_num_inference_steps),
        ("num_frames", limits.max_num_frames),
        ("timeout", limits.request_timeout_s),
        ("width", limits.max_pixels),
        ("height", limits.max_pixels),
    ):
        _value(properties[name])["maximum"] = most
    properties["prompt"] |= {"minLength": 1, "pattern": r"\S"}


def _fit(properties: dict[str, _Schema], info: ModelInfo) -> None:
    """What the loaded model takes, as the validation sees it."""
    for name in list(properties):
        told: dict[str, Any] = {} if name == "extra_args" else {name: True}
        said = CommonParameters.model_construct(**{"prompt": "x", **told})
        if unsupported_parameters(said, info):
            del properties[name]
    for name in ("width", "height"):
        if name in properties:
            _value(properties[name])["multipleOf"] = info.size_multiple
    _value(properties["extra_args"])["propertyNames"] = {"enum": list(info.extra_parameters)}


def _value(schema: _Schema) -> _Schema:
    """The schema beside null."""
    value: _Schema = next(choice for choice in schema["anyOf"] if choice["type"] != "null")
    return value


def _of_model(model: type[BaseModel]) -> tuple[_Schema, dict[str, _Schema]]:
    schema = model.model_json_schema(ref_template=_TEMPLATE + "{model}")
    return schema, schema.pop("$defs", {})


def _object(properties: Mapping[str, _Schema], *, optional: Mapping[str, _Schema] | None = None) -> _Schema:
    return {"type": "object", "properties": {**properties, **(optional or {})}, "required": list(properties)}


def _list_of(items: _Schema) -> _Schema:
    return {"type": "array", "items": items}


def _listing(name: str) -> _Schema:
    return _object({"object": {"const": "list"}, "data": _list_of(reference(name))})
