"""Results that an answer links to instead of holding them: `response_format: url`.

An output becomes a file under a name that nobody can guess, and is served at `/results/{name}` without a key until it
is `_LIFE_S` old or newer ones need the room. The files are all there is: the next server finds those of the one before.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.errors import ConfigError, ErrorCode, TriptychError
from triptych.jobs.writer import Writer
from triptych.orchestrator.events import UnitOutput
from triptych.wire import Frame

__all__ = ["RESULTS_PATH", "Results"]

_log = logging.getLogger(__name__)

RESULTS_PATH = "/results/"

_LIFE_S = 3600.0
_ROOM_BYTES = 1 << 30
_MIN_SLEEP_S = 1.0
_NAME_BYTES = 24
_PARTIAL = ".part"


@dataclass(frozen=True, slots=True)
class _Result:
    size_bytes: int
    expires_at: float


class Results:
    """The newest outputs, in `folder`: at most `room_bytes` in all, each for `life_s` seconds by `clock` (Unix time).

    Files that have had their time are removed while `expire` runs. Raises `ConfigError` for a folder that cannot be
    used; the other methods raise `TriptychError` when the disk does not take or give a file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        life_s: float = _LIFE_S,
        room_bytes: int = _ROOM_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._life_s = life_s
        self._room_bytes = room_bytes
        self._clock = clock
        self._disk = Writer("results")
        self._kept = asyncio.Event()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._results = self._load()  # oldest first
        except OSError as error:
            raise ConfigError(f"cannot keep results: {error}", where=str(folder)) from error
        self._held_bytes = sum(result.size_bytes for result in self._results.values())

    async def keep(self, output: UnitOutput) -> str:
        """The name that the output has from now on."""
        name = f"{secrets.token_urlsafe(_NAME_BYTES)}.{output.mime.partition('/')[2]}"
        now = self._clock()
        await self._on_disk(self._write, name, output.data, now)
        self._results[name] = _Result(len(output.data), now + self._life_s)
        self._held_bytes += len(output.data)
        self._kept.set()
        await self._forget()
        return name

    async def expire(self) -> None:
        """Remove files as their time ends, until it is cancelled."""
        while True:
            self._kept.clear()
            try:
                await self._forget()
            except TriptychError as error:
                _log.warning("old results stay on disk: %s", error.message)
            if (oldest := next(iter(self._results.values()), None)) is None:
                await self._kept.wait()
            else:
                await asyncio.sleep(max(_MIN_SLEEP_S, oldest.expires_at - self._clock()))

    async def read(self, name: str) -> tuple[str, bytes, float]:
        """Media type, bytes and seconds left. Raises `TriptychError`."""
        await self._forget()
        result = self._results.get(name)
        data = None if result is None else await self._on_disk(self._read, name)
        if result is None or data is None:
            raise TriptychError(
                ErrorCode.NOT_FOUND, "there is no result of this name; results are kept for a while only"
            )
        return f"image/{name.rpartition('.')[2]}", data, result.expires_at - self._clock()

    async def _forget(self) -> None:
        now, leaving = self._clock(), []
        for name, result in list(self._results.items()):
            if result.expires_at > now and self._held_bytes <= self._room_bytes:
                break
            del self._results[name]
            self._held_bytes -= result.size_bytes
            leaving.append(name)
        if leaving:
            await self._on_disk(self._remove, leaving)

    async def _on_disk(self, work: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await self._disk.run(work, *arguments)
        except OSError as error:
            raise TriptychError(ErrorCode.ENGINE_ERROR, f"the server cannot keep results: {error}") from error

    # ---- in the thread

    def _load(self) -> dict[str, _Result]:
        """What an earlier server left; a file's time of change is when it was made."""
        found = []
        for path in self._folder.iterdir():
            about = path.stat()
            expires_at = about.st_mtime + self._life_s
            if path.suffix == _PARTIAL or expires_at <= self._clock():
                path.unlink()
            else:
                found.append((path.name, _Result(about.st_size, expires_at)))
        return dict(sorted(found, key=lambda entry: entry[1].expires_at))

    def _write(self, name: str, data: Frame, now: float) -> None:
        """Whole or not at all, should the server end meanwhile; a file for an hour is not worth a flush."""
        partial = self._folder / f"{name}{_PARTIAL}"
        try:
            partial.write_bytes(data)
            os.utime(partial, (now, now))
            partial.rename(self._folder / name)
        finally:
            partial.unlink(missing_ok=True)

    def _read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
