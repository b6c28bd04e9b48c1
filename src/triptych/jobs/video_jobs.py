"""The video jobs of one server: made by a route, followed to their end, kept for a while, resumed after a restart.

A job is a request of the orchestrator like any other; what is here beside it is what lasts. Reading is done in memory,
every change is on disk before anybody sees it, and all writing happens in one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from triptych.errors import ErrorCode, TriptychError
from triptych.jobs.job import IdempotencyKey, Job, JobFailure, JobStatus, VideoFile, new_job_id
from triptych.jobs.store import JobMovedOn, JobStore
from triptych.jobs.writer import Writer
from triptych.messages import GenerationRequest, ModelInfo
from triptych.orchestrator.events import UnitOutput, UnitProgress
from triptych.orchestrator.stream import EventStream

__all__ = ["VideoJobs"]

_log = logging.getLogger(__name__)

_MAX_KEPT = 5_000
_MAX_INTERRUPTIONS = 5  # a job that ends the server whenever it runs must not do so for ever
_MIN_SLEEP_S = 1.0


class Generator(Protocol):
    """What jobs need of the orchestrator."""

    def submit(self, request: GenerationRequest, *, outlasts_outages: bool) -> EventStream:
        """Accept a request. Raises `TriptychError`."""

    def abort(self, request_id: str) -> None:
        """End a request. Raises `TriptychError` when there is none."""

    def update(self, request_id: str, *, timeout_s: float) -> None:
        """Move the deadline of a request. Raises `TriptychError` when there is none."""

    async def serving(self) -> ModelInfo:
        """Return once the first replica is ready."""


class VideoJobs:
    """Jobs are kept for `keep_s` seconds after their end, their clips within `max_bytes`; the oldest go first.

    Everything but the constructor belongs to one event loop; `run` has to run for jobs to be made.
    """

    def __init__(
        self,
        store: JobStore,
        generator: Generator,
        *,
        model: str,
        keep_s: float,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._generator = generator
        self._model = model
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._writer = Writer("jobs")
        self._jobs = {job.id: job for job in store.load()}
        self._by_key = {_key_of(job): job.id for job in self._jobs.values() if job.idempotency is not None}
        self._percent: dict[str, int] = {}
        self._followers: asyncio.TaskGroup | None = None
        self._ended = asyncio.Event()
        self._closing = asyncio.Event()

    async def run(self) -> None:
        """Resume what an earlier server left, follow and expire jobs; after `close`, return once all are settled.

        That is when the disk has taken the last clip: cancel it to wait no longer, and the next server runs that job.
        """
        async with asyncio.TaskGroup() as self._followers:
            resume = self._followers.create_task(self._resume_all(), name="resume jobs")
            expire = self._followers.create_task(self._expire(), name="expire jobs")
            await self._closing.wait()
            resume.cancel()
            expire.cancel()
        self._writer.close()
        self._store.close()

    def close(self) -> None:
        """No job is made any more, and none ends but those whose requests have ended."""
        self._closing.set()

    # ---- for routes

    async def create(
        self,
        request: GenerationRequest,
        *,
        patient: bool,
        idempotency: IdempotencyKey | None = None,
        ignored_parameters: tuple[str, ...] = (),
    ) -> Job:
        """Hand the request over and keep the job; see `Job` for `patient`. Raises `TriptychError`."""
        job = Job(
            id=new_job_id(),
            request=msgspec.structs.replace(request, frames=()),
            created_at=self._clock(),
            patient=patient,
            idempotency=idempotency,
            ignored_parameters=ignored_parameters,
        )
        stream = self._submit(job, request.frames)
        try:
            await self._write(self._store.add, job, request.frames)
        except BaseException:
            stream.close()
            raise
        self._jobs[job.id] = job
        if idempotency is not None:
            self._by_key[_key_of(job)] = job.id
        _log.info("job queued", extra={"job": job.id, "request": request.id})
        self._follow_later(job, stream)
        return job

    def find(self, job_id: str, *, owner: str | None = None) -> Job:
        """One job. Raises `video_not_found`, also for those of other owners when one is given."""
        job = self._jobs.get(job_id)
        if job is None or (owner is not None and job.request.owner != owner):
            raise TriptychError(ErrorCode.VIDEO_NOT_FOUND, f"there is no video {job_id[:64]!r}")
        return job

    def find_by_key(self, key: str, *, owner: str | None) -> Job | None:
        """The job that this owner made with an idempotency key, while it is kept."""
        job_id = self._by_key.get((owner, key))
        return None if job_id is None else self._jobs[job_id]

    def page(self, *, owner: str | None, after: str | None, limit: int, newest_first: bool) -> tuple[list[Job], bool]:
        """Jobs behind the one with the id `after`, which may be gone, and whether more follow them."""
        ids = sorted((job_id for job_id, job in self._jobs.items() if owner in (None, job.request.owner)))
        if newest_first:
            ids = [job_id for job_id in reversed(ids) if after is None or job_id < after]
        else:
            ids = [job_id for job_id in ids if after is None or job_id > after]
        return [self._jobs[job_id] for job_id in ids[:limit]], len(ids) > limit

    def percent(self, job: Job) -> int:
        """How far a job is, 0 to 100; 100 is said of completed ones only."""
        return 100 if job.status is JobStatus.COMPLETED else self._percent.get(job.id, 0)

    def path_of(self, job: Job) -> Path:
        """The clip of a completed job."""
        return self._store.path_of(job.id)

    async def delete(self, job_id: str, *, owner: str | None = None) -> None:
        """Stop a job that has not ended, then forget it and its clip. Raises `TriptychError`."""
        job = self.find(job_id, owner=owner)
        self._drop(job)
        if not job.has_ended:
            with contextlib.suppress(TriptychError):  # its request has ended in this moment, or is still to be resumed
                self._generator.abort(job.request.id)
        await self._write(self._store.remove, [job.id])
        _log.info("job deleted", extra={"job": job.id})

    # ---- from queued to the end

    def _submit(self, job: Job, inputs: tuple[bytes, ...]) -> EventStream:
        request = msgspec.structs.replace(job.request, frames=inputs)
        if job.patient:
            request = msgspec.structs.replace(request, timeout_s=max(request.timeout_s, self._keep_s))
        return self._generator.submit(request, outlasts_outages=True)  # what is kept on disk outlasts replicas, too

    def _follow_later(self, job: Job, stream: EventStream) -> None:
        if self._closing.is_set():
            return  # its request was ended by the drain; the next server runs it
        if self._followers is None:
            raise RuntimeError("jobs are made while run() runs")
        self._followers.create_task(self._follow(job.id, stream), name=f"follow {job.id}")

    async def _follow(self, job_id: str, stream: EventStream) -> None:
        try:
            output: UnitOutput | None = None
            async for event in stream:
                if isinstance(event, UnitProgress):
                    await self._progress(job_id, event)
                elif isinstance(event, UnitOutput):
                    output = event
            assert output is not None
            await self._complete(job_id, output)
        except TriptychError as error:
            if error.code is not ErrorCode.DRAINING:  # what this server does not finish, the next one runs again
                await self._fail(job_id, error)
        except JobMovedOn:  # deleted meanwhile
            pass
        except Exception:  # noqa: BLE001 - the others go on
            _log.exception("job %s cannot be followed", job_id)
            message = f"internal error; the server's log has the details under {job_id}"
            await self._fail(job_id, TriptychError(ErrorCode.ENGINE_ERROR, message))
        finally:
            self._percent.pop(job_id, None)
            self._ended.set()

    async def _progress(self, job_id: str, event: UnitProgress) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            return
        self._percent[job_id] = min(99, 100 * event.step // max(1, event.steps))
        if job.status is JobStatus.QUEUED:
            await self._advance(msgspec.structs.replace(job, status=JobStatus.IN_PROGRESS))
            if job.patient:
                with contextlib.suppress(TriptychError):  # it has ended in this moment
                    self._generator.update(job.request.id, timeout_s=job.request.timeout_s)

    async def _complete(self, job_id: str, output: UnitOutput) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            return
        video = VideoFile(
            size_bytes=len(output.data),
            width=output.width,
            height=output.height,
            num_frames=output.num_frames,
            fps=output.fps,
            metrics=output.metrics,
        )
        await self._make_room(video.size_bytes)
        done = self._ending(job, JobStatus.COMPLETED, video=video)
        await self._write(self._store.complete, done, output.data)
        self._show(done)
        _log.info("job completed", extra={"job": job.id, "bytes": video.size_bytes})

    async def _fail(self, job_id: str, error: TriptychError) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            return
        _log.warning("job failed: %s", error.message, extra={"job": job_id, "code": error.code})
        failed = self._ending(job, JobStatus.FAILED, failure=JobFailure.of(error))
        try:
            await self._advance(failed)
        except JobMovedOn:  # deleted meanwhile
            pass
        except TriptychError:  # the disk does not even take this: it is told, and the next server runs the job again
            self._show(failed)

    def _ending(self, job: Job, status: JobStatus, **outcome: Any) -> Job:
        now = self._clock()
        return msgspec.structs.replace(job, status=status, ended_at=now, expires_at=now + self._keep_s, **outcome)

    async def _advance(self, job: Job) -> None:
        await self._write(self._store.advance, job)
        self._show(job)

    def _show(self, job: Job) -> None:
        if job.id in self._jobs:  # else it was deleted while this was written
            self._jobs[job.id] = job

    # ---- after a restart

    async def _resume_all(self) -> None:
        left = [job for job in self._jobs.values() if not job.has_ended]
        if not left:
            return
        info = await self._generator.serving()
        _log.info("%d jobs of an earlier server run again", len(left))
        for job in left:
            if job.id not in self._jobs:
                continue
            try:
                await self._resume(job, info)
            except TriptychError as error:
                if error.code is ErrorCode.DRAINING:
                    return
                await self._fail(job.id, error)
            except JobMovedOn:  # deleted meanwhile
                pass

    async def _resume(self, job: Job, info: ModelInfo) -> None:
        if info.kind != "video" or job.request.model != self._model:
            message = f"the server was started again with {self._model!r}, and the job is for {job.request.model!r}"
            raise TriptychError(ErrorCode.MODEL_NOT_FOUND, message, param="model")
        if job.status is JobStatus.IN_PROGRESS:
            job = msgspec.structs.replace(job, interruptions=job.interruptions + 1)
            if job.interruptions > _MAX_INTERRUPTIONS:
                message = f"the server ended {job.interruptions} times while this job ran"
                raise TriptychError(ErrorCode.ENGINE_ERROR, message)
            await self._write(self._store.rewrite, job)
            self._show(job)
        inputs = await self._write(self._store.inputs, job.id)
        while job.id in self._jobs:
            try:
                stream = self._submit(job, inputs)
            except TriptychError as error:
                if error.code is not ErrorCode.QUEUE_FULL or error.retry_after_s is None:
                    raise
                await asyncio.sleep(error.retry_after_s)
            else:
                self._follow_later(job, stream)
                return

    # ---- end of the time and of the room

    async def _expire(self) -> None:
        while True:
            now = self._clock()
            ended = sorted((job for job in self._jobs.values() if job.expires_at is not None), key=_expires_at)
            surplus = len(ended) - _MAX_KEPT
            await self._forget([job for number, job in enumerate(ended) if number < surplus or _expires_at(job) <= now])
            self._ended.clear()
            wait_s = max(_MIN_SLEEP_S, _expires_at(ended[0]) - now) if ended else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._ended.wait()

    async def _make_room(self, size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            message = f"the clip has {size_bytes} bytes; the server keeps {self._max_bytes} bytes of clips"
            raise TriptychError(ErrorCode.ENGINE_ERROR, message)
        completed = [(job, job.video) for job in self._jobs.values() if job.video is not None]
        kept_bytes = sum(video.size_bytes for _, video in completed)
        leaving = []
        for job, video in sorted(completed, key=lambda entry: _expires_at(entry[0])):
            if kept_bytes + size_bytes <= self._max_bytes:
                break
            kept_bytes -= video.size_bytes
            leaving.append(job)
        await self._forget(leaving)

    async def _forget(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        for job in jobs:
            self._drop(job)
        with contextlib.suppress(TriptychError):  # the log has it; what stays on disk, the next server forgets
            await self._write(self._store.remove, [job.id for job in jobs])
        _log.info("%d jobs are not kept any longer", len(jobs))

    def _drop(self, job: Job) -> None:
        self._jobs.pop(job.id, None)
        if job.idempotency is not None:
            self._by_key.pop(_key_of(job), None)

    async def _write(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run in the thread of the store. Raises `TriptychError` when the disk does not take it."""
        try:
            return await self._writer.run(work, *arguments)
        except (sqlite3.Error, OSError) as error:
            _log.error("the folder of jobs cannot be used: %s", error)
            raise TriptychError(ErrorCode.ENGINE_ERROR, f"the server cannot keep jobs: {error}") from error


def _expires_at(job: Job) -> float:
    assert job.expires_at is not None
    return job.expires_at


def _key_of(job: Job) -> tuple[str | None, str]:
    assert job.idempotency is not None
    return job.request.owner, job.idempotency.key
