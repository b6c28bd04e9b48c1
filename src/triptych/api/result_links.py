"""`GET /results/{name}` and the links to it.

The route is open: the name, which nobody can guess, is the key.
"""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from triptych.api.context import ApiContext
from triptych.api.results import RESULTS_PATH

__all__ = ["link_to", "routes"]

_HOST = re.compile(r"[A-Za-z0-9._~:\[\]-]{1,255}")


def link_to(request: Request, context: ApiContext, name: str) -> str:
    """Where a client finds the result: at `--public-url`, else at the address that it called."""
    if (base := context.public_url) is None:
        host = request.headers.get("host", "")
        if not _HOST.fullmatch(host):
            address, port = request.scope.get("server") or ("localhost", 80)
            host = f"[{address}]" if ":" in address else address
            host += f":{port}" if port else ""
        base = f"{request.scope['scheme']}://{host}{request.scope['root_path']}"
    return f"{base}{RESULTS_PATH}{name}"


def routes(context: ApiContext) -> list[BaseRoute]:
    """The route of the results; it is open."""

    async def result(request: Request) -> Response:
        mime, data, left_s = await context.results.read(request.path_params["name"])
        headers = {"cache-control": f"private, max-age={int(left_s)}", "x-content-type-options": "nosniff"}
        return Response(data, media_type=mime, headers=headers)

    return [Route(f"{RESULTS_PATH}{{name}}", result, methods=["GET"])]
