"""The HTTP application: one registry of endpoint modules behind one boundary.

A request passes `Boundary` (ids, error envelopes), Starlette's router and one route; a new endpoint is a new module
with `routes(context)` and one line in `_ENDPOINTS`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.api import chat, health, images, index, models, replicas, requests
from triptych.api.context import ApiContext
from triptych.api.middleware import Boundary
from triptych.config.parameters import validate_defaults
from triptych.config.settings import ServeSettings
from triptych.orchestrator.orchestrator import Orchestrator

__all__ = ["create_app"]

_ENDPOINTS = (
    images.routes,
    chat.routes,
    requests.routes,
    replicas.routes,
    models.routes,
    health.routes,
    index.routes,
)


def create_app(
    orchestrator: Orchestrator,
    settings: ServeSettings,
    *,
    served_model_names: Sequence[str],
    defaults: Mapping[str, Any],
) -> ASGIApp:
    """The ASGI app; `defaults` are the stage file's `default_sampling_params`. Raises `ConfigError` for bad ones."""
    context = ApiContext(
        orchestrator=orchestrator,
        served_model_names=tuple(served_model_names),
        defaults=validate_defaults(defaults, where="default_sampling_params"),
        limits=settings.limits(),
        max_body_size=settings.max_body_size,
        chat_image_format=settings.chat_image_format,
        started_at=int(time.time()),
    )
    routes = [route for endpoint in _ENDPOINTS for route in endpoint(context)]
    return Boundary(Router(routes, redirect_slashes=False, default=_not_found))


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        raise HTTPException(404)
    await send({"type": "websocket.close"})
