"""How one request is put to a server: one small class per dialect, chosen by name.

A backend sends a `BenchRequest` and returns the whole exchange with the times of its first and last byte; reading the
body is a second call, made after the clock was stopped. Nothing is retried.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

import aiohttp

from triptych.bench.answers import Answer, AnswerError, error_of, read_chat, read_images, read_video
from triptych.bench.options import BackendName
from triptych.bench.workload import BenchRequest

__all__ = ["BACKENDS", "Backend", "Exchange"]

_VIDEO_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Exchange:
    """One finished exchange; times are `perf_counter` seconds, `finished_at` that of the last body byte."""

    status: int
    body: bytes = field(repr=False)
    started_at: float
    finished_at: float
    job: dict[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """A dialect."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, model: str) -> None: ...

    async def send(self, request: BenchRequest) -> Exchange:
        """Send and read to the last byte. Raises aiohttp's errors and TimeoutError."""

    def read(self, exchange: Exchange) -> Answer:
        """The answer in it. Raises `AnswerError`, also for every status but 200."""


class _HttpBackend:
    def __init__(self, session: aiohttp.ClientSession, base_url: str, model: str) -> None:
        self._session = session
        self._base_url = base_url.rstrip("/")
        self._model = model

    async def _post(self, path: str, **content: Any) -> Exchange:
        started_at = time.perf_counter()
        async with self._session.post(self._base_url + path, **content) as response:
            body = await response.read()
            return Exchange(response.status, body, started_at, time.perf_counter())

    async def _post_json(self, path: str, payload: dict[str, Any]) -> Exchange:
        # A stream of bytes: aiohttp warns about large plain ones, which input pictures make.
        content = io.BytesIO(json.dumps(payload).encode())
        return await self._post(path, data=content, headers={"content-type": "application/json"})


class TriptychBackend(_HttpBackend):
    """`/v1/chat/completions`, parameters at the top level."""

    async def send(self, request: BenchRequest) -> Exchange:
        """See `Backend`."""
        return await self._post_json("/v1/chat/completions", self._chat(request) | request.parameters())

    def read(self, exchange: Exchange) -> Answer:
        """See `Backend`."""
        _require_ok(exchange)
        return read_chat(exchange.body)

    def _chat(self, request: BenchRequest) -> dict[str, Any]:
        content: Any = request.prompt
        if request.images:
            urls = [f"data:{image.mime};base64,{base64.b64encode(image.data).decode()}" for image in request.images]
            content = [{"type": "text", "text": request.prompt}]
            content += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return {"model": self._model, "messages": [{"role": "user", "content": content}]}


class VllmOmniBackend(TriptychBackend):
    """`/v1/chat/completions`, parameters nested in `extra_body`."""

    async def send(self, request: BenchRequest) -> Exchange:
        """See `Backend`."""
        return await self._post_json("/v1/chat/completions", self._chat(request) | {"extra_body": request.parameters()})


class OpenAIBackend(_HttpBackend):
    """`/v1/images/generations`; with input pictures `/v1/images/edits` as a form."""

    async def send(self, request: BenchRequest) -> Exchange:
        """See `Backend`."""
        fields = {"model": self._model, "prompt": request.prompt, "n": 1, "response_format": "b64_json"}
        fields |= request.parameters()
        width, height = fields.pop("width", None), fields.pop("height", None)
        if width is not None:
            fields["size"] = f"{width}x{height}"
        if not request.images:
            return await self._post_json("/v1/images/generations", fields)
        form = _form(fields)
        name = "image" if len(request.images) == 1 else "image[]"
        for image in request.images:
            form.add_field(name, io.BytesIO(image.data), filename=image.name, content_type=image.mime)
        return await self._post("/v1/images/edits", data=form)

    def read(self, exchange: Exchange) -> Answer:
        """See `Backend`."""
        _require_ok(exchange)
        return read_images(exchange.body)


class VideosBackend(_HttpBackend):
    """OpenAI's job API: `POST /v1/videos`, ask until the job has ended, fetch the file."""

    async def send(self, request: BenchRequest) -> Exchange:
        """See `Backend`. The job is asked for twice a second, so a latency is up to half a second too long.

        The session's total timeout, otherwise that of one exchange, bounds the whole job.
        """
        form = _form({"model": self._model, "prompt": request.prompt} | request.parameters())
        for image in request.images[:1]:
            form.add_field("input_reference", io.BytesIO(image.data), filename=image.name, content_type=image.mime)
        async with asyncio.timeout(self._session.timeout.total):
            exchange = await self._post("/v1/videos", data=form)
            started_at = exchange.started_at
            while True:
                job = _job(exchange)
                if job is None or job.get("status") == "failed":
                    return Exchange(exchange.status, exchange.body, started_at, exchange.finished_at, job or {})
                if job.get("status") == "completed":
                    content = await self._get(f"/v1/videos/{job['id']}/content")
                    return Exchange(content.status, content.body, started_at, content.finished_at, job)
                await asyncio.sleep(_VIDEO_POLL_S)
                exchange = await self._get(f"/v1/videos/{job['id']}")

    def read(self, exchange: Exchange) -> Answer:
        """See `Backend`."""
        _require_ok(exchange)
        if exchange.job.get("status") == "completed":
            return read_video(exchange.body, exchange.job)
        error = exchange.job.get("error")
        if isinstance(error, dict):
            raise AnswerError(str(error.get("code") or "job_failed"), str(error.get("message", ""))[:300])
        if exchange.job:
            raise AnswerError("job_failed", exchange.body[:300].decode("utf-8", "replace"))
        raise AnswerError("invalid_answer", f"not a video job: {exchange.body[:100].decode('utf-8', 'replace')}")

    async def _get(self, path: str) -> Exchange:
        started_at = time.perf_counter()
        async with self._session.get(self._base_url + path) as response:
            body = await response.read()
            return Exchange(response.status, body, started_at, time.perf_counter())


BACKENDS: Final[Mapping[BackendName, type[Backend]]] = MappingProxyType(
    {
        BackendName.TRIPTYCH: TriptychBackend,
        BackendName.VLLM_OMNI: VllmOmniBackend,
        BackendName.OPENAI: OpenAIBackend,
        BackendName.VIDEOS: VideosBackend,
    }
)


def _require_ok(exchange: Exchange) -> None:
    if exchange.status != 200:
        raise AnswerError(*error_of(exchange.status, exchange.body))


def _form(fields: dict[str, Any]) -> aiohttp.FormData:
    form = aiohttp.FormData(default_to_multipart=True)
    for name, value in fields.items():
        form.add_field(name, str(value))
    return form


def _job(exchange: Exchange) -> dict[str, Any] | None:
    """The job object of an answer; None for anything else."""
    if exchange.status != 200:
        return None
    try:
        job = json.loads(exchange.body)
    except ValueError:
        return None
    return job if isinstance(job, dict) and isinstance(job.get("id"), str) and "status" in job else None
