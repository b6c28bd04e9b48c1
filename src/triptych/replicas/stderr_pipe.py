"""What a replica writes to its stderr: passed on to the server's log as it is, in whole lines, the last ones kept.

The end of a process is often explained there and nowhere else: a traceback, faulthandler's report of a fatal signal,
an import error before the first message. `last_words` picks the line that tells most.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections import deque
from collections.abc import Callable

from triptych.telemetry.logging import RAW_LOGGER

__all__ = ["StderrPipe", "last_words"]

_KEPT_LINES = 64
_MAX_LINE_BYTES = 64 * 1024
_MAX_WORDS = 300
_raw = logging.getLogger(RAW_LOGGER)
_TELLING = re.compile(r"Fatal Python error: |[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b")


class StderrPipe:
    """The server's end of one replica's stderr. `on_end` is called at end of file, on the event loop."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """Raises OSError when descriptors run out."""
        self._fd, self.child_fd = os.pipe()
        os.set_blocking(self._fd, False)
        self._on_end = on_end
        self._open = True
        self._rest = b""
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def close_child_end(self) -> None:
        """The child has its own copy now, or will never have one."""
        os.close(self.child_fd)

    def close(self) -> None:
        """Read no more; nothing happens if the end was reached."""
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._take(self._rest.splitlines())

    def _read(self) -> None:
        try:
            data = os.read(self._fd, _MAX_LINE_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()
            self._on_end()
            return
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            whole, self._rest = [*whole, self._rest], b""
        self._take(whole)

    def _take(self, lines: list[bytes]) -> None:
        texts = [line.decode(errors="replace") for line in lines]
        if texts:
            self.lines.extend(texts)
            _raw.warning("%s", "\n".join(texts))


def last_words(lines: deque[str]) -> str | None:
    """The last line that names an error, else the last one that is not blank; None when there is none."""
    written = [line.strip() for line in lines if line.strip()]
    if not written:
        return None
    named = (line for line in reversed(lines) if _TELLING.match(line))
    return next(named, written[-1]).strip()[:_MAX_WORDS]
