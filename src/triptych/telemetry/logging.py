"""Log lines of server and replicas: structured, to stderr, every line naming the replica it came from.

Whatever a caller passes in `extra=` becomes `key=value` (text) or a member of the object (json). A record is one
line; only a traceback adds lines, in text each with the record's own prefix, in json none. The server writes from a
thread of its own: whoever reads its log slowly, or not at all, must not stop the event loop.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import re
import sys
import threading
from datetime import UTC, datetime
from typing import Literal

__all__ = ["RAW_LOGGER", "JsonFormatter", "TextFormatter", "configure_logging"]

RAW_LOGGER = "triptych.raw"
"""Logger for text that another process has formatted: it is written as it is, whatever the level."""

_MAX_UNWRITTEN = 10_000
_FLUSH_TIMEOUT_S = 1.0
_PLAIN = re.compile(r"[!#-<>-~]+")  # visible ASCII but quotes and equals signs
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(
    level: str, format: Literal["text", "json"] | str, *, replica: str | None = None, background: bool = False
) -> None:
    """Send the root logger to stderr in `format`; `replica` marks every line. Raises ValueError for a bad name.

    With `background` logging never blocks: beyond 10,000 unwritten lines further ones are counted and dropped.
    """
    if format not in ("text", "json"):
        raise ValueError(f"log format must be text or json, not {format!r}")
    if level.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"unknown log level {level!r}")
    handler: logging.Handler = logging.StreamHandler(_Descriptor(sys.stderr.fileno()) if background else sys.stderr)
    handler.setFormatter(JsonFormatter(replica) if format == "json" else TextFormatter(replica))
    if background:
        handler = _BackgroundHandler(handler)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.getLogger(RAW_LOGGER).setLevel(logging.DEBUG)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each byte that a client sends wrong
    logging.captureWarnings(True)


class _Descriptor:
    """Text stream without a buffer, so that a write that never ends holds no lock that the exit would wait for."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, text: str) -> None:
        """Write all of it."""
        data = text.encode(errors="backslashreplace")
        while data:
            data = data[os.write(self._fd, data) :]

    def flush(self) -> None:
        """Nothing is kept back."""


class _BackgroundHandler(logging.Handler):
    """Hands records to a thread that writes them."""

    def __init__(self, writer: logging.Handler) -> None:
        super().__init__()
        self._writer = writer
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(_MAX_UNWRITTEN)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()
        atexit.register(self._flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record, or count it as dropped."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        # `emit`, not `handle`: the exit takes every handler's lock, and must not wait for a write that never ends.
        while (record := self._records.get()) is not None:
            self._writer.emit(record)
            if self._records.empty():
                self._tell_dropped()
        self._tell_dropped()

    def _tell_dropped(self) -> None:
        dropped, self._dropped = self._dropped, 0
        if dropped:
            text = "%d log lines were dropped: nobody read them in time"
            self._writer.emit(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (dropped,), None))

    def _flush(self) -> None:
        try:
            self._records.put(None, timeout=_FLUSH_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(_FLUSH_TIMEOUT_S)


def _fields(record: logging.LogRecord, replica: str | None) -> dict[str, object]:
    fields: dict[str, object] = {} if replica is None else {"replica": replica}
    fields.update((key, value) for key, value in vars(record).items() if key not in _OWN_ATTRIBUTES)
    return fields


def _when(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """`2026-01-01T12:00:00.000Z INFO triptych.server: message key=value`."""

    def __init__(self, replica: str | None = None) -> None:
        super().__init__()
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        """One line, and one more for each line of a traceback."""
        if record.name == RAW_LOGGER:
            return record.getMessage()
        mark = "" if self._replica is None else f" [replica {self._replica}]"
        prefix = f"{_when(record)} {record.levelname}{mark} {record.name}: "
        fields = "".join(f" {key}={_text(value)}" for key, value in _fields(record, None).items())
        lines = [record.getMessage().replace("\r", "\\r").replace("\n", "\\n") + fields]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        if record.stack_info:
            lines += self.formatStack(record.stack_info).splitlines()
        return "\n".join(prefix + line for line in lines)


class JsonFormatter(logging.Formatter):
    """`{"time": …, "level": …, "logger": …, "message": …, …}`."""

    def __init__(self, replica: str | None = None) -> None:
        super().__init__()
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object without line breaks."""
        if record.name == RAW_LOGGER:
            return record.getMessage()
        entry: dict[str, object] = {
            "time": _when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record, self._replica),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        return json.dumps(entry, default=str)


def _text(value: object) -> str:
    text = str(value)
    if _PLAIN.fullmatch(text):  # nearly always, and ten times as fast as a look at every character
        return text
    plain = text and all(c.isprintable() and not c.isspace() and c not in '"=' for c in text)
    return text if plain else json.dumps(text)
