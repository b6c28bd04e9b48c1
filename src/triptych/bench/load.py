"""The load generator: warm-up, then every request at its time, each measured to its last body byte.

`run_load` asks the server how many replicas it has, sends the requests of the dataset through the chosen backend and
returns one `Record` per request. One connection per request in flight, kept alive; no retries; no request left behind.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from triptych.bench.answers import Answer, AnswerError
from triptych.bench.backends import BACKENDS, Backend
from triptych.bench.errors import ServerUnreachable
from triptych.bench.options import LoadOptions, Task
from triptych.bench.workload import BenchRequest, arrival_offsets, with_slo_targets

__all__ = ["LoadResult", "Record", "ServerInfo", "run_load"]

_REQUEST_TIMEOUT_S = 6 * 3600.0
_PROBE_TIMEOUT_S = 10.0
# Servers close idle connections after 5 s (uvicorn's default); a request must not be sent into that.
_KEEPALIVE_S = 4.0
_READ_BUFFER_BYTES = 4 << 20
_EXTENSIONS = {"image/png": "png", "image/jpeg": "jpg", "image/webp": "webp", "video/mp4": "mp4"}


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server says of itself; None or empty where it does not."""

    model: str
    replicas: int | None = None
    ready_replicas: int | None = None
    version: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Record:
    """One measured request; times in seconds, offsets from the start of the run."""

    index: int
    request: BenchRequest
    arrival_s: float
    start_s: float
    latency_s: float
    status: int | None = None
    error_class: str | None = None
    error: str | None = None
    answer: Answer | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """Whether a picture or clip came back."""
        return self.error_class is None

    @property
    def slo_met(self) -> bool | None:
        """Whether it was answered within its target; None without a target."""
        if self.request.slo_ms is None:
            return None
        return self.ok and self.latency_s * 1e3 <= self.request.slo_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """A finished or interrupted run; `duration_s` from the first send to the last answer (or the interruption)."""

    options: LoadOptions
    planned_requests: int
    server: ServerInfo
    warmup_requests: int
    failed_warmups: tuple[str, ...]
    records: tuple[Record, ...]
    duration_s: float
    interrupted: bool
    notes: tuple[str, ...] = ()


Progress = Callable[[int, int], None]
"""Called with (finished, failed) after every request."""

Note = Callable[[str], None]
"""Called with one line that the user should know."""


async def run_load(
    options: LoadOptions,
    requests: Sequence[BenchRequest],
    *,
    on_progress: Progress = lambda finished, failed: None,
    on_note: Note = lambda note: None,
) -> LoadResult:
    """Run one load to its end; SIGINT ends it early. Raises `ServerUnreachable`."""
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
    headers = {"authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, read_bufsize=_READ_BUFFER_BYTES
    ) as session:
        server = await _probe(session, options)
        notes: list[str] = []

        def note(text: str) -> None:
            notes.append(text)
            on_note(text)

        if server.replicas is not None and server.ready_replicas != server.replicas:
            note(f"{server.ready_replicas or 0} of {server.replicas} replicas are ready")
        backend = BACKENDS[options.backend](session, options.base_url, server.model)
        run = _Run(options, backend, on_progress, note)
        task = asyncio.current_task()
        assert task is not None
        with _interruptible(task) as interrupted:
            try:
                await run.run(requests, server)
            except asyncio.CancelledError:
                if not interrupted:
                    raise
                task.uncancel()
        return LoadResult(
            options=options,
            planned_requests=len(requests),
            server=server,
            warmup_requests=run.warmups,
            failed_warmups=tuple(run.failed_warmups),
            records=tuple(sorted(run.records, key=lambda record: record.index)),
            duration_s=run.duration_s,
            interrupted=bool(interrupted),
            notes=tuple(notes),
        )


