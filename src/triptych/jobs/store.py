"""Jobs on disk: one SQLite file for what is known of them, one MP4 file each for what they made.

Every method is one step that a crash either lets happen or not: a clip is written whole and flushed under another name,
renamed, and only then does its row say `completed`; a row goes before its file does. What a crash leaves over, files
without a completed row, is removed when the store is opened. One thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from triptych.errors import ConfigError
from triptych.jobs.job import EARLIER, Job, JobStatus
from triptych.wire import Frame

__all__ = ["JobMovedOn", "JobStore"]

_FORMAT = 1
_TABLES = """
CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    status TEXT NOT NULL CHECK (status IN ('queued', 'in_progress', 'completed', 'failed')),
    document TEXT NOT NULL
);
CREATE TABLE inputs (
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    pixels BLOB NOT NULL,
    PRIMARY KEY (job, number)
);
"""


class JobMovedOn(Exception):
    """The job is not in a status from which it could come to the new one, or is not there any more."""


class JobStore:
    """All jobs of one folder; `folder` exists and belongs to this process. Raises `ConfigError` when it is unusable.

    The other methods raise sqlite3.Error and OSError when the disk does not take what they write.
    """

    def __init__(self, folder: Path) -> None:
        self._videos = folder / "videos"
        path = folder / "jobs.sqlite3"
        try:
            self._videos.mkdir(mode=0o700, exist_ok=True)
            # Transactions are begun by hand, and whoever calls sees to it that only one thread does at a time.
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA foreign_keys = ON")
            self._prepare(path)
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"cannot keep jobs: {error}", where=str(path)) from error

    def _prepare(self, path: Path) -> None:
        (found,) = self._database.execute("PRAGMA user_version").fetchone()
        if found == 0:
            self._database.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_FORMAT}; COMMIT;")
        elif found != _FORMAT:
            raise ConfigError(
                "written by another version", where=str(path), found=f"format {found}", wanted=f"format {_FORMAT}"
            )

    def load(self) -> list[Job]:
        """Every job, oldest first; removes files that belong to none. Raises `ConfigError` for a row it cannot read."""
        jobs = []
        for job_id, document in self._database.execute("SELECT id, document FROM jobs ORDER BY id"):
            try:
                jobs.append(msgspec.json.decode(document, type=Job))
            except msgspec.DecodeError as error:
                raise ConfigError(f"job {job_id} cannot be read: {error}", where=str(self._videos.parent)) from error
        kept = {self.path_of(job.id) for job in jobs if job.status is JobStatus.COMPLETED}
        for path in self._videos.iterdir():
            if path not in kept:
                path.unlink()
        return jobs

    def path_of(self, job_id: str) -> Path:
        """The clip of a completed job."""
        return self._videos / f"{job_id}.mp4"

    def add(self, job: Job, inputs: Sequence[Frame]) -> None:
        """A new job and the pixels of its input pictures."""
        with self._transaction():
            row = (job.id, job.status, msgspec.json.encode(job).decode())
            self._database.execute("INSERT INTO jobs (id, status, document) VALUES (?, ?, ?)", row)
            rows = [(job.id, number, pixels) for number, pixels in enumerate(inputs)]
            self._database.executemany("INSERT INTO inputs (job, number, pixels) VALUES (?, ?, ?)", rows)

    def inputs(self, job_id: str) -> tuple[bytes, ...]:
        """Pixels of the input pictures of a job that has not ended."""
        rows = self._database.execute("SELECT pixels FROM inputs WHERE job = ? ORDER BY number", (job_id,))
        return tuple(pixels for (pixels,) in rows)

    def rewrite(self, job: Job) -> None:
        """Write a job anew in the status it has. Raises `JobMovedOn`."""
        self._update(job, (job.status,))

    def advance(self, job: Job) -> None:
        """Write a job in its next status. Raises `JobMovedOn`."""
        self._update(job, EARLIER[job.status])

    def complete(self, job: Job, clip: Frame) -> None:
        """Keep the clip, then write the job as completed. Raises `JobMovedOn`."""
        found = self._database.execute("SELECT status FROM jobs WHERE id = ?", (job.id,)).fetchone()
        if found is None or JobStatus(found[0]) not in EARLIER[job.status]:
            raise JobMovedOn(job.id)
        self._write_whole(self.path_of(job.id), clip)
        self.advance(job)

    def remove(self, job_ids: Iterable[str]) -> None:
        """Forget jobs, then remove their clips; unknown ids do nothing."""
        ids = list(job_ids)
        with self._transaction():
            self._database.executemany("DELETE FROM jobs WHERE id = ?", [(job_id,) for job_id in ids])
        for job_id in ids:
            self.path_of(job_id).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()

    def _update(self, job: Job, earlier: Sequence[JobStatus]) -> None:
        with self._transaction():
            changed = self._database.execute(
                f"UPDATE jobs SET status = ?, document = ? WHERE id = ? AND status IN ({','.join('?' * len(earlier))})",
                (job.status, msgspec.json.encode(job).decode(), job.id, *earlier),
            )
            if not changed.rowcount:
                raise JobMovedOn(job.id)
            if job.has_ended:
                self._database.execute("DELETE FROM inputs WHERE job = ?", (job.id,))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:  # a full disk may have ended it already
                self._database.execute("ROLLBACK")
            raise

    def _write_whole(self, path: Path, data: Frame) -> None:
        partial = path.with_suffix(".part")
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
