"""Clips on disk as answers: the whole file or ranges of it, and its first frame as a picture.

The disk is read in anyio's threads, as Starlette does it: one that never answers takes none of those that other
requests need, and the threads are daemons, so it does not keep a server that was told to stop.
"""

from __future__ import annotations

import re
from pathlib import Path

import anyio.to_thread
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from triptych.errors import ErrorCode, TriptychError
from triptych.media.images import encode_webp
from triptych.media.video import first_frame

__all__ = ["thumbnail_response", "video_response"]

_THUMBNAIL_QUALITY = 80
_POSITION = re.compile(r"[0-9]{0,18}")


async def video_response(path: Path) -> Response:
    """The clip; answers `Range` requests. Raises `TriptychError` when the file is gone."""
    try:
        found = await anyio.to_thread.run_sync(path.stat)
    except FileNotFoundError:
        raise _gone(path) from None
    return _ClipResponse(path, media_type="video/mp4", filename=path.name, stat_result=found)


async def thumbnail_response(path: Path) -> Response:
    """The first frame as WebP. Raises `TriptychError` when the file is gone."""

    def draw() -> bytes:
        return encode_webp(first_frame(path), compression=_THUMBNAIL_QUALITY)

    try:
        return Response(await anyio.to_thread.run_sync(draw), media_type="image/webp")
    except FileNotFoundError:
        raise _gone(path) from None


class _ClipResponse(FileResponse):
    """A file whose answers to ranges that it cannot give are error envelopes, too; a malformed `Range` is ignored."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ranges = [value.decode("latin-1") for name, value in scope["headers"] if name == b"range"]
        if ranges:
            verdict = _verdict(ranges[0], self.stat_result.st_size if self.stat_result else 0)
            if verdict is False:
                message = f"Range {ranges[0][:64]!r} lies outside of the {self.headers['content-length']} bytes"
                raise TriptychError(ErrorCode.RANGE_NOT_SATISFIABLE, message)
            if verdict is None:
                scope = {**scope, "headers": [entry for entry in scope["headers"] if entry[0] != b"range"]}
        await super().__call__(scope, receive, send)


def _verdict(header: str, size_bytes: int) -> bool | None:
    """Whether the base can answer these ranges with parts of the file; None: the header means nothing."""
    unit, _, text = header.partition("=")
    if unit.strip().lower() != "bytes":
        return None
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not dash or not (first or last) or not all(_POSITION.fullmatch(piece) for piece in (first, last)):
            return None
        if first and last and int(last) < int(first):
            return None
        if (first and int(first) >= size_bytes) or (not first and int(last) == 0):
            return False
    return True


def _gone(path: Path) -> TriptychError:
    return TriptychError(ErrorCode.NOT_FOUND, f"the file of video {path.stem} is not there any more")
