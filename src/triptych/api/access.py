"""Who may do what: API keys on the way in, owners of requests, operators of replicas.

`Guard` reads `Authorization: Bearer KEY` once per request and leaves the caller in the scope; routes ask
`owner_of`, `visible_to` and `check_operator`. A caller goes by the hash of its key: the key itself is kept nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.errors import ErrorCode, TriptychError

__all__ = ["ApiKeys", "Caller", "Guard", "check_operator", "owner_of", "visible_to"]

_SCOPE_KEY = "triptych.caller"
_NAME_DIGITS = 16
_NOT_FROM_HERE = ("origin", "forwarded", "x-forwarded-for", "x-real-ip")


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key; `name` is a hash of it and the same after a restart of the server."""

    name: str
    is_admin: bool


class ApiKeys:
    """The keys of one server, as hashes. Client keys close every route that is not open; the admin key opens all."""

    def __init__(self, client_keys: Sequence[str], admin_key: str | None) -> None:
        self.are_required = bool(client_keys)
        self.has_admin = admin_key is not None
        self._callers = [_known(key, is_admin=False) for key in client_keys]
        if admin_key is not None:
            self._callers.append(_known(admin_key, is_admin=True))

    def caller(self, headers: Sequence[tuple[bytes, bytes]]) -> Caller | None:
        """Whose key the request bears; takes the same time whichever key it is, or none."""
        if not self._callers:
            return None
        digest = _digest(_bearer(headers))
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


class Guard:
    """Lets a request through to the router when it bears a key or asks for one of the open routes."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._keys = keys
        self._open_routes = open_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = scope[_SCOPE_KEY] = self._keys.caller(scope["headers"])
            if caller is None and self._keys.are_required and not self._is_open(scope):
                raise _refusal(scope["headers"])
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for route in self._open_routes)


def owner_of(scope: Mapping[str, Any]) -> str | None:
    """To whom a request made now belongs; None where callers are not told apart."""
    caller: Caller | None = scope.get(_SCOPE_KEY)
    return None if caller is None else caller.name


def visible_to(scope: Mapping[str, Any]) -> str | None:
    """Whose requests this caller may see and change; None: everybody's."""
    caller: Caller | None = scope.get(_SCOPE_KEY)
    return None if caller is None or caller.is_admin else caller.name


def check_operator(request: Request, keys: ApiKeys) -> None:
    """Accept who may change replicas: the admin key, or without any keys a caller on this machine.

    A page in a browser or a proxy on this machine is local only by appearance. Raises `TriptychError`.
    """
    caller: Caller | None = request.scope.get(_SCOPE_KEY)
    if keys.has_admin or keys.are_required:
        if caller is None:
            raise _refusal(request.scope["headers"])
        if not caller.is_admin:
            reason = "this one is not it" if keys.has_admin else "this server has none (--admin-api-key)"
            message = f"replicas can be changed with the admin key only; {reason}"
            raise TriptychError(ErrorCode.PERMISSION_DENIED, message)
        return
    suspect = next((header for header in _NOT_FROM_HERE if header in request.headers), None)
    if suspect is None and request.client is not None and _is_loopback(request.client.host):
        return
    reason = "came from elsewhere" if suspect is None else f"has the header {suspect}"
    message = f"replicas can be changed from the machine of the server only; this request {reason}"
    raise TriptychError(ErrorCode.PERMISSION_DENIED, message)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _known(key: str, *, is_admin: bool) -> tuple[bytes, Caller]:
    digest = _digest(key.encode())
    name = _digest(digest).hex()[:_NAME_DIGITS]  # names are shown, so they are no part of what is compared
    return digest, Caller(f"key_{name}", is_admin)


def _bearer(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else b""
    return b""


def _refusal(headers: Sequence[tuple[bytes, bytes]]) -> TriptychError:
    reason = "this key is not known" if _bearer(headers) else "none was sent"
    message = f"an API key is needed, as `Authorization: Bearer KEY`; {reason}"
    return TriptychError(ErrorCode.INVALID_API_KEY, message)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
