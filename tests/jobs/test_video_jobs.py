"""Video jobs from their making to their expiry, over restarts of the server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from job_fakes import CLIP, FakeGenerator, a_job, a_request, with_pictures

from triptych.errors import ErrorCode, TriptychError
from triptych.jobs.job import IdempotencyKey, JobStatus, new_job_id
from triptych.jobs.store import JobStore
from triptych.jobs.video_jobs import VideoJobs
from triptych.messages import ModelInfo

pytestmark = pytest.mark.anyio
WAIT_S = 20


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def serving(folder: Path, generator: FakeGenerator, **options: object) -> AsyncIterator[VideoJobs]:
    """One life of a server; it ends as a drained one does."""
    settings = {"model": "clips", "keep_s": 3600.0, "max_bytes": 10_000} | options
    jobs = VideoJobs(JobStore(folder), generator, **settings)  # type: ignore[arg-type]
    running = asyncio.create_task(jobs.run())
    await asyncio.sleep(0)
    try:
        yield jobs
    finally:
        jobs.close()
        for request_id in list(generator._streams):
            generator.fail(request_id, ErrorCode.DRAINING)
        await asyncio.wait_for(running, WAIT_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - several things may change it
            await asyncio.sleep(0.002)


async def test_a_job_goes_from_queued_over_real_progress_to_completed(tmp_path: Path, generator: FakeGenerator) -> None:
    async with serving(tmp_path, generator) as jobs:
        job = await jobs.create(a_request(), patient=True)
        assert (job.status, jobs.percent(job)) == (JobStatus.QUEUED, 0)
        generator.progress(job.request.id, 0, 8)
        await until(lambda: jobs.find(job.id).status is JobStatus.IN_PROGRESS)
        for step, percent in ((2, 25), (7, 87), (8, 99)):
            generator.progress(job.request.id, step, 8)
            await until(lambda percent=percent: jobs.percent(jobs.find(job.id)) == percent)  # type: ignore[misc]
        generator.finish(job.request.id)
        await until(lambda: jobs.find(job.id).has_ended)
        done = jobs.find(job.id)
        assert (done.status, jobs.percent(done), jobs.path_of(done).read_bytes()) == (JobStatus.COMPLETED, 100, CLIP)
        assert done.video is not None
        assert (done.video.num_frames, done.video.size_bytes) == (9, len(CLIP))
        assert done.expires_at == pytest.approx((done.ended_at or 0) + 3600)


async def test_a_patient_job_waits_and_its_timeout_counts_from_its_start(
    tmp_path: Path, generator: FakeGenerator
) -> None:
    async with serving(tmp_path, generator) as jobs:
        patient = await jobs.create(a_request(timeout_s=60.0), patient=True)
        hasty = await jobs.create(a_request(timeout_s=60.0), patient=False)
        assert [generator.timeouts[job.request.id] for job in (patient, hasty)] == [3600.0, 60.0]
        assert generator.outlasting == {patient.request.id, hasty.request.id}, "both wait for a replica"
        for job in (patient, hasty):
            generator.progress(job.request.id, 1, 8)
            await until(lambda job=job: jobs.find(job.id).status is JobStatus.IN_PROGRESS)  # type: ignore[misc]
        await until(lambda: generator.timeouts[patient.request.id] == 60.0)


async def test_a_failure_is_told_by_the_job(tmp_path: Path, generator: FakeGenerator) -> None:
    async with serving(tmp_path, generator) as jobs:
        job = await jobs.create(a_request(), patient=True)
        generator.fail(job.request.id, ErrorCode.OUT_OF_MEMORY, "too large")
        await until(lambda: jobs.find(job.id).has_ended)
        failed = jobs.find(job.id)
        assert failed.failure is not None
        assert (failed.status, failed.failure.code) == (JobStatus.FAILED, ErrorCode.OUT_OF_MEMORY)
    async with serving(tmp_path, generator) as jobs:
        assert jobs.find(job.id) == failed


async def test_a_refused_request_makes_no_job(tmp_path: Path, generator: FakeGenerator) -> None:
    generator.refusals.append(TriptychError(ErrorCode.QUEUE_FULL, "full", retry_after_s=3))
    async with serving(tmp_path, generator) as jobs:
        with pytest.raises(TriptychError, match="full"):
            await jobs.create(a_request(), patient=True)
        assert jobs.page(owner=None, after=None, limit=10, newest_first=True) == ([], False)


async def test_what_is_unfinished_when_the_server_ends_runs_again_in_order_with_the_same_ids_and_seeds(
    tmp_path: Path, generator: FakeGenerator
) -> None:
    async with serving(tmp_path, generator) as jobs:
        done = await jobs.create(a_request(), patient=True)
        generator.finish(done.request.id)
        running = await jobs.create(with_pictures(b"abc", b"xyz123"), patient=True)
        generator.progress(running.request.id, 1, 8)
        waiting = [await jobs.create(a_request(), patient=True) for _ in range(3)]
        await until(lambda: jobs.find(done.id).has_ended and jobs.find(running.id).status is JobStatus.IN_PROGRESS)
    second = FakeGenerator()
    async with serving(tmp_path, second) as jobs:
        assert jobs.find(running.id).status is JobStatus.IN_PROGRESS
        await until(lambda: len(second.requests) == 4)
        assert list(second.requests) == [job.request.id for job in (running, *waiting)]
        assert second.requests[running.request.id].frames == (b"abc", b"xyz123")
        assert {request.params.seed for request in second.requests.values()} == {7}
        for request_id in list(second.requests):
            second.finish(request_id)
        ids = [job.id for job in (done, running, *waiting)]
        await until(lambda: all(jobs.find(job_id).has_ended for job_id in ids))
        listed, more = jobs.page(owner=None, after=None, limit=10, newest_first=False)
        assert ([job.id for job in listed], more) == (ids, False)
        assert all(jobs.path_of(job).read_bytes() == CLIP for job in listed)


async def test_a_full_queue_after_a_restart_is_waited_for(tmp_path: Path, generator: FakeGenerator) -> None:
    async with serving(tmp_path, generator) as jobs:
        job = await jobs.create(a_request(), patient=True)
    second = FakeGenerator()
    second.refusals += [TriptychError(ErrorCode.QUEUE_FULL, "full", retry_after_s=0.01)] * 2
    async with serving(tmp_path, second) as jobs:
        await until(lambda: job.request.id in second.requests)


@pytest.mark.parametrize("options", [{"model": "other"}, {}])
async def test_jobs_for_another_model_fail_after_a_restart_and_say_why(
    tmp_path: Path, generator: FakeGenerator, options: dict[str, str]
) -> None:
    async with serving(tmp_path, generator) as jobs:
        job = await jobs.create(a_request(), patient=True)
    info = ModelInfo(pipeline="P", kind="video" if options else "image", parameters=())
    async with serving(tmp_path, FakeGenerator(info), **options) as jobs:
        await until(lambda: jobs.find(job.id).has_ended)
        failure = jobs.find(job.id).failure
        assert failure is not None
        assert "the job is for 'clips'" in failure.message


async def test_a_job_that_always_ends_the_server_fails_in_the_end(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    deadly = a_job(status=JobStatus.IN_PROGRESS)
    store.add(deadly, ())
    store.close()
    for _ in range(5):
        generator = FakeGenerator()
        async with serving(tmp_path, generator):
            await until(lambda generator=generator: bool(generator.requests))  # type: ignore[misc]
    async with serving(tmp_path, FakeGenerator()) as jobs:
        await until(lambda: jobs.find(deadly.id).has_ended)
        failure = jobs.find(deadly.id).failure
        assert failure is not None
        assert "the server ended 6 times" in failure.message


async def test_deleting_stops_a_running_job_and_removes_the_clip_of_an_ended_one(
    tmp_path: Path, generator: FakeGenerator
) -> None:
    async with serving(tmp_path, generator) as jobs:
        done = await jobs.create(a_request(), patient=True)
        generator.finish(done.request.id)
        running = await jobs.create(a_request(), patient=True)
        generator.progress(running.request.id, 1, 8)
        await until(lambda: jobs.find(done.id).has_ended)
        path = jobs.path_of(done)
        await jobs.delete(done.id)
        await jobs.delete(running.id)
        assert generator.aborted == [running.request.id]
        assert not path.exists()
        for job in (done, running):
            with pytest.raises(TriptychError) as caught:
                jobs.find(job.id)
            assert caught.value.code is ErrorCode.VIDEO_NOT_FOUND
    async with serving(tmp_path, FakeGenerator()) as jobs:
        assert jobs.page(owner=None, after=None, limit=10, newest_first=True) == ([], False)


async def test_a_job_deleted_while_its_clip_is_written_leaves_nothing(tmp_path: Path, generator: FakeGenerator) -> None:
    async with serving(tmp_path, generator) as jobs:
        job = await jobs.create(a_request(), patient=True)
        generator.finish(job.request.id)
        await asyncio.sleep(0)
        await jobs.delete(job.id)
    assert list((tmp_path / "videos").iterdir()) == []


async def test_an_owner_sees_and_deletes_only_its_own(tmp_path: Path, generator: FakeGenerator) -> None:
    async with serving(tmp_path, generator) as jobs:
        key = IdempotencyKey("k", "d")
        mine, theirs = [
            await jobs.create(a_request(owner=owner), patient=True, idempotency=key) for owner in ("me", "them")
        ]
        assert jobs.page(owner="me", after=None, limit=10, newest_first=True) == ([mine], False)
        assert jobs.page(owner=None, after=None, limit=10, newest_first=True) == ([theirs, mine], False)
        assert jobs.find(mine.id, owner="me") == mine
        assert jobs.find_by_key("k", owner="me") == mine
        assert jobs.find_by_key("x", owner="me") is None
        with pytest.raises(TriptychError, match="there is no video"):
            jobs.find(theirs.id, owner="me")
        with pytest.raises(TriptychError):
            await jobs.delete(theirs.id, owner="me")
        assert jobs.find(theirs.id) == theirs


async def test_pages_follow_each_other_also_behind_a_job_that_was_deleted(
    tmp_path: Path, generator: FakeGenerator
) -> None:
    async with serving(tmp_path, generator) as jobs:
        made = [await jobs.create(a_request(), patient=True) for _ in range(5)]
        page, more = jobs.page(owner=None, after=None, limit=2, newest_first=True)
        assert (page, more) == ([made[4], made[3]], True)
        await jobs.delete(made[3].id)
        page, more = jobs.page(owner=None, after=made[3].id, limit=2, newest_first=True)
        assert (page, more) == ([made[2], made[1]], True)
        page, more = jobs.page(owner=None, after=made[2].id, limit=2, newest_first=False)
        assert (page, more) == ([made[4]], False)


async def test_jobs_expire_with_their_clips_and_a_key_is_free_again(tmp_path: Path, generator: FakeGenerator) -> None:
    clock = Clock()
    async with serving(tmp_path, generator, keep_s=60.0, clock=clock) as jobs:
        old = await jobs.create(a_request(), patient=True, idempotency=IdempotencyKey("k", "d"))
        generator.finish(old.request.id)
        await until(lambda: jobs.find(old.id).has_ended)
        path = jobs.path_of(old)
        clock.now += 61
        new = await jobs.create(a_request(), patient=True)
        generator.finish(new.request.id)
        await until(lambda: not path.exists())
        assert jobs.find_by_key("k", owner=None) is None
        assert jobs.page(owner=None, after=None, limit=10, newest_first=True)[0][0].id == new.id


async def test_old_clips_make_room_for_new_ones_and_one_that_never_fits_fails(
    tmp_path: Path, generator: FakeGenerator
) -> None:
    clock = Clock()
    async with serving(tmp_path, generator, max_bytes=1000, clock=clock) as jobs:
        made = []
        for size in (400, 400, 500, 1001):
            job = await jobs.create(a_request(), patient=True)
            clock.now += 1
            generator.finish(job.request.id, bytes(size))
            await until(lambda job=job: jobs.find(job.id).has_ended)  # type: ignore[misc]
            made.append(job)
        kept, _ = jobs.page(owner=None, after=None, limit=10, newest_first=False)
        assert [(job.id, job.status) for job in kept] == [
            (made[1].id, JobStatus.COMPLETED),
            (made[2].id, JobStatus.COMPLETED),
            (made[3].id, JobStatus.FAILED),
        ]
        assert sum(path.stat().st_size for path in (tmp_path / "videos").iterdir()) == 900
        assert kept[2].failure is not None
        assert "1001 bytes" in kept[2].failure.message


async def test_a_disk_that_takes_nothing_fails_the_job_and_not_the_server(
    tmp_path: Path, generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async with serving(tmp_path, generator) as jobs:
        job = await jobs.create(a_request(), patient=True)
        with monkeypatch.context() as patch:
            patch.setattr(JobStore, "complete", full)
            generator.finish(job.request.id)
            await until(lambda: jobs.find(job.id).has_ended)
        failure = jobs.find(job.id).failure
        assert failure is not None
        assert "No space left" in failure.message
        with monkeypatch.context() as patch:
            patch.setattr(JobStore, "add", full)
            refused = a_request()
            with pytest.raises(TriptychError, match="No space left"):
                await jobs.create(refused, patient=True)
        assert refused.id in generator.aborted
        again = await jobs.create(a_request(), patient=True)
        generator.finish(again.request.id)
        await until(lambda: jobs.find(again.id).status is JobStatus.COMPLETED)


async def test_a_disk_that_does_not_answer_does_not_keep_the_server_and_the_next_one_makes_the_clip(
    tmp_path: Path, generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, answers = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        writing.set()
        assert answers.wait(WAIT_S)

    jobs = VideoJobs(JobStore(tmp_path), generator, model="clips", keep_s=3600.0, max_bytes=10_000)
    running = asyncio.create_task(jobs.run())
    await asyncio.sleep(0)
    job = await jobs.create(a_request(), patient=True)
    generator.progress(job.request.id, 1, 8)
    await until(lambda: jobs.find(job.id).status is JobStatus.IN_PROGRESS)
    with monkeypatch.context() as patch:
        patch.setattr(JobStore, "complete", hang)
        generator.finish(job.request.id)
        await until(writing.is_set)
        jobs.close()
        running.cancel()
        await asyncio.wait({running}, timeout=WAIT_S)
        assert running.cancelled()
        answers.set()
    async with serving(tmp_path, generator) as jobs:
        await until(lambda: len(generator._streams) == 1)
        generator.finish(job.request.id)
        await until(lambda: jobs.find(job.id).status is JobStatus.COMPLETED)


def test_a_thread_that_hangs_on_the_disk_does_not_keep_the_process(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = """
import asyncio, contextlib, pathlib, sys
from triptych.jobs.writer import Writer
async def main():
    async with asyncio.timeout(0.05):
        await Writer("disk").run(pathlib.Path(sys.argv[1]).write_bytes, b"nobody reads this")
with contextlib.suppress(TimeoutError):
    asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", program, str(pipe)], timeout=WAIT_S).returncode == 0


def test_ids_sort_by_the_time_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = []
    for nanoseconds in (1_700_000_000_000_000_000, 1_700_000_000_000_001_000, 9_000_000_000_000_000_000):
        monkeypatch.setattr("time.time_ns", lambda nanoseconds=nanoseconds: nanoseconds)
        ids.append(new_job_id())
    assert ids == sorted(ids)
    assert len({len(job_id) for job_id in ids}) == 1
