"""From sorted body fields to finished outputs, the same for every generation route.

`submit` validates and resolves the parameters once and hands the request over; within `closing_on_disconnect` the
connection is watched, so that a client that goes away aborts its request at once; `generate` is both, for one answer,
and `sse.EventAnswer` for a stream.
Outputs become JSON chunks around their base64 text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pybase64
from starlette.requests import Request
from starlette.types import Receive

from triptych.api.access import owner_of
from triptych.api.body_room import forget_body
from triptych.api.context import ApiContext
from triptych.api.fields import BodyFields
from triptych.api.middleware import request_ids
from triptych.config.parameters import build_request, parse_parameters, shown
from triptych.errors import CODES, ErrorCode, TriptychError
from triptych.messages import GenerationRequest
from triptych.orchestrator.events import UnitOutput, UnitPreview
from triptych.orchestrator.orchestrator import EventStream

__all__ = [
    "answer_tail",
    "base64_of",
    "closing_on_disconnect",
    "generate",
    "log_failure",
    "option",
    "server_timing",
    "submit",
    "validated_request",
    "wants_stream",
]

_log = logging.getLogger(__name__)


def submit(context: ApiContext, http: Request, fields: BodyFields, *, previews: int = 0) -> EventStream:
    """Validate and hand over; the request belongs to the caller. Raises `TriptychError`.

    `previews` is how many partial pictures of each output shall come before it.
    """
    try:
        request = validated_request(context, http, fields)
        if previews:
            request = msgspec.structs.replace(request, previews=previews)
        return context.orchestrator.submit(request)
    except TriptychError as error:
        log_failure(context, request_ids(http.scope).internal, error)
        raise


@contextmanager
def closing_on_disconnect(receive: Receive, stream: EventStream) -> Iterator[None]:
    """Abort the request when the client goes away, and when the block is left before its end."""
    watcher = asyncio.create_task(_close_on_disconnect(receive, stream))
    try:
        yield
    finally:
        watcher.cancel()
        stream.close()


async def generate(context: ApiContext, http: Request, fields: BodyFields) -> list[UnitOutput]:
    """Outputs of the request in unit order. Raises `TriptychError`; aborts when the client disconnects."""
    stream = submit(context, http, fields)
    try:
        with closing_on_disconnect(http.receive, stream):
            return await stream.outputs()
    except TriptychError as error:
        log_failure(context, stream.request_id, error)
        raise


def log_failure(context: ApiContext, request_id: str, error: TriptychError) -> None:
    """One line for a request that ended without its outputs, unless the client asked for the impossible."""
    if error.status < CODES[ErrorCode.REQUEST_ABORTED].status:
        return
    aborted = error.code in (ErrorCode.REQUEST_ABORTED, ErrorCode.DEADLINE_EXCEEDED)
    extra: dict[str, Any] = {"request": request_id, "status": error.status, "code": error.code}
    try:
        view = context.orchestrator.find(request_id)
    except TriptychError:  # it was never accepted
        pass
    else:
        ended_at = view.finished_at or time.time()
        extra["replicas"] = sorted({unit.replica for unit in view.units if unit.replica is not None})
        extra["seconds"] = round(ended_at - view.created_at, 3)
    _log.log(logging.INFO if aborted else logging.WARNING, "request failed: %s", error.message, extra=extra)


def option(fields: BodyFields, name: str) -> Any:
    """A field of the route's own that is a number or a boolean, in a form as text."""
    value = fields.own.get(name)
    if fields.is_form and isinstance(value, str):
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(value)
    return value


def wants_stream(fields: BodyFields) -> bool:
    """The field `stream`. Raises `TriptychError`."""
    stream = option(fields, "stream")
    if stream is None or isinstance(stream, bool):
        return bool(stream)
    raise TriptychError(ErrorCode.INVALID_VALUE, f"stream must be a boolean, got {shown(stream)}", param="stream")


def base64_of(picture: UnitOutput | UnitPreview) -> bytes:
    """Base64 text of an encoded result or partial picture, safe inside a JSON string."""
    return pybase64.b64encode(picture.data)


def answer_tail(outputs: Iterable[UnitOutput], ignored: list[str], **extra: Any) -> bytes:
    """The fields after the outputs, closing the answer's object; starts with a comma."""
    tail = {**extra, "metrics": [output.metrics for output in outputs], "ignored_parameters": ignored}
    return b"," + msgspec.json.encode(tail)[1:]


def server_timing(outputs: Sequence[UnitOutput]) -> tuple[bytes, bytes]:
    """The `Server-Timing` header in milliseconds: for each phase its longest among the outputs."""
    phases = {
        b"queue": max(output.metrics.queue_s for output in outputs),
        b"inference": max(output.metrics.inference_s for output in outputs),
        b"encode": max(output.encode_s for output in outputs),
    }
    return b"server-timing", b", ".join(b"%b;dur=%.1f" % (name, 1e3 * seconds) for name, seconds in phases.items())


async def _close_on_disconnect(receive: Receive, stream: EventStream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.close()


def validated_request(context: ApiContext, http: Request, fields: BodyFields) -> GenerationRequest:
    """What the fields ask for, checked and resolved; it belongs to the caller. Raises `TriptychError`."""
    if "session" not in fields.common and (session := http.headers.get("x-session-id")):
        fields.common["session"] = session
    parameters = parse_parameters(fields.common, form=fields.is_form)
    forget_body(http.scope)
    ids = request_ids(http.scope)
    request = build_request(
        parameters,
        model=context.model_name,
        info=context.loaded_model(),
        defaults=context.defaults,
        limits=context.limits,
        inputs=fields.inputs,
        frames=fields.frames,
        request_id=ids.internal,
        client_request_id=ids.client,
        owner=owner_of(http.scope),
    )
    if context.log_prompts:
        _log.info("request received", extra={"request": request.id, "prompt": shown(request.params.prompt)})
    return request
