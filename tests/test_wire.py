"""Framing survives every way a stream can be cut, and refuses what is no record of ours."""

from __future__ import annotations

import socket
import struct
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.messages import Aborted, Address, Failure, FromReplica, Output
from triptych.wire import (
    Decoder,
    Frame,
    WireError,
    encode,
    from_replica_decoder,
    keep_frame_memory,
    to_replica_decoder,
)

ADDRESS = Address("req-1", 2, 1, 7)
OUTPUT = Output(
    address=ADDRESS,
    mime="image/png",
    width=64,
    height=64,
    inference_s=0.1,
    steps=2,
    batch_size_mean=1.0,
    peak_memory_mb=10.0,
)
Record = tuple[FromReplica, list[bytes]]


def stream_of(records: list[Record]) -> bytes:
    return b"".join(bytes(buffer) for message, frames in records for buffer in encode(message, frames))


def feed(decoder: Decoder[FromReplica], data: bytes, most: int) -> list[Record]:
    """Give the decoder `data` in reads of at most `most` bytes, as a socket would."""
    received: list[Record] = []
    while data:
        buffer = decoder.get_buffer()
        assert len(buffer) > 0
        count = min(len(buffer), len(data), most)
        buffer[:count] = data[:count]
        data = data[count:]
        received += [(message, [bytes(frame) for frame in frames]) for message, frames in decoder.buffer_updated(count)]
    return received


messages = st.one_of(
    st.builds(Aborted, address=st.just(ADDRESS)),
    st.builds(Failure, address=st.just(ADDRESS), code=st.text(max_size=20), message=st.text(max_size=3000)),
)
frame_lists = st.lists(
    st.one_of(st.binary(max_size=300), st.integers(0, 200_000).map(lambda size: bytes([size % 251]) * size)), max_size=4
)


@settings(max_examples=150, deadline=None)
@given(records=st.lists(st.tuples(messages, frame_lists), max_size=6), most=st.integers(1, 100_000))
def test_records_arrive_whole_and_in_order_however_the_stream_is_cut(records: list[Record], most: int) -> None:
    size = sum(len(frame) for _, frames in records for frame in frames)
    most = max(most, size // 500 + 1)  # thousands of one-byte reads prove nothing more
    assert feed(from_replica_decoder(), stream_of(records), most) == records


@pytest.mark.parametrize("most", [1, 7, 64])
def test_tiny_reads_never_meet_an_empty_buffer(most: int) -> None:
    records: list[Record] = [(OUTPUT, [b"", b"x" * 100]), (Aborted(ADDRESS), []), (OUTPUT, [b""])] * 40
    assert feed(from_replica_decoder(), stream_of(records), most) == records


def test_a_body_larger_than_the_scratch_buffer_is_read() -> None:
    records: list[Record] = [(Failure(ADDRESS, "engine_error", "x" * 1_000_000), [b"y" * 10]), (Aborted(ADDRESS), [])]
    assert feed(from_replica_decoder(), stream_of(records), 50_000) == records


def test_a_view_held_from_before_does_not_block_the_next_read() -> None:
    decoder = from_replica_decoder()
    data = stream_of([(Failure(ADDRESS, "engine_error", "x" * 300_000), [])])
    held = []
    while data:
        buffer = decoder.get_buffer()
        held.append(buffer)
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        data = data[count:]
        received = list(decoder.buffer_updated(count))
    assert len(received) == 1


def test_a_large_frame_is_read_into_its_own_memory() -> None:
    decoder = from_replica_decoder()
    head, frame = encode(OUTPUT, [b"z" * 1_000_000])
    buffer = decoder.get_buffer()
    buffer[: len(head)] = head
    assert list(decoder.buffer_updated(len(head))) == []
    buffer = decoder.get_buffer()
    assert len(buffer) == 1_000_000
    buffer[:] = frame
    [(message, [received])] = list(decoder.buffer_updated(1_000_000))
    assert message == OUTPUT
    assert received == frame


def test_frames_of_wider_items_are_measured_in_bytes() -> None:
    wide = memoryview(struct.pack("<4I", 1, 2, 3, 4)).cast("I")
    assert len(wide) == 4
    data = b"".join(bytes(buffer) for buffer in encode(OUTPUT, [wide]))
    assert feed(from_replica_decoder(), data, 1000) == [(OUTPUT, [bytes(wide)])]


def test_frames_are_not_copied_by_encode() -> None:
    frame: Frame = bytearray(10)
    assert encode(OUTPUT, [frame])[1] is frame


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<II", 2**31, 0), "over the limit"),
        (struct.pack("<II", 1, 100_000), "over the limit"),
        (struct.pack("<IIQ", 1, 1, 2**60) + b"x", "over the limit"),
        (struct.pack("<II", 3, 0) + b"\xc1\xc1\xc1", "no message of ours"),
    ],
)
def test_what_is_no_record_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        feed(from_replica_decoder(), data, 1000)


def test_a_message_for_the_other_direction_is_refused() -> None:
    body = msgspec.msgpack.encode(Aborted(ADDRESS))
    decoder = to_replica_decoder()
    data = struct.pack("<II", len(body), 0) + body
    decoder.get_buffer()[: len(data)] = data
    with pytest.raises(WireError, match="no message of ours"):
        list(decoder.buffer_updated(len(data)))


def test_a_20_mb_frame_passes_a_blocking_socket() -> None:
    keep_frame_memory()
    ours, theirs = socket.socketpair()
    frame = bytes(range(256)) * (20 * 4096)
    with ours, theirs:
        sender = threading.Thread(target=lambda: [theirs.sendall(part) for part in encode(OUTPUT, [frame])])
        sender.start()
        decoder, received = from_replica_decoder(), []
        while not received:
            received += list(decoder.buffer_updated(ours.recv_into(decoder.get_buffer())))
        sender.join(timeout=10)
    [(message, [data])] = received
    assert (message, bytes(data) == frame) == (OUTPUT, True)
