"""`POST /v1/chat/completions`: the last user message is the prompt, the answer's content parts are the outputs.

One choice, one part per output, each a data URL with its seed; with `--chat-image-format images` pictures stand in
`message.images` beside an empty content, where LiteLLM looks for them. With `stream: true` see `chat_chunks`.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from triptych.api.body import ChunkedJson, read_json_object
from triptych.api.chat_chunks import ChatChunks, include_usage
from triptych.api.chat_content import content_members
from triptych.api.chat_input import read_messages
from triptych.api.context import ApiContext
from triptych.api.fields import CHAT_FIELDS
from triptych.api.generation import answer_tail, generate, server_timing, submit, wants_stream
from triptych.api.middleware import request_ids
from triptych.api.sse import EventAnswer
from triptych.errors import TriptychError
from triptych.orchestrator.events import UnitOutput

__all__ = ["routes"]


def routes(context: ApiContext) -> list[BaseRoute]:
    """The chat route."""

    async def create(request: Request) -> Response:
        fields = CHAT_FIELDS.sort(await read_json_object(request, max_bytes=context.max_body_size))
        context.check_model(fields.own.get("model"))
        stream = wants_stream(fields)
        usage = include_usage(fields, stream=stream)
        fields.common["prompt"], pictures = read_messages(fields.own.get("messages"))
        fields.inputs, fields.frames = await context.media.read(pictures)
        del pictures  # a request may wait for long, and has them decoded
        fields.own.clear()
        head = _head(request_ids(request.scope).internal, context.model_name)
        try:
            if stream:
                accepted = submit(context, request, fields)
                encoder = ChatChunks(head, image_format=context.chat_image_format, usage=usage, ignored=fields.ignored)
                return EventAnswer(context, accepted, encoder, prompt_field="messages")
            outputs = await generate(context, request, fields)
        except TriptychError as error:
            if error.param in ("prompt", "image"):
                error.param = "messages"
            raise
        chunks = [*_choice(head, outputs, context.chat_image_format), answer_tail(outputs, fields.ignored)]
        return ChunkedJson(chunks, headers=[server_timing(outputs)])

    return [Route("/v1/chat/completions", create, methods=["POST"])]


def _head(request_id: str, model: str) -> dict[str, Any]:
    name = f"chatcmpl-{request_id.removeprefix('req_')}"
    return {"id": name, "object": "chat.completion", "created": int(time.time()), "model": model}


def _choice(head: dict[str, Any], outputs: list[UnitOutput], image_format: Literal["parts", "images"]) -> list[bytes]:
    message = b',"choices":[{"index":0,"message":{"role":"assistant","refusal":null,'
    opening = msgspec.json.encode(head)[:-1] + message
    return [opening, *content_members(outputs, image_format), b'},"logprobs":null,"finish_reason":"stop"}]']
