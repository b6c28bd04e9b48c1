"""An HTTP connection that costs next to nothing, for tests that send thousands of requests or leave in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

IMAGES = "/v1/images/generations"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error_code(self) -> str:
        return str(self.json()["error"]["code"])


class LightConnection:
    """One kept-alive connection to a server on this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> LightConnection:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 24))

    def send(
        self, body: Mapping[str, Any] | None, *, method: str = "POST", path: str = IMAGES, request_id: str | None = None
    ) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        if data:
            head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n"
        if request_id is not None:
            head += f"x-request-id: {request_id}\r\n"
        self._writer.write(head.encode() + b"\r\n" + data)

    async def receive(self) -> Answer:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = head.rstrip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await self._reader.readexactly(int(headers["content-length"]))
        return Answer(int(status.split()[1]), headers, body)

    async def request(self, body: Mapping[str, Any] | None, **options: Any) -> Answer:
        self.send(body, **options)
        return await self.receive()

    def drop(self) -> None:
        """Be gone at once, as a client that was killed."""
        self._writer.transport.abort()


def split_picture(png: bytes) -> tuple[dict[str, Any], bytes]:
    """Prompt and seed that the simulated engine wrote into its picture, and the picture without them."""
    keyword = png.index(b"tEXttriptych\0")
    end = keyword + 4 + int.from_bytes(png[keyword - 4 : keyword])
    shown: dict[str, Any] = json.loads(png[keyword:end].partition(b"\0")[2])
    return shown, png[: keyword - 4] + png[end + 4 :]
