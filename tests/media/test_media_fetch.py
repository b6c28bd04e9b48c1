"""Pictures fetched by URL: allowed hosts only, public addresses only, bounded, on every redirect anew."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.test_utils import TestServer

from triptych.errors import ErrorCode, TriptychError
from triptych.media.fetch import MediaFetcher, is_public

pytestmark = pytest.mark.anyio

LOOPBACK = "127.0.0.1"


class TableResolver(AbstractResolver):
    """Names from a table; counts how often it was asked."""

    def __init__(self, table: dict[str, list[str]]) -> None:
        self.table = table
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        self.asked.append(host)
        return [
            ResolveResult(hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=0)
            for address in self.table[host]
        ]

    async def close(self) -> None:
        pass


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    async def picture(request: web.Request) -> web.Response:
        return web.Response(body=b"picture")

    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPFound(request.query["to"])

    async def loop(request: web.Request) -> web.Response:
        raise web.HTTPFound("/loop")

    async def winding(request: web.Request) -> web.Response:
        await asyncio.sleep(0.15)
        left = int(request.query["left"])
        raise web.HTTPFound(f"/winding?left={left - 1}" if left else "/picture")

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"\0" * 4096)

    async def silent(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.add_routes(
        [
            web.get("/picture", picture),
            web.get("/redirect", redirect),
            web.get("/loop", loop),
            web.get("/winding", winding),
            web.get("/endless", endless),
            web.get("/silent", silent),
        ]
    )
    async with TestServer(app) as server:
        yield server


def fetcher(resolver: TableResolver, **options: Any) -> MediaFetcher:
    """Allows pictures.example; takes loopback for public unless told otherwise."""
    settings: dict[str, Any] = {"is_allowed": lambda address: address == LOOPBACK}
    return MediaFetcher(["Pictures.example", LOOPBACK], resolver=lambda: resolver, **(settings | options))


async def refusal(made: MediaFetcher, url: str) -> str:
    with pytest.raises(TriptychError) as caught:
        await made.fetch(url, param="image", max_bytes=10_000)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_IMAGE, "image")
    return caught.value.message


@pytest.fixture
def resolver() -> TableResolver:
    return TableResolver({"pictures.example": [LOOPBACK], "other.example": [LOOPBACK]})


@pytest.fixture
def url(server: TestServer) -> Callable[[str], str]:
    return lambda path: f"http://pictures.example:{server.port}{path}"


async def test_a_picture_of_an_allowed_host_is_fetched(resolver: TableResolver, url: Callable[[str], str]) -> None:
    assert await fetcher(resolver).fetch(url("/picture"), param="image", max_bytes=10_000) == b"picture"
    assert resolver.asked == ["pictures.example"]


async def test_other_hosts_are_not_even_resolved(resolver: TableResolver) -> None:
    for host in ("other.example", "pictures.example.evil.example", "evil@other.example", "[::1]"):
        assert "not among the allowed hosts" in await refusal(fetcher(resolver), f"http://{host}/picture")
    assert resolver.asked == []


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["169.254.169.254"]])
async def test_a_name_that_leads_inside_is_refused(addresses: list[str], url: Callable[[str], str]) -> None:
    resolver = TableResolver({"pictures.example": addresses})
    assert "not public" in await refusal(fetcher(resolver, is_allowed=is_public), url("/picture"))


async def test_an_address_instead_of_a_name_is_checked_too(resolver: TableResolver, server: TestServer) -> None:
    target = f"http://{LOOPBACK}:{server.port}/picture"
    assert await fetcher(resolver).fetch(target, param="image", max_bytes=10_000) == b"picture"
    assert "not public" in await refusal(fetcher(resolver, is_allowed=is_public), target)


async def test_every_redirect_is_checked_again(
    resolver: TableResolver, url: Callable[[str], str], server: TestServer
) -> None:
    made = fetcher(resolver)
    assert await made.fetch(url(f"/redirect?to={url('/picture')}"), param="image", max_bytes=10_000) == b"picture"
    assert len(resolver.asked) == 2
    other = f"http://other.example:{server.port}/picture"
    assert "'other.example' is not among" in await refusal(made, url(f"/redirect?to={other}"))
    assert "neither http nor https" in await refusal(made, url("/redirect?to=file:///etc/passwd"))
    assert "redirects more than 3 times" in await refusal(made, url("/loop"))
    resolver.table["pictures.example"] = ["10.0.0.1"]
    assert "not public" in await refusal(made, url("/picture"))


async def test_size_and_time_are_bounded(resolver: TableResolver, url: Callable[[str], str]) -> None:
    assert "more than 10000 bytes" in await refusal(fetcher(resolver), url("/endless"))
    assert "within 0.2 s" in await refusal(fetcher(resolver, timeout_s=0.2), url("/silent"))
    assert "within 0.2 s" in await refusal(fetcher(resolver, timeout_s=0.2), url("/winding?left=2"))


async def test_what_cannot_be_fetched_is_the_clients_error(resolver: TableResolver, url: Callable[[str], str]) -> None:
    assert "its server answered 404" in await refusal(fetcher(resolver), url("/nowhere"))
    for bad in ("http://", "http://pictures.example:99999/", "http://pictures.example:1/"):
        await refusal(fetcher(resolver), bad)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d822", True),
        ("64:ff9b:1::7f00:1", False),
        ("2002:7f00:1::", False),
        ("::127.0.0.1", False),
        ("::ffff:0:127.0.0.1", False),
    ],
)
async def test_public_addresses_are_told_from_all_others(address: str, public: bool) -> None:
    assert is_public(address) is public
