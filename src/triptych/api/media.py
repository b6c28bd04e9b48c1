"""Input pictures of a request, whatever way they came: uploads, data URLs, or URLs of hosts that are allowed.

They are decoded in threads beside the event loop and travel on as raw frames. Those of two requests at a time are
decoded, others wait as they were sent, so there is little that is decoded and not yet counted by the orchestrator.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triptych.config.parameters import shown
from triptych.errors import ErrorCode, TriptychError
from triptych.media.data_urls import decode_data_url
from triptych.media.inputs import Picture, decode_image, decode_mask, framed, invalid_image
from triptych.messages import MediaInput

if TYPE_CHECKING:
    from triptych.media.fetch import MediaFetcher

__all__ = ["MAX_INPUT_PICTURES", "MediaReader", "MediaSource", "edit_sources", "sources_of"]

MAX_INPUT_PICTURES = 16
_DECODERS = 2


@dataclass(frozen=True, slots=True)
class MediaSource:
    """Where one picture is: its bytes, or the text of a URL; `param` is the field that errors name."""

    param: str
    content: bytes | str


def sources_of(value: Any, *, param: str) -> list[MediaSource]:
    """The pictures of a body field: one or a list of files, data URLs, or OpenAI's objects around an `image_url`.

    Raises `TriptychError`.
    """
    if isinstance(value, list):
        if len(value) > MAX_INPUT_PICTURES:
            message = f"{param} must hold at most {MAX_INPUT_PICTURES} pictures, got {len(value)}"
            raise TriptychError(ErrorCode.INVALID_VALUE, message, param=param)
        return [
            MediaSource(f"{param}[{index}]", _content(item, f"{param}[{index}]")) for index, item in enumerate(value)
        ]
    return [MediaSource(param, _content(value, param))]


def edit_sources(own: Mapping[str, Any]) -> tuple[list[MediaSource], MediaSource | None]:
    """Pictures (`image`, or `images` as in OpenAI's JSON) and mask of an edit. Raises `TriptychError`."""
    said = [name for name in ("image", "images") if own.get(name) not in (None, [])]
    if not said:
        raise TriptychError(ErrorCode.MISSING_PARAMETER, "image is required", param="image")
    if len(said) > 1:
        raise TriptychError(
            ErrorCode.INVALID_VALUE, "images is another name of image; send one of them", param="images"
        )
    mask = own.get("mask")
    if mask is None:
        return sources_of(own[said[0]], param=said[0]), None
    return sources_of(own[said[0]], param=said[0]), MediaSource("mask", _content(mask, "mask"))


class MediaReader:
    """Decodes the pictures of requests; larger ones than `max_pixels` are scaled down to it.

    The URLs of one request may bring `max_fetched_bytes` in all.
    """

    def __init__(self, *, max_pixels: int, max_fetched_bytes: int, fetcher: MediaFetcher | None) -> None:
        self._max_pixels = max_pixels
        self._max_fetched_bytes = max_fetched_bytes
        self._fetcher = fetcher
        self._threads = ThreadPoolExecutor(_DECODERS, thread_name_prefix="decode")
        self._turns = asyncio.Semaphore(_DECODERS)

    async def read(
        self, pictures: Sequence[MediaSource], mask: MediaSource | None = None
    ) -> tuple[tuple[MediaInput, ...], tuple[bytes, ...]]:
        """What travels to a replica: descriptions and frames, the mask last. Raises `TriptychError`."""
        sources = [*pictures, *([] if mask is None else [mask])]
        contents, left_bytes = [], self._max_fetched_bytes
        for source in sources:
            content = source.content
            if isinstance(content, str) and content[:8].lower().startswith(("http://", "https://")):
                content = await self._fetched(content, source.param, left_bytes)
                left_bytes -= len(content)
            contents.append(content)
        loop, decoded = asyncio.get_running_loop(), []
        async with self._turns:
            for source, content in zip(sources, contents, strict=True):
                decode = functools.partial(self._decode, source.param, content, is_mask=source is mask)
                decoded.append(await loop.run_in_executor(self._threads, decode))
        return framed(decoded)

    async def _fetched(self, url: str, param: str, max_bytes: int) -> bytes:
        if self._fetcher is None:
            message = "must be a data URL or base64 text: this server fetches no URLs (--allowed-media-domains)"
            raise invalid_image(param, message)
        return await self._fetcher.fetch(url, param=param, max_bytes=max_bytes)

    def _decode(self, param: str, content: bytes | str, *, is_mask: bool) -> Picture:
        data = decode_data_url(content, param=param) if isinstance(content, str) else content
        return (decode_mask if is_mask else decode_image)(data, param=param, max_pixels=self._max_pixels)


def _content(item: Any, param: str) -> bytes | str:
    if isinstance(item, dict):
        if item.get("file_id") is not None:
            message = f"{param}.file_id is not available in this version; image_url takes a data URL"
            raise TriptychError(ErrorCode.NOT_AVAILABLE, message, param=param)
        item = item.get("image_url", item.get("url"))
        if isinstance(item, dict):
            item = item.get("url")
    if isinstance(item, bytes | str):
        return item
    message = f"{param} must be a file, a data URL or an object with an image_url, got {shown(item)}"
    raise TriptychError(ErrorCode.INVALID_VALUE, message, param=param)