class _Run:
    """The state of one run: what is recorded so far and when it began."""

    def __init__(self, options: LoadOptions, backend: Backend, on_progress: Progress, on_note: Note) -> None:
        self.records: list[Record] = []
        self.warmups = 0
        self.failed_warmups: list[str] = []
        self._options = options
        self._backend = backend
        self._on_progress = on_progress
        self._on_note = on_note
        self._failed = 0
        self._began_at = 0.0
        self._ended_at = 0.0

    @property
    def duration_s(self) -> float:
        return self._ended_at - self._began_at

    async def run(self, requests: Sequence[BenchRequest], server: ServerInfo) -> None:
        """Warm up, set latency targets, measure."""
        options = self._options
        self.warmups = options.warmup_requests if options.warmup_requests is not None else (server.replicas or 1)
        measured = await self._warm_up(requests, self.warmups, concurrency=server.ready_replicas or 1)
        if self.failed_warmups:
            self._on_note(
                f"{len(self.failed_warmups)} of {self.warmups} warm-up requests failed: {self.failed_warmups[0]}"
            )
        if options.slo:
            requests = with_slo_targets(requests, measured, scale=options.slo_scale)
            if without := sum(request.slo_ms is None for request in requests):
                self._on_note(f"no latency target is known for {without} of {len(requests)} requests")
        await self._measure(requests)

    async def _warm_up(
        self, requests: Sequence[BenchRequest], count: int, *, concurrency: int
    ) -> list[tuple[BenchRequest, float]]:
        """Send `count` short requests, at most one per replica at a time; returns those answered and their latency."""
        gate = asyncio.Semaphore(concurrency)
        measured: list[tuple[BenchRequest, float]] = []

        async def one(index: int) -> None:
            request = replace(
                requests[index % len(requests)], num_inference_steps=self._options.warmup_num_inference_steps
            )
            if self._options.task is Task.T2V:
                request = replace(request, num_frames=1)
            async with gate:
                record = await self._send(index, request, arrival_s=0.0)
            if record.ok:
                measured.append((request, record.latency_s))
            else:
                self.failed_warmups.append(f"{record.error_class}: {record.error}")

        async with asyncio.TaskGroup() as group:
            for index in range(count):
                group.create_task(one(index))
        return measured

    async def _measure(self, requests: Sequence[BenchRequest]) -> None:
        """Send every request at its time and wait for the last answer."""
        options = self._options
        offsets = arrival_offsets(requests, request_rate=options.request_rate, seed=options.random_request_seed)
        gate = asyncio.Semaphore(options.max_concurrency or len(requests))
        self._began_at = self._ended_at = time.perf_counter()

        async def one(index: int, request: BenchRequest, arrival_s: float) -> None:
            async with gate:
                record = await self._send(index, request, arrival_s=arrival_s)
            self._ended_at = max(self._ended_at, self._began_at + record.start_s + record.latency_s)
            if options.save_dir is not None and record.answer is not None:
                await self._save(record, options.save_dir)
            self._record(record)

        try:
            async with asyncio.TaskGroup() as group:
                for index, (request, offset) in enumerate(zip(requests, offsets, strict=True)):
                    wait_s = self._began_at + offset - time.perf_counter()
                    if wait_s > 0:
                        await asyncio.sleep(wait_s)
                    group.create_task(one(index, request, offset))
        except asyncio.CancelledError:
            self._ended_at = time.perf_counter()
            raise

    def _record(self, record: Record) -> None:
        # Only what the report needs stays in memory: the pictures of a run of thousands would not fit.
        if record.answer is not None:
            light = tuple(replace(media, base64_text=None, data=None) for media in record.answer.outputs)
            record.answer = replace(record.answer, outputs=light)
        self.records.append(record)
        self._failed += not record.ok
        self._on_progress(len(self.records), self._failed)

    async def _save(self, record: Record, folder: Path) -> None:
        try:
            await asyncio.to_thread(_write_outputs, record, folder)
        except AnswerError as error:
            record.error_class, record.error = error.error_class, str(error)
        except OSError as error:
            self._on_note(f"request {record.index} is not saved: {error}")

    async def _send(self, index: int, request: BenchRequest, *, arrival_s: float) -> Record:
        began_at = self._began_at or time.perf_counter()
        started_at = time.perf_counter()
        record = Record(
            index=index, request=request, arrival_s=arrival_s, start_s=started_at - began_at, latency_s=math.nan
        )
        try:
            exchange = await self._backend.send(request)
        except TimeoutError as error:
            record.error_class, record.error = "timeout", str(error) or "no answer in time"
        except (aiohttp.ClientError, OSError) as error:
            record.error_class, record.error = "connection_error", f"{type(error).__name__}: {error}"[:300]
        else:
            record.status = exchange.status
            record.start_s = exchange.started_at - began_at
            record.latency_s = exchange.finished_at - exchange.started_at
            try:
                record.answer = self._backend.read(exchange)
            except AnswerError as error:
                record.error_class, record.error = error.error_class, str(error)
            return record
        record.latency_s = time.perf_counter() - started_at
        return record


async def _probe(session: aiohttp.ClientSession, options: LoadOptions) -> ServerInfo:
    """Ask what the server is. Any HTTP answer means that it is there; servers of other makers lack some routes."""
    timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)

    async def ask(path: str) -> Any:
        async with session.get(options.base_url.rstrip("/") + path, timeout=timeout) as response:
            try:
                return await response.json(content_type=None) if response.status == 200 else None
            except ValueError:
                return None

    try:
        listed, models, version = await ask("/v1/replicas"), await ask("/v1/models"), await ask("/version")
    except (aiohttp.ClientError, OSError) as error:
        reason = str(getattr(error, "os_error", error)) or type(error).__name__
        raise ServerUnreachable(
            f"no server answers at {options.base_url} ({reason}); "
            "give --base-url or --host and --port (`triptych serve` listens on port 8000 unless told otherwise)"
        ) from error
    replicas = _entries(listed)
    model = options.model
    if model == "default" and (found := _entries(models)):
        model = str(found[0].get("id", model))
    return ServerInfo(
        model=model,
        replicas=len(replicas) or None,
        ready_replicas=sum(replica.get("state") == "ready" for replica in replicas) or None,
        version=version if isinstance(version, dict) else None,
    )


def _entries(listed: Any) -> list[dict[str, Any]]:
    data = listed.get("data") if isinstance(listed, dict) else None
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []


@contextmanager
def _interruptible(task: asyncio.Task[Any]) -> Iterator[list[int]]:
    """The first SIGINT cancels `task` and is noted in the list; a second one does what it did before."""
    noted: list[int] = []
    loop = asyncio.get_running_loop()
    previous = signal.getsignal(signal.SIGINT)

    def on_sigint() -> None:
        noted.append(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, previous)
        task.cancel()

    try:
        loop.add_signal_handler(signal.SIGINT, on_sigint)
    except (RuntimeError, ValueError):  # Not the main thread: whoever runs us there handles signals.
        yield noted
        return
    try:
        yield noted
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, previous)


def _write_outputs(record: Record, folder: Path) -> None:
    assert record.answer is not None
    for number, media in enumerate(record.answer.outputs):
        if (content := media.content()) is not None:
            name = f"request-{record.index:04d}-{number}.{_EXTENSIONS.get(media.mime or '', 'bin')}"
            (folder / name).write_bytes(content)
