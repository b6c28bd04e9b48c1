"""`POST /v1/images/generations` and `/v1/images/edits`: OpenAI's picture routes with the common parameters.

The answer has OpenAI's shape, `b64_json` or `url` per picture in order of index, each with its seed; with
`stream: true` see `image_events`.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from triptych.api.body import ChunkedJson, read_json_object, read_json_or_form
from triptych.api.context import ApiContext
from triptych.api.fields import EDIT_FIELDS, IMAGE_FIELDS, BodyFields
from triptych.api.generation import answer_tail, base64_of, generate, server_timing, submit, wants_stream
from triptych.api.image_events import ImageEvents, partial_images
from triptych.api.media import edit_sources
from triptych.api.result_links import link_to
from triptych.api.sse import EventAnswer
from triptych.config.parameters import shown
from triptych.errors import ErrorCode, TriptychError
from triptych.orchestrator.events import UnitOutput

__all__ = ["routes"]


def routes(context: ApiContext) -> list[BaseRoute]:
    """The picture routes."""

    async def create(request: Request) -> Response:
        body = await read_json_object(request, max_bytes=context.max_body_size)
        return await answer(request, IMAGE_FIELDS.sort(body), "image_generation")

    async def edit(request: Request) -> Response:
        body, is_form = await read_json_or_form(request, max_bytes=context.max_body_size)
        fields = EDIT_FIELDS.sort(body, is_form=is_form)
        del body  # a request may wait for long, and has its pictures decoded
        return await answer(request, fields, "image_edit")

    async def answer(
        request: Request, fields: BodyFields, event: Literal["image_generation", "image_edit"]
    ) -> Response:
        context.check_model(fields.own.get("model"))
        stream = wants_stream(fields)
        previews = partial_images(fields, stream=stream)
        response_format = fields.own.get("response_format")
        _check_response_format(response_format, stream=stream)
        if (info := context.orchestrator.model) is not None and info.kind != "image":
            message = f"{context.model_name!r} makes videos; POST /v1/videos takes the same parameters"
            raise TriptychError(ErrorCode.INVALID_VALUE, message, param="model")
        if event == "image_edit":
            fields.inputs, fields.frames = await context.media.read(*edit_sources(fields.own))
        fields.own.clear()
        if stream:
            accepted = submit(context, request, fields, previews=previews)
            return EventAnswer(context, accepted, ImageEvents(event, ignored=fields.ignored))
        outputs = await generate(context, request, fields)
        links = await _links(context, request, outputs) if response_format == "url" else None
        chunks = [*_data(outputs, links), _tail(outputs, fields.ignored)]
        return ChunkedJson(chunks, headers=[server_timing(outputs)])

    return [
        Route("/v1/images/generations", context.idempotent(create), methods=["POST"]),
        Route("/v1/images/edits", context.idempotent(edit), methods=["POST"]),
    ]


def _check_response_format(response_format: Any, *, stream: bool) -> None:
    if stream and response_format == "url":
        message = "response_format 'url' does not go with stream: true, whose events hold the pictures themselves"
        raise TriptychError(ErrorCode.INVALID_VALUE, message, param="response_format")
    if response_format in (None, "b64_json", "url"):
        return
    message = f"response_format must be 'b64_json' or 'url', got {shown(response_format)}"
    raise TriptychError(ErrorCode.INVALID_VALUE, message, param="response_format")


async def _links(context: ApiContext, request: Request, outputs: list[UnitOutput]) -> list[str]:
    return [link_to(request, context, await context.results.keep(output)) for output in outputs]


def _data(outputs: list[UnitOutput], links: list[str] | None) -> list[bytes]:
    chunks = [b'{"created":%d,"data":[' % int(time.time())]
    for index, output in enumerate(outputs):
        comma = b"," if index else b""
        if links is None:
            chunks += [comma + b'{"b64_json":"', base64_of(output), b'","seed":%d}' % output.seed]
        else:
            chunks.append(comma + msgspec.json.encode({"url": links[index], "seed": output.seed}))
    return [*chunks, b"]"]


def _tail(outputs: list[UnitOutput], ignored: list[str]) -> bytes:
    first = outputs[0]
    output_format = first.mime.removeprefix("image/")
    return answer_tail(outputs, ignored, output_format=output_format, size=f"{first.width}x{first.height}")
