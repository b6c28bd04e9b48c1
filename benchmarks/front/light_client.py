"""A client that costs next to nothing: one blocking socket, bodies read into a buffer made once.

Both front benchmarks use it, so that what is measured is the server: a 2.8 MB answer is one `recv` in the kernel,
never decoded; the only check is that it is a 200 with a PNG in it.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import time

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_PNG_BASE64 = b"iVBORw0KGg"


class Connection:
    """One kept-alive connection to `/v1/chat/completions`; every wait is bounded by `timeout_s`."""

    def __init__(self, port: int, *, buffer_bytes: int = 8 << 20, timeout_s: int = 60) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        # A Python-side timeout makes the socket non-blocking and MSG_WAITALL useless; the kernel's does not.
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", timeout_s, 0))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(buffer_bytes))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def request(self, message: bytes) -> tuple[float, memoryview]:
        """Send one prepared message; seconds until the last byte, and the body (valid until the next request)."""
        began_at = time.perf_counter()
        self._socket.sendall(message)
        filled = 0
        head_end = -1
        while head_end < 0:
            count = self._socket.recv_into(self._buffer[filled:])
            if count == 0:
                raise ConnectionError("the server closed the connection inside an answer")
            filled += count
            head_end = bytes(self._buffer[: min(filled, 4096)]).find(b"\r\n\r\n")
        head = bytes(self._buffer[:head_end])
        length = _LENGTH.search(head)
        if length is None or not head.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(f"unexpected answer: {bytes(self._buffer[:filled])[:400]!r}")
        end = head_end + 4 + int(length[1])
        while filled < end:
            count = self._socket.recv_into(self._buffer[filled:end], end - filled, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionError("the server closed the connection inside an answer")
            filled += count
        elapsed_s = time.perf_counter() - began_at
        body = self._buffer[head_end + 4 : end]
        if _PNG_BASE64 not in bytes(body[:4096]):
            raise ConnectionError(f"no PNG in the answer: {bytes(body[:200])!r}")
        return elapsed_s, body


def chat_message(*, width: int, height: int, model: str) -> bytes:
    """A whole HTTP request for one picture, ready to send."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "a red circle"}],
            "width": width,
            "height": height,
            "num_inference_steps": 2,
            "seed": 1,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\n"
        "host: 127.0.0.1\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def parse_size(text: str) -> tuple[int, int]:
    """`256x256` as width and height."""
    width, _, height = text.partition("x")
    return int(width), int(height)
