"""Input pictures on their way to a request: how much of them there may be at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from triptych.api import media
from triptych.api.media import MediaReader, MediaSource
from triptych.errors import TriptychError
from triptych.media.inputs import Picture, invalid_image

pytestmark = pytest.mark.anyio


class Fetcher:
    """Brings as many bytes as the URL ends with."""

    def __init__(self) -> None:
        self.bounds: list[int] = []

    async def fetch(self, url: str, *, param: str, max_bytes: int) -> bytes:
        self.bounds.append(max_bytes)
        if (size := int(url.rpartition("/")[2])) > max_bytes:
            raise invalid_image(param, f"has more than {max_bytes} bytes")
        return bytes(size)


async def test_the_pictures_of_two_requests_are_decoded_at_a_time_and_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_way: set[bytes] = set()
    most = 0

    def decode(data: bytes, *, param: str, **_: Any) -> Picture:
        nonlocal most
        under_way.add(data)
        most = max(most, len(under_way))
        if param == "image[2]":
            under_way.remove(data)
        return Picture("RGB", 1, 1, data)

    monkeypatch.setattr(media, "decode_image", decode)
    reader = MediaReader(max_pixels=100, max_fetched_bytes=0, fetcher=None)
    requests = [[MediaSource(f"image[{index}]", b"%d" % number) for index in range(3)] for number in range(6)]
    results = await asyncio.gather(*(reader.read(sources) for sources in requests))
    assert [frames for _, frames in results] == [(b"%d" % number,) * 3 for number in range(6)]
    assert most <= 2


async def test_the_urls_of_one_request_share_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "decode_image", lambda data, **_: Picture("RGB", 1, 1, data[:3]))
    fetcher: Any = Fetcher()
    reader = MediaReader(max_pixels=100, max_fetched_bytes=100, fetcher=fetcher)
    sources = [MediaSource("image[0]", "http://a.example/60"), MediaSource("image[1]", b"abc")]
    await reader.read([*sources, MediaSource("image[2]", "HTTPS://a.example/40")])
    assert fetcher.bounds == [100, 40]
    with pytest.raises(TriptychError, match=r"image\[2\] has more than 40 bytes"):
        await reader.read([*sources, MediaSource("image[2]", "http://a.example/41")])
