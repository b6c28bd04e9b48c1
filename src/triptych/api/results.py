"""Results that an answer links to instead of holding them: `response_format: url`.

An output stays in memory under a name that nobody can guess and is served at `/results/{name}` without a key, until
it is `_LIFE_S` old or newer ones need the room.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from triptych.errors import ErrorCode, TriptychError
from triptych.orchestrator.events import UnitOutput
from triptych.wire import Frame

__all__ = ["RESULTS_PATH", "Results"]

RESULTS_PATH = "/results/"

_LIFE_S = 3600.0
_ROOM_BYTES = 1 << 30
_NAME_BYTES = 24


@dataclass(frozen=True, slots=True)
class _Result:
    mime: str
    data: Frame
    expires_s: float


class Results:
    """The newest outputs, at most `room_bytes` of them in all, each for `life_s` seconds by `clock`."""

    def __init__(
        self, *, life_s: float = _LIFE_S, room_bytes: int = _ROOM_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._life_s = life_s
        self._room_bytes = room_bytes
        self._clock = clock
        self._results: dict[str, _Result] = {}  # oldest first
        self._held_bytes = 0

    def keep(self, output: UnitOutput) -> str:
        """The name that the output has from now on."""
        name = f"{secrets.token_urlsafe(_NAME_BYTES)}.{output.mime.partition('/')[2]}"
        self._results[name] = _Result(output.mime, output.data, self._clock() + self._life_s)
        self._held_bytes += len(output.data)
        self._forget()
        return name

    def find(self, name: str) -> tuple[str, Frame, float]:
        """Media type, bytes and seconds left. Raises `TriptychError`."""
        self._forget()
        if (result := self._results.get(name)) is None:
            raise TriptychError(
                ErrorCode.NOT_FOUND, "there is no result of this name; results are kept for a while only"
            )
        return result.mime, result.data, result.expires_s - self._clock()

    def _forget(self) -> None:
        now_s = self._clock()
        for name, result in list(self._results.items()):
            if result.expires_s > now_s and self._held_bytes <= self._room_bytes:
                return
            del self._results[name]
            self._held_bytes -= len(result.data)
