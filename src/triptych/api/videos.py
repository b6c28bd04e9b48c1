"""`/v1/videos`: OpenAI's job API. A job is made, asked for, listed, fetched as a file and deleted.

Jobs are what `jobs/` keeps; here they get their shape: statuses only `queued`, `in_progress`, `completed`, `failed`,
numbers that the official types call strings as strings, the reason of a failure under `error`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from triptych.api.access import owner_of, visible_to
from triptych.api.body import json_response, read_json_or_form
from triptych.api.context import ApiContext
from triptych.api.errors import envelope
from triptych.api.fields import VIDEO_FIELDS, BodyFields
from triptych.api.generation import log_failure, validated_request
from triptych.api.idempotency import check_same_request, idempotency_of
from triptych.api.media import sources_of
from triptych.api.middleware import request_ids
from triptych.api.video_files import thumbnail_response, video_response
from triptych.config.parameters import shown
from triptych.errors import ErrorCode, TriptychError
from triptych.jobs.job import Job, JobStatus
from triptych.messages import GenerationRequest

__all__ = ["routes"]

_DEFAULT_PAGE, _LONGEST_PAGE = 20, 100
_MAX_ID = 64
_UNIT_ALIASES = ("n", "num_outputs_per_prompt")


def routes(context: ApiContext) -> list[BaseRoute]:
    """The video routes."""
    jobs = context.jobs

    async def create(request: Request) -> Response:
        named = idempotency_of(request)
        if named is not None and (job := jobs.find_by_key(named.key, owner=owner_of(request.scope))) is not None:
            if job.idempotency is not None:
                check_same_request(named, job.idempotency)
            return json_response(_shown(context, job))
        body, is_form = await read_json_or_form(request, max_bytes=context.max_body_size)
        fields = VIDEO_FIELDS.sort(body, is_form=is_form)
        context.check_model(fields.own.get("model"))
        _check_kind(context)
        try:
            generation = await _generation(context, request, fields)
            job = await jobs.create(
                generation,
                patient="timeout" not in fields.common,
                idempotency=named,
                ignored_parameters=tuple(fields.ignored),
            )
        except TriptychError as error:
            log_failure(context, request_ids(request.scope).internal, error)
            raise
        return json_response(_shown(context, job))

    async def listing(request: Request) -> Response:
        after, limit, newest_first = _page(request)
        page, has_more = jobs.page(owner=visible_to(request.scope), after=after, limit=limit, newest_first=newest_first)
        return json_response(
            {
                "object": "list",
                "data": [_shown(context, job) for job in page],
                "first_id": page[0].id if page else None,
                "last_id": page[-1].id if page else None,
                "has_more": has_more,
            }
        )

    class OneVideo(HTTPEndpoint):
        async def get(self, request: Request) -> Response:
            return json_response(_shown(context, _find(context, request)))

        async def delete(self, request: Request) -> Response:
            job = _find(context, request)
            await jobs.delete(job.id, owner=visible_to(request.scope))
            return json_response({"id": job.id, "object": "video.deleted", "deleted": True})

    async def content(request: Request) -> Response:
        job = _find(context, request)
        variant = request.query_params.get("variant", "video")
        if variant == "spritesheet":
            message = "variant 'spritesheet' is not available in this version; 'video' and 'thumbnail' are"
            raise TriptychError(ErrorCode.NOT_AVAILABLE, message, param="variant")
        if variant not in ("video", "thumbnail"):
            message = f"variant must be 'video' or 'thumbnail', got {shown(variant)}"
            raise TriptychError(ErrorCode.INVALID_VALUE, message, param="variant")
        if job.status is not JobStatus.COMPLETED:
            message = f"video {job.id} has no content: it is {job.status}"
            raise TriptychError(ErrorCode.CONFLICT, message)
        path = jobs.path_of(job)
        return await (thumbnail_response(path) if variant == "thumbnail" else video_response(path))

    return [
        Route("/v1/videos", context.idempotent(create), methods=["POST"]),
        Route("/v1/videos", listing, methods=["GET"]),
        Route("/v1/videos/{video_id}/content", content, methods=["GET"]),
        Route("/v1/videos/{video_id}", OneVideo),
    ]


def _check_kind(context: ApiContext) -> None:
    if context.loaded_model().kind != "video":
        message = f"{context.model_name!r} makes pictures; POST /v1/images/generations takes the same parameters"
        raise TriptychError(ErrorCode.INVALID_VALUE, message, param="model")


async def _generation(context: ApiContext, http: Request, fields: BodyFields) -> GenerationRequest:
    """The request of a job: one clip, with the picture it shall begin with where one was sent."""
    reference = fields.own.get("input_reference")
    if reference is not None:
        if context.loaded_model().image is None:
            message = f"input_reference is not supported: {context.model_name!r} takes no pictures"
            raise TriptychError(ErrorCode.UNSUPPORTED_PARAMETER, message, param="input_reference")
        if isinstance(reference, list):
            message = f"input_reference must be one picture, got {len(reference)}"
            raise TriptychError(ErrorCode.INVALID_VALUE, message, param="input_reference")
        fields.inputs, fields.frames = await context.media.read(sources_of(reference, param="input_reference"))
    if isinstance(seconds := fields.common.get("seconds"), str) and not fields.is_form:
        fields.common["seconds"] = _number(seconds)  # a string in OpenAI's schema
    if not any(name in fields.common for name in _UNIT_ALIASES):
        fields.common["n"] = "1" if fields.is_form else 1
    request = validated_request(context, http, fields)
    if request.n != 1:
        raise TriptychError(ErrorCode.INVALID_VALUE, f"n must be 1: a job makes one video, got {request.n}", param="n")
    return request


def _number(text: str) -> Any:
    try:
        return msgspec.json.decode(text, type=float)
    except msgspec.DecodeError:
        return text


def _find(context: ApiContext, request: Request) -> Job:
    return context.jobs.find(request.path_params["video_id"], owner=visible_to(request.scope))


def _page(request: Request) -> tuple[str | None, int, bool]:
    query = request.query_params
    order, text, after = query.get("order", "desc"), query.get("limit", str(_DEFAULT_PAGE)), query.get("after")
    if order not in ("asc", "desc"):
        message = f"order must be 'asc' or 'desc', got {shown(order)}"
        raise TriptychError(ErrorCode.INVALID_VALUE, message, param="order")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= _LONGEST_PAGE):
        message = f"limit must be an integer from 1 to {_LONGEST_PAGE}, got {shown(text)}"
        raise TriptychError(ErrorCode.INVALID_VALUE, message, param="limit")
    if after is not None and not (after.startswith("video_") and len(after) <= _MAX_ID):
        message = f"after must be the id of a video, got {shown(after)}"
        raise TriptychError(ErrorCode.INVALID_VALUE, message, param="after")
    return after, int(text), order == "desc"


def _shown(context: ApiContext, job: Job) -> dict[str, Any]:
    params, video, failure = job.request.params, job.video, job.failure
    info = context.orchestrator.model
    width, height = params.width, params.height
    if video is not None:
        width, height = video.width, video.height
    elif (width is None or height is None) and info is not None:
        width, height = info.default_width, info.default_height
    frames, fps = params.num_frames or 1, params.fps or 1
    error = None
    if failure is not None:
        error = envelope(TriptychError(failure.code, failure.message, param=failure.param))["error"]
    return {
        "id": job.id,
        "object": "video",
        "model": job.request.model,
        "status": job.status,
        "progress": context.jobs.percent(job),
        "created_at": int(job.created_at),
        "completed_at": None if video is None or job.ended_at is None else int(job.ended_at),
        "expires_at": None if job.expires_at is None else int(job.expires_at),
        "error": error,
        "prompt": params.prompt,
        "remixed_from_video_id": None,
        "seconds": f"{frames / fps:g}",
        "size": f"{width}x{height}",
        "num_frames": frames,
        "fps": fps,
        "seed": params.seed,
        "request_id": job.request.id,
        "metrics": [] if video is None else [video.metrics],
        "ignored_parameters": job.ignored_parameters,
    }
