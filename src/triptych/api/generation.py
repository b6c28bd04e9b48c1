"""From sorted body fields to finished outputs, the same for every generation route.

Parameters are validated and resolved once, the request is submitted, and while its outputs are awaited the connection
is watched: a client that goes away aborts its request at once. Outputs become JSON chunks around their base64 text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import pybase64
from starlette.requests import Request
from starlette.types import Receive

from triptych.api.context import ApiContext
from triptych.api.fields import BodyFields
from triptych.api.middleware import request_ids
from triptych.config.parameters import build_request, parse_parameters, shown
from triptych.errors import ErrorCode, TriptychError
from triptych.messages import GenerationRequest
from triptych.orchestrator.events import UnitOutput
from triptych.orchestrator.orchestrator import EventStream

__all__ = ["answer_tail", "base64_of", "generate", "refuse_streaming"]


async def generate(context: ApiContext, http: Request, fields: BodyFields) -> list[UnitOutput]:
    """Outputs of the request in unit order. Raises `TriptychError`; aborts when the client disconnects."""
    stream = context.orchestrator.submit(_request(context, http, fields))
    watcher = asyncio.create_task(_close_on_disconnect(http.receive, stream))
    try:
        return await stream.outputs()
    finally:
        watcher.cancel()
        stream.close()


def refuse_streaming(stream: object) -> None:
    """Check the `stream` field: only false works so far. Raises `TriptychError`."""
    if stream is None or stream is False:
        return
    if stream is True:
        raise TriptychError(ErrorCode.NOT_AVAILABLE, "stream: true is not available in this version", param="stream")
    raise TriptychError(ErrorCode.INVALID_VALUE, f"stream must be a boolean, got {shown(stream)}", param="stream")


def base64_of(output: UnitOutput) -> bytes:
    """Base64 text of the encoded output, safe inside a JSON string."""
    return pybase64.b64encode(output.data)


def answer_tail(outputs: Iterable[UnitOutput], ignored: list[str], **extra: Any) -> bytes:
    """The fields after the outputs, closing the answer's object; starts with a comma."""
    tail = {**extra, "metrics": [output.metrics for output in outputs], "ignored_parameters": ignored}
    return b"," + msgspec.json.encode(tail)[1:]


async def _close_on_disconnect(receive: Receive, stream: EventStream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.close()


def _request(context: ApiContext, http: Request, fields: BodyFields) -> GenerationRequest:
    if "session" not in fields.common and (session := http.headers.get("x-session-id")):
        fields.common["session"] = session
    parameters = parse_parameters(fields.common)
    ids = request_ids(http.scope)
    return build_request(
        parameters,
        model=context.model_name,
        info=context.loaded_model(),
        defaults=context.defaults,
        limits=context.limits,
        request_id=ids.internal,
        client_request_id=ids.client,
    )
