"""Field types of the access flags: keys that a header can carry, web origins, the address that clients see.

Each is text in the form in which it is later compared or put together, or a problem that says what is wanted.
"""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from triptych.config.fields import problem

__all__ = ["ApiKey", "HttpUrl", "Origin", "RootPath"]

_KEY = re.compile(r"[!-~]{1,512}")
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")


def _api_key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise problem("not a key that a header can carry", "1 to 512 visible ASCII characters")
    return key


def _root_path(path: str) -> str:
    if not _PATH.fullmatch(trimmed := path.rstrip("/")):
        raise problem("not a path prefix", "a path such as /images, of letters, digits and ._~-")
    return trimmed


def _http_url(url: str) -> str:
    if not _has_host(url) or urlsplit(url).query or urlsplit(url).fragment:
        raise problem("not an address", "an address such as https://images.example.org/prefix")
    return url.rstrip("/")


def _origin(origin: str) -> str:
    """As browsers send it: lower case, no path."""
    if origin == "*":
        return origin
    if not _has_host(origin) or origin.removesuffix("/").count("/") != 2:
        raise problem("not a web origin", "scheme and host such as https://example.org:8443, or * for all")
    return origin.removesuffix("/").lower()


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        return False


ApiKey = Annotated[str, AfterValidator(_api_key)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
Origin = Annotated[str, AfterValidator(_origin)]
RootPath = Annotated[str, AfterValidator(_root_path)]
