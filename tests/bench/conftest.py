"""A small server of our own that answers in the contract's shape, with failures on demand."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

Behaviour = Callable[[int, dict[str, Any]], web.StreamResponse | None]


def png(width: int = 64, height: int = 64) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(buffer, format="PNG")
    return buffer.getvalue()


@dataclass
class FakeServer:
    """Counts what it is sent; `behave(number, body)` may answer request `number` in its own way."""

    replicas: int = 2
    seconds: float = 0.0
    model: str = "some/model"
    behave: Behaviour = lambda number, body: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    open_requests: int = 0
    most_open: int = 0
    base_url: str = ""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    jobs_end: bool = True

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.get("/v1/replicas", self._replicas),
                web.get("/v1/models", self._models),
                web.get("/version", self._version),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/images/generations", self._images),
                web.post("/v1/images/edits", self._edits),
                web.post("/v1/videos", self._create_video),
                web.get("/v1/videos/{id}", self._video),
                web.get("/v1/videos/{id}/content", self._video_content),
            ]
        )
        return app

    async def _replicas(self, request: web.Request) -> web.Response:
        if not self.replicas:
            return web.json_response({"error": {"message": "no such route"}}, status=404)
        data = [{"id": number, "state": "ready"} for number in range(self.replicas)]
        return web.json_response({"object": "list", "data": data})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model}]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "1.2.3"})

    async def _turn(self, request: web.Request, body: dict[str, Any]) -> tuple[int, web.StreamResponse | None]:
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        number = len(self.bodies) - 1
        self.open_requests += 1
        self.most_open = max(self.most_open, self.open_requests)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.open_requests -= 1
        return number, self.behave(number, body)

    def _metrics(self, number: int) -> list[dict[str, Any]]:
        replica = number % max(1, self.replicas)
        return [
            {"replica": replica, "queue_s": 0.25, "inference_s": 0.5, "peak_memory_mb": 100.0 + number, "attempts": 1}
        ]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        number, special = await self._turn(request, await request.json())
        if special is not None:
            return special
        url = "data:image/png;base64," + base64.b64encode(png()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}, "seed": 1}]
        message = {"role": "assistant", "content": content}
        return web.json_response({"choices": [{"message": message}], "metrics": self._metrics(number)})

    async def _images(self, request: web.Request) -> web.StreamResponse:
        number, special = await self._turn(request, await request.json())
        data = [{"b64_json": base64.b64encode(png()).decode()}]
        return special or web.json_response({"data": data, "metrics": self._metrics(number)})

    async def _edits(self, request: web.Request) -> web.StreamResponse:
        number, special = await self._turn(request, dict(await request.post()))
        data = [{"b64_json": base64.b64encode(png()).decode()}]
        return special or web.json_response({"data": data, "metrics": self._metrics(number)})

    async def _create_video(self, request: web.Request) -> web.StreamResponse:
        number, special = await self._turn(request, dict(await request.post()))
        if special is not None:
            return special
        self.jobs[f"video_{number}"] = {"id": f"video_{number}", "status": "queued"}
        return web.json_response(self.jobs[f"video_{number}"])

    async def _video(self, request: web.Request) -> web.Response:
        job = self.jobs[request.match_info["id"]]
        if job["status"] == "queued" and self.jobs_end:
            job["status"] = "completed"
        return web.json_response(job)

    async def _video_content(self, request: web.Request) -> web.Response:
        return web.Response(body=b"\x00\x00\x00\x18ftypisom" + bytes(100), content_type="video/mp4")


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=1)

    async def start() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port: int = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        return port

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    server.base_url = f"http://127.0.0.1:{port}"
    yield server
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()
