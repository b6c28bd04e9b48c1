"""Framing of messages on the private socket between server and replica, without I/O.

One record is: u32 body length, u32 frame count, frame count times u64 frame length, msgpack body, raw frames.
`Decoder` fits both `asyncio.BufferedProtocol` and blocking `recv_into`: small records share one scratch buffer, a
large frame is read straight into its own memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from triptych.messages import FromReplica, ToReplica

__all__ = [
    "Decoder",
    "Frame",
    "WireError",
    "encode",
    "from_replica_decoder",
    "keep_frame_memory",
    "to_replica_decoder",
]

Frame = bytes | bytearray | memoryview
T = TypeVar("T")

_PREFIX = struct.Struct("<II")
_SCRATCH_BYTES = 64 * 1024
_MIN_READ_BYTES = 4 * 1024
_MAX_BODY_BYTES = 16 * 1024 * 1024
_MAX_FRAME_BYTES = 4 * 1024**3
_MAX_FRAMES = 256
_KEPT_BLOCK_BYTES = 16 * 1024 * 1024
_encoder = msgspec.msgpack.Encoder()


class WireError(Exception):
    """The peer sent something that is no record of ours; the connection cannot go on."""


def encode(message: ToReplica | FromReplica, frames: Sequence[Frame] = ()) -> list[Frame]:
    """Buffers of one record in sending order, fit for `writelines` or `sendmsg`; frames are not copied."""
    body = _encoder.encode(message)
    lengths = struct.pack(f"<{len(frames)}Q", *(memoryview(frame).nbytes for frame in frames))
    return [_PREFIX.pack(len(body), len(frames)) + lengths + body, *frames]


class Decoder(Generic[T]):
    """Turns received bytes into (message, frames); feed it through `get_buffer` and `buffer_updated`."""

    def __init__(self, body_decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._body_decoder = body_decoder
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._start = self._end = 0
        self._message: T | None = None
        self._frames: list[bytearray] = []
        self._lengths: tuple[int, ...] = ()
        self._filled = 0  # bytes of the frame being read

    def get_buffer(self, size_hint: int = -1) -> memoryview:
        """Where the next bytes belong."""
        if self._message is not None:
            return memoryview(self._frames[-1])[self._filled :]
        if len(self._scratch) - self._end < _MIN_READ_BYTES:
            self._make_room()
        return memoryview(self._scratch)[self._end :]

    def buffer_updated(self, count: int) -> Iterator[tuple[T, list[bytearray]]]:
        """Take note of `count` bytes just written and yield every record that is now whole."""
        if self._message is not None:
            self._filled += count
        else:
            self._end += count
        while True:
            if self._message is None and not self._read_head():
                return
            if not self._read_frames():
                return
            message, frames = self._message, self._frames
            self._message, self._frames = None, []
            assert message is not None
            yield message, frames

    def _make_room(self) -> None:
        pending = self._scratch[self._start : self._end]
        # A new block, never a resize: the loop may still hold a view of the old one.
        size = max(_SCRATCH_BYTES, 2 * len(pending))
        self._scratch = bytearray(size)
        self._scratch[: len(pending)] = pending
        self._start, self._end = 0, len(pending)

    def _read_head(self) -> bool:
        available = self._end - self._start
        if available == 0:
            self._start = self._end = 0
            return False
        if available < _PREFIX.size:
            return False
        body_len, frame_count = _PREFIX.unpack_from(self._scratch, self._start)
        if body_len > _MAX_BODY_BYTES or frame_count > _MAX_FRAMES:
            raise WireError(f"record of {body_len} body bytes and {frame_count} frames is over the limit")
        body_at = _PREFIX.size + 8 * frame_count
        if available < body_at + body_len:
            return False
        lengths = struct.unpack_from(f"<{frame_count}Q", self._scratch, self._start + _PREFIX.size)
        if any(length > _MAX_FRAME_BYTES for length in lengths):
            raise WireError(f"frame of {max(lengths)} bytes is over the limit")
        body = memoryview(self._scratch)[self._start + body_at : self._start + body_at + body_len]
        try:
            self._message = self._body_decoder.decode(body)
        except msgspec.DecodeError as error:
            raise WireError(f"no message of ours: {error}") from error
        self._start += body_at + body_len
        self._lengths, self._frames, self._filled = lengths, [], 0
        return True

    def _read_frames(self) -> bool:
        while True:
            if self._frames and self._filled < len(self._frames[-1]):
                self._take_scratch()
                if self._filled < len(self._frames[-1]):
                    return False
            if len(self._frames) == len(self._lengths):
                return True
            self._frames.append(bytearray(self._lengths[len(self._frames)]))
            self._filled = 0

    def _take_scratch(self) -> None:
        frame = self._frames[-1]
        count = min(self._end - self._start, len(frame) - self._filled)
        if count:
            frame[self._filled : self._filled + count] = memoryview(self._scratch)[self._start : self._start + count]
            self._filled += count
            self._start += count


def to_replica_decoder() -> Decoder[ToReplica]:
    """Decoder of the replica's side."""
    return Decoder(msgspec.msgpack.Decoder(ToReplica))


def from_replica_decoder() -> Decoder[FromReplica]:
    """Decoder of the server's side."""
    return Decoder(msgspec.msgpack.Decoder(FromReplica))


def keep_frame_memory() -> None:
    """Make this process reuse the memory of frames instead of handing it back to the kernel after each.

    glibc raises its thresholds for that to the largest block it has seen freed; otherwise every frame over 128 KB
    costs a page fault per page (measured: 75 of 97 us for a picture of 124 KB).
    """
    block = bytearray(_KEPT_BLOCK_BYTES)
    del block
