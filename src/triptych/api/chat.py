"""`POST /v1/chat/completions`: the last user message is the prompt, the answer's content parts are the outputs.

One choice, one part per output, each a data URL with its seed; with `--chat-image-format images` pictures stand in
`message.images` beside an empty content, where LiteLLM looks for them.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from triptych.api.body import ChunkedJson, read_json_object
from triptych.api.context import ApiContext
from triptych.api.fields import CHAT_FIELDS
from triptych.api.generation import answer_tail, base64_of, generate, refuse_streaming, server_timing
from triptych.api.middleware import request_ids
from triptych.config.parameters import shown
from triptych.errors import ErrorCode, TriptychError
from triptych.orchestrator.events import UnitOutput

__all__ = ["routes"]

_IMAGE_PARTS = frozenset({"image_url", "input_image", "image"})


def routes(context: ApiContext) -> list[BaseRoute]:
    """The chat route."""

    async def create(request: Request) -> Response:
        fields = CHAT_FIELDS.sort(await read_json_object(request, max_bytes=context.max_body_size))
        context.check_model(fields.own.get("model"))
        refuse_streaming(fields.own.get("stream"))
        fields.common["prompt"] = _prompt(fields.own.get("messages"))
        try:
            outputs = await generate(context, request, fields)
        except TriptychError as error:
            if error.param == "prompt":
                error.param = "messages"
            raise
        head = _head(request_ids(request.scope).internal, context.model_name)
        chunks = [head, *_choice(outputs, context.chat_image_format), answer_tail(outputs, fields.ignored)]
        return ChunkedJson(chunks, headers=[server_timing(outputs)])

    return [Route("/v1/chat/completions", create, methods=["POST"])]


def _prompt(messages: Any) -> str:
    if messages is None:
        raise TriptychError(ErrorCode.MISSING_PARAMETER, "messages is required", param="messages")
    if not isinstance(messages, list) or not messages:
        raise _invalid(f"messages must be a list with at least one message, got {shown(messages)}")
    last: dict[str, Any] | None = None
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _invalid(f"messages[{index}] must be an object with a role, got {_got(message)}")
        if message["role"] == "user":
            last = message
    if last is None:
        raise _invalid("messages must hold a user message: its text is the prompt")
    content = last.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(f"content of the last user message must be a string or a list of parts, got {_got(content)}")
    return "\n".join(_text(part) for part in content)


def _text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text") and isinstance(text := part.get("text"), str):
        return text
    if isinstance(kind, str) and kind in _IMAGE_PARTS:
        message = "image inputs are not available in this version"
        raise TriptychError(ErrorCode.NOT_AVAILABLE, message, param="messages")
    wanted = '{"type": "text", "text": "..."}'
    raise _invalid(f"parts of a user message must look like {wanted}, got {_got(kind or part)}")


def _got(value: Any) -> str:
    return "null" if value is None else shown(value)


def _invalid(message: str) -> TriptychError:
    return TriptychError(ErrorCode.INVALID_VALUE, message, param="messages")


def _head(request_id: str, model: str) -> bytes:
    head = {
        "id": f"chatcmpl-{request_id.removeprefix('req_')}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
    }
    return msgspec.json.encode(head)[:-1] + b',"choices":[{"index":0,"message":{"role":"assistant","refusal":null,'


def _choice(outputs: list[UnitOutput], image_format: str) -> list[bytes]:
    as_images = image_format == "images" and all(output.mime.startswith("image/") for output in outputs)
    opening = b'"content":"","images":[' if as_images else b'"content":['
    chunks = []
    for index, output in enumerate(outputs):
        part = b"video_url" if output.mime.startswith("video/") else b"image_url"
        position = b'"index":%d,' % index if as_images else b""
        lead = b'{"type":"%b",%b"%b":{"url":"data:%b;base64,' % (part, position, part, output.mime.encode())
        chunks += [(b"," if index else opening) + lead, base64_of(output), b'"},"seed":%d}' % output.seed]
    return [*chunks, b']},"logprobs":null,"finish_reason":"stop"}]']
