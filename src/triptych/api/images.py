"""`POST /v1/images/generations`: OpenAI's picture route with the common parameters.

The answer has OpenAI's shape, `b64_json` per picture in order of index, each with its seed.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from triptych.api.body import ChunkedJson, read_json_object
from triptych.api.context import ApiContext
from triptych.api.fields import IMAGE_FIELDS
from triptych.api.generation import answer_tail, base64_of, generate, refuse_streaming
from triptych.config.parameters import shown
from triptych.errors import ErrorCode, TriptychError
from triptych.orchestrator.events import UnitOutput

__all__ = ["routes"]

_MAX_PARTIAL_IMAGES = 3


def routes(context: ApiContext) -> list[BaseRoute]:
    """The picture route."""

    async def create(request: Request) -> Response:
        fields = IMAGE_FIELDS.sort(await read_json_object(request, max_bytes=context.max_body_size))
        context.check_model(fields.own.get("model"))
        refuse_streaming(fields.own.get("stream"))
        _check_partial_images(fields.own.get("partial_images"))
        _check_response_format(fields.own.get("response_format"))
        if (info := context.orchestrator.model) is not None and info.kind != "image":
            message = f"{context.model_name!r} makes videos; POST /v1/chat/completions takes the same parameters"
            raise TriptychError(ErrorCode.INVALID_VALUE, message, param="model")
        outputs = await generate(context, request, fields)
        return ChunkedJson([*_data(outputs), _tail(outputs, fields.ignored)])

    return [Route("/v1/images/generations", create, methods=["POST"])]


def _check_partial_images(count: Any) -> None:
    if count is None or (count == 0 and type(count) is int):
        return
    if type(count) is not int or not 0 < count <= _MAX_PARTIAL_IMAGES:
        message = f"partial_images must be an integer from 0 to {_MAX_PARTIAL_IMAGES}, got {shown(count)}"
        raise TriptychError(ErrorCode.INVALID_VALUE, message, param="partial_images")
    message = f"partial_images is not available in this version, got {count}"
    raise TriptychError(ErrorCode.NOT_AVAILABLE, message, param="partial_images")


def _check_response_format(response_format: Any) -> None:
    if response_format is None or response_format == "b64_json":
        return
    if response_format == "url":
        message = "response_format 'url' is not available in this version; 'b64_json' is"
        raise TriptychError(ErrorCode.NOT_AVAILABLE, message, param="response_format")
    message = f"response_format must be 'b64_json' or 'url', got {shown(response_format)}"
    raise TriptychError(ErrorCode.INVALID_VALUE, message, param="response_format")


def _data(outputs: list[UnitOutput]) -> list[bytes]:
    opening = b'{"created":%d,"data":[{"b64_json":"' % int(time.time())
    chunks = []
    for index, output in enumerate(outputs):
        lead = b',{"b64_json":"' if index else opening
        chunks += [lead, base64_of(output), b'","seed":%d}' % output.seed]
    return [*chunks, b"]"]


def _tail(outputs: list[UnitOutput], ignored: list[str]) -> bytes:
    first = outputs[0]
    output_format = first.mime.removeprefix("image/")
    return answer_tail(outputs, ignored, output_format=output_format, size=f"{first.width}x{first.height}")
