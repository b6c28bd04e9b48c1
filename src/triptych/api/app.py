"""The HTTP application: one registry of endpoint modules behind one boundary.

A request passes `Boundary` (ids, access log), where asked for CORS, then `Envelopes` (errors), `Guard` (API keys),
`BodyRoom` (memory for bodies), Starlette's router and one route; a new endpoint is a new module with
`routes(context)` and one line in `_ENDPOINTS`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.api import chat, health, images, index, models, openapi, replicas, requests, result_links, videos
from triptych.api.access import ApiKeys, Guard
from triptych.api.body_room import BodyRoom
from triptych.api.context import ApiContext
from triptych.api.cors import Cors
from triptych.api.media import MediaReader
from triptych.api.middleware import Boundary, Envelopes
from triptych.api.results import Results
from triptych.config.parameters import validate_defaults
from triptych.config.settings import ServeSettings
from triptych.jobs.video_jobs import VideoJobs
from triptych.orchestrator.orchestrator import Orchestrator

if TYPE_CHECKING:
    from triptych.media.fetch import MediaFetcher

__all__ = ["create_app"]

_ENDPOINTS = (
    images.routes,
    chat.routes,
    index.unbuilt_routes,  # before what has a video's id in its path
    videos.routes,
    requests.routes,
    replicas.routes,
    models.routes,
)
_BODY_ROOM_BYTES = 1 << 30
_OPEN_ENDPOINTS = (health.routes, index.routes, result_links.routes)  # no key is needed for these


def create_app(
    orchestrator: Orchestrator,
    jobs: VideoJobs,
    results: Results,
    settings: ServeSettings,
    *,
    served_model_names: Sequence[str],
    defaults: Mapping[str, Any],
) -> ASGIApp:
    """The ASGI app; `defaults` are the stage file's `default_sampling_params`. Raises `ConfigError` for bad ones."""
    context = ApiContext(
        orchestrator=orchestrator,
        jobs=jobs,
        served_model_names=tuple(served_model_names),
        defaults=validate_defaults(defaults, where="default_sampling_params"),
        limits=settings.limits(),
        max_body_size=settings.max_body_size,
        chat_image_format=settings.chat_image_format,
        started_at=int(time.time()),
        keys=ApiKeys(settings.api_keys, settings.admin_api_key),
        log_prompts=settings.log_prompts,
        public_url=settings.public_url,
        results=results,
        media=MediaReader(
            max_pixels=settings.max_pixels, max_fetched_bytes=settings.max_body_size, fetcher=_fetcher(settings)
        ),
    )
    closed = [route for endpoint in _ENDPOINTS for route in endpoint(context)]
    opened = [route for endpoint in _OPEN_ENDPOINTS for route in endpoint(context)]
    closed += openapi.routes(context, closed=closed, opened=opened)
    app: ASGIApp = Router([*closed, *opened], redirect_slashes=False, default=_not_found)
    app = BodyRoom(app, room_bytes=max(_BODY_ROOM_BYTES, 2 * settings.max_body_size))
    app = Envelopes(Guard(app, context.keys, opened))
    if settings.allowed_origins:
        app = Cors(app, settings.allowed_origins)
    return Boundary(app, root_path=settings.root_path)


def _fetcher(settings: ServeSettings) -> MediaFetcher | None:
    if not settings.allowed_media_domains:
        return None
    from triptych.media.fetch import MediaFetcher  # it brings an HTTP client that most servers do without

    return MediaFetcher(settings.allowed_media_domains)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        raise HTTPException(404)
    await send({"type": "websocket.close"})
