"""Input pictures that clients name by URL: fetched from allowed hosts only, and never from inside this network.

Every address a name resolves to is checked, and the connection goes to one of the checked addresses, so a name that
resolves differently the next moment gains nothing; redirects are followed by hand and pass the same checks.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from triptych.media.inputs import invalid_image

__all__ = ["MediaFetcher", "is_public"]

_TIMEOUT_S = 20.0
_MAX_REDIRECTS = 3
_CHUNK_BYTES = 64 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # all that IPv6 has handed out; the rest holds odd wrappings of IPv4


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet, whatever it is wrapped in."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip not in _GLOBAL_UNICAST:
            return False
    return ip.is_global and not ip.is_multicast


class _Blocked(OSError):
    """A name resolved to an address that is not public."""


class _CheckedResolver(AbstractResolver):
    """Resolves names as the system does and refuses a name that leads anywhere but to allowed addresses."""

    def __init__(self, inner: AbstractResolver, is_allowed: Callable[[str], bool]) -> None:
        self._inner = inner
        self._is_allowed = is_allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        if not found or not all(self._is_allowed(result["host"]) for result in found):
            raise _Blocked(f"{host} leads to an address that is not public")
        return found

    async def close(self) -> None:
        await self._inner.close()


class MediaFetcher:
    """Fetches from `hosts` (exact names), each time within `timeout_s` seconds, redirects included."""

    def __init__(
        self,
        hosts: Collection[str],
        *,
        timeout_s: float = _TIMEOUT_S,
        resolver: Callable[[], AbstractResolver] = aiohttp.ThreadedResolver,
        is_allowed: Callable[[str], bool] = is_public,
    ) -> None:
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._timeout_s = timeout_s
        self._resolver = resolver
        self._is_allowed = is_allowed

    async def fetch(self, url: str, *, param: str, max_bytes: int) -> bytes:
        """The body behind an http(s) URL, at most `max_bytes`. Raises `invalid_image` for everything that fails."""
        resolver = _CheckedResolver(self._resolver(), self._is_allowed)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),  # that would be one for each redirect
            headers={"accept": "image/*", "accept-encoding": "identity"},
            auto_decompress=False,
        )
        try:
            async with session, asyncio.timeout(self._timeout_s):
                return await self._follow(session, url, param, max_bytes)
        except _Blocked:
            raise invalid_image(param, "cannot be fetched: its host leads to an address that is not public") from None
        except TimeoutError:
            raise invalid_image(param, f"cannot be fetched within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error.__cause__, _Blocked):
                raise invalid_image(
                    param, "cannot be fetched: its host leads to an address that is not public"
                ) from None
            raise invalid_image(param, f"cannot be fetched: {type(error).__name__}") from None

    async def _follow(self, session: aiohttp.ClientSession, url: str, param: str, max_bytes: int) -> bytes:
        target = URL(url)
        for _ in range(_MAX_REDIRECTS + 1):
            self._check(target, param)
            async with session.get(target, allow_redirects=False) as response:
                if response.status not in _REDIRECTS:
                    return await _body(response, param, max_bytes)
                target = target.join(URL(response.headers.get("location", "")))
        raise invalid_image(param, f"cannot be fetched: it redirects more than {_MAX_REDIRECTS} times")

    def _check(self, url: URL, param: str) -> None:
        if url.scheme not in ("http", "https"):
            raise invalid_image(param, f"cannot be fetched: {url.scheme[:16]!r} is neither http nor https")
        host = (url.host or "").lower().rstrip(".")
        if host not in self._hosts:
            raise invalid_image(param, f"cannot be fetched: {host[:128]!r} is not among the allowed hosts")
        # The resolver is asked for names only; an address in the URL is connected to as it stands.
        if _is_address(host) and not self._is_allowed(host):
            raise invalid_image(param, "cannot be fetched: its address is not public")


async def _body(response: aiohttp.ClientResponse, param: str, max_bytes: int) -> bytes:
    if response.status != 200:
        raise invalid_image(param, f"cannot be fetched: its server answered {response.status}")
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        body += chunk
        if len(body) > max_bytes:
            raise invalid_image(param, f"has more than {max_bytes} bytes")
    return bytes(body)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
