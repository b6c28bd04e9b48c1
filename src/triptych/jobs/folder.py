"""The folder in which a server keeps what outlives it, and the lock that keeps a second server out of it.

Asked for by name, or the user's own: one folder per port there, so that servers side by side do not meet and the same
command finds its jobs again. The lock is the kernel's and goes with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from triptych.errors import ConfigError

__all__ = ["data_folder", "default_folder"]

_log = logging.getLogger(__name__)


def default_folder(port: int, environ: Mapping[str, str]) -> Path:
    """Where the server at this port keeps its jobs when nothing else is said. Raises RuntimeError without a home."""
    shared = Path(environ.get("XDG_DATA_HOME", ""))
    base = shared if shared.is_absolute() else Path.home() / ".local" / "share"
    return base / "triptych" / f"port-{port}"


@contextmanager
def data_folder(asked: str | None, *, port: int, where: str, environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Create and lock the folder for the time of the block; `where` is what asked for it. Raises `ConfigError`.

    Without a usable folder of the user a temporary one serves, with a warning: a server of pictures needs none.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(asked).expanduser() if asked is not None else default_folder(port, environ)
            stack.enter_context(_locked(folder, where))
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if asked is not None:
                raise ConfigError(f"cannot keep files there: {reason}", where=where, found=asked) from error
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triptych-")))
            message = "video jobs will end with this server: no folder of the user to keep them (%s); see %s"
            _log.warning(message, reason, where)
        yield folder


@contextmanager
def _locked(folder: Path, where: str) -> Iterator[None]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "lock").open("a+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                "another server keeps its jobs there", where=where, found=str(folder), wanted="a folder of its own"
            ) from error
        yield
