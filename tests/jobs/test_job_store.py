"""The store keeps what it was given whatever the moment in which the process ends, and nothing half."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
from job_fakes import CLIP, METRICS, a_job, with_pictures

from triptych.errors import ConfigError, ErrorCode
from triptych.jobs.job import IdempotencyKey, Job, JobFailure, JobStatus, VideoFile
from triptych.jobs.store import JobMovedOn, JobStore

VIDEO = VideoFile(size_bytes=len(CLIP), width=64, height=32, num_frames=9, fps=8, metrics=METRICS)


def moved(job: Job, status: JobStatus) -> Job:
    ended_at = 2000.0 if status in (JobStatus.COMPLETED, JobStatus.FAILED) else None
    return msgspec.structs.replace(job, status=status, ended_at=ended_at, expires_at=ended_at and ended_at + 60)


def reopened(folder: Path) -> list[Job]:
    store = JobStore(folder)
    try:
        return store.load()
    finally:
        store.close()


def test_a_job_comes_back_as_it_was(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    queued = a_job(idempotency=IdempotencyKey("k", "d"), ignored_parameters=("style",))
    failed = moved(a_job(failure=JobFailure(ErrorCode.OUT_OF_MEMORY, "too big", "size")), JobStatus.FAILED)
    done = moved(a_job(video=VIDEO), JobStatus.COMPLETED)
    for job in (queued, failed, done):
        store.add(msgspec.structs.replace(job, status=JobStatus.QUEUED, ended_at=None), ())
    store.advance(failed)
    store.complete(done, CLIP)
    store.close()
    assert reopened(tmp_path) == [queued, failed, done]
    assert JobStore(tmp_path).path_of(done.id).read_bytes() == CLIP


def test_input_pictures_are_kept_until_the_job_has_ended(tmp_path: Path) -> None:
    request = with_pictures(b"abc" * 4, b"xyz")
    job = a_job(request=msgspec.structs.replace(request, frames=()))
    store = JobStore(tmp_path)
    store.add(job, [memoryview(frame) for frame in request.frames])
    store.advance(moved(job, JobStatus.IN_PROGRESS))
    assert store.inputs(job.id) == request.frames
    store.advance(moved(job, JobStatus.FAILED))
    assert store.inputs(job.id) == ()


@pytest.mark.parametrize("start", JobStatus)
@pytest.mark.parametrize("end", JobStatus)
def test_a_status_only_moves_forward(tmp_path: Path, start: JobStatus, end: JobStatus) -> None:
    order = [JobStatus.QUEUED, JobStatus.IN_PROGRESS, JobStatus.COMPLETED]
    rank = {**{status: number for number, status in enumerate(order)}, JobStatus.FAILED: 2}
    store, job = JobStore(tmp_path), a_job()
    store.add(job, ())
    if start is not JobStatus.QUEUED:
        store.advance(moved(job, start))
    if rank[end] > rank[start]:
        store.advance(moved(job, end))
    else:
        with pytest.raises(JobMovedOn):
            store.advance(moved(job, end))
    assert store.load()[0].status is (end if rank[end] > rank[start] else start)


def test_a_job_that_was_removed_is_not_completed_and_leaves_no_file(tmp_path: Path) -> None:
    store, job = JobStore(tmp_path), a_job()
    store.add(job, ())
    store.remove([job.id, "video_unknown"])
    with pytest.raises(JobMovedOn):
        store.complete(moved(job, JobStatus.COMPLETED), CLIP)
    assert list((tmp_path / "videos").iterdir()) == []
    assert store.load() == []


def test_files_that_belong_to_no_completed_job_are_removed_at_the_start(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    done, running = a_job(), a_job()
    for job in (done, running):
        store.add(job, ())
    store.complete(moved(done, JobStatus.COMPLETED), CLIP)
    store.advance(moved(running, JobStatus.IN_PROGRESS))
    for name in (f"{running.id}.mp4", f"{running.id}.part", "video_gone.mp4"):
        (tmp_path / "videos" / name).write_bytes(b"half")
    store.close()
    assert [job.status for job in reopened(tmp_path)] == [JobStatus.COMPLETED, JobStatus.IN_PROGRESS]
    assert [path.name for path in (tmp_path / "videos").iterdir()] == [f"{done.id}.mp4"]


# Where the process may be killed on the way of a clip to the disk, by what it is about to do there.
CRASH_POINTS = {
    "before the clip is flushed": "os.fsync = die",
    "before the clip has its name": "Path.replace = die",
    "between the clip and its row": "JobStore.advance = die",
    "within the transaction of the row": "JobStore._update = begin_and_die",
}
KILLED = """
import os, signal, sys
from pathlib import Path
import msgspec
from triptych.jobs.job import JobStatus
from triptych.jobs.store import JobStore

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def begin_and_die(self, job, earlier):
    with self._transaction():
        self._database.execute("UPDATE jobs SET status = 'completed' WHERE id = ?", (job.id,))
        die()

store = JobStore(Path(sys.argv[1]))
(job,) = store.load()
{crash}
store.complete(msgspec.structs.replace(job, status=JobStatus.COMPLETED, ended_at=2000.0), b"x" * 100_000)
"""


@pytest.mark.parametrize("crash", CRASH_POINTS.values(), ids=list(CRASH_POINTS))
def test_a_kill_at_any_point_leaves_a_job_that_can_run_again(tmp_path: Path, crash: str) -> None:
    store, job = JobStore(tmp_path), a_job()
    store.add(job, ())
    running = moved(job, JobStatus.IN_PROGRESS)
    store.advance(running)
    store.close()
    code = textwrap.dedent(KILLED).format(crash=crash)
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert reopened(tmp_path) == [running]
    assert list((tmp_path / "videos").iterdir()) == []
    store = JobStore(tmp_path)
    store.complete(moved(running, JobStatus.COMPLETED), CLIP)
    assert store.path_of(job.id).read_bytes() == CLIP


def test_a_clip_that_does_not_fit_on_the_disk_leaves_the_job_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, job = JobStore(tmp_path), a_job()
    store.add(job, ())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.complete(moved(job, JobStatus.COMPLETED), CLIP)
    monkeypatch.undo()
    assert store.load() == [job]
    assert list((tmp_path / "videos").iterdir()) == []


def test_after_a_failed_write_the_next_one_works(tmp_path: Path) -> None:
    store, job = JobStore(tmp_path), a_job()
    store.add(job, ())
    with pytest.raises(sqlite3.IntegrityError):
        store.add(job, ())
    store.add(a_job(), ())
    assert len(store.load()) == 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(b"this is no database" * 100), "cannot keep jobs: file is not a database"),
        (lambda path: execute(path, "PRAGMA user_version = 7"), "written by another version"),
        (lambda path: execute(path, "UPDATE jobs SET document = '{\"id\": 1}'"), "cannot be read"),
    ],
)
def test_a_folder_that_cannot_be_understood_is_an_error_with_its_path(
    tmp_path: Path, spoil: object, message: str
) -> None:
    store = JobStore(tmp_path)
    store.add(a_job(), ())
    store.close()
    spoil(tmp_path / "jobs.sqlite3")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message) as caught:
        JobStore(tmp_path).load()
    assert str(tmp_path) in str(caught.value)


def execute(path: Path, statement: str) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute(statement)
    database.close()
