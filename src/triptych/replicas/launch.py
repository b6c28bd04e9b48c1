"""Two ways to get a replica process: a fork of the preloaded forkserver, or a fresh interpreter.

Both hand the child one end of a private socket and return as soon as the process has been asked for. The forkserver
is multiprocessing's own, used below `multiprocessing.Process`: a `Process` makes its child import the server's
`__main__` again (seconds, and side effects), while the worker needs nothing from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import TYPE_CHECKING

from triptych.engine.worker import ForkedWorker

__all__ = ["Child", "ForkServer", "spawn"]

_FORK_TIMEOUT_S = 300.0  # the first fork waits for the preload, which may read gigabytes from a cold disk


@dataclass(slots=True)
class Child:
    """A process that exists. The forkserver, its parent, writes the exit code into `status_fd`; None: we are parent."""

    pid: int
    pidfd: int
    status_fd: int | None = None
    data_fd: int | None = None
    process: subprocess.Popen[bytes] | None = None

    def exit_code(self) -> int | None:
        """Exit code of the ended process, negative for a signal; None when nobody can tell any more."""
        if self.process is not None:
            return self.process.poll()
        with contextlib.suppress(ChildProcessError):  # an orphan of a dead forkserver comes to us if we are pid 1
            ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            if ended is not None:
                return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if self.status_fd is None:
            return None
        try:
            return int(forkserver.read_signed(self.status_fd))
        except (OSError, EOFError):
            return None

    def drop_status(self) -> None:
        """Do not wait for an exit code any more."""
        if self.status_fd is not None:
            os.close(self.status_fd)
            self.status_fd = None

    def close(self) -> None:
        """Give back the descriptors."""
        self.drop_status()
        os.close(self.pidfd)
        if self.data_fd is not None:
            os.close(self.data_fd)


class _Base(forkserver.ForkServer):
    if TYPE_CHECKING:
        _forkserver_pid: int | None

        def _stop(self) -> None: ...


class ForkServer:
    """The process that has imported what all replicas share; started at the first fork, and again if it died."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._server = _Base()
        self._server.set_forkserver_preload(list(preload))
        self._starting = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The forkserver's process, None before the first fork and after `close`."""
        return self._server._forkserver_pid

    async def fork(self, connection: socket.socket) -> Child:
        """Fork a replica that owns the other end of `connection`'s descriptor. Raises OSError."""
        # The thread owns a descriptor of its own: if this task is cancelled, the number may be another file's by then.
        request = asyncio.create_task(asyncio.to_thread(self._request, os.dup(connection.fileno())))
        try:
            status_fd, data_fd = await asyncio.shield(request)
        except asyncio.CancelledError:
            request.add_done_callback(_close_answer)
            raise
        try:
            async with asyncio.timeout(_FORK_TIMEOUT_S):
                pid = await _read_pid(status_fd)
            return Child(pid=pid, pidfd=os.pidfd_open(pid), status_fd=status_fd, data_fd=data_fd)
        except BaseException:
            os.close(status_fd)
            os.close(data_fd)
            raise

    def _request(self, fd: int) -> tuple[int, int]:
        # Blocked signals are inherited: the forkserver cannot be killed by one before its preload ignores them.
        # The resource tracker unblocks them in the thread that starts it, so it goes first.
        try:
            with self._starting:
                resource_tracker.ensure_running()
                with _blocked({signal.SIGINT, signal.SIGTERM}):
                    try:
                        status_fd, data_fd = self._server.connect_to_new_process([fd])
                    except ConnectionRefusedError:  # it is dying, yet not so dead that a new one would be started
                        self._end()
                        status_fd, data_fd = self._server.connect_to_new_process([fd])
        finally:
            os.close(fd)
        # First what `multiprocessing.spawn.prepare` should set up in the child (nothing), then what the child runs.
        os.write(data_fd, pickle.dumps({}) + pickle.dumps(ForkedWorker()))
        return status_fd, data_fd

    async def close(self) -> None:
        """End the forkserver; replicas that still run are not touched."""
        await asyncio.to_thread(self._end_alone)

    def _end_alone(self) -> None:
        with self._starting:
            self._end()

    def _end(self) -> None:
        if self._server._forkserver_pid is not None:
            os.kill(self._server._forkserver_pid, signal.SIGKILL)
            self._server._stop()


def _close_answer(request: asyncio.Task[tuple[int, int]]) -> None:
    if not request.cancelled() and request.exception() is None:
        for fd in request.result():
            os.close(fd)


async def _read_pid(status_fd: int) -> int:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(status_fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(status_fd)
    try:
        return int(forkserver.read_signed(status_fd))
    except EOFError as error:
        raise ConnectionError("the forkserver ended before it could fork") from error


@contextlib.contextmanager
def _blocked(signals: set[signal.Signals]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def spawn(connection: socket.socket) -> Child:
    """Start a replica in a fresh interpreter: slower and sharing no memory, but free of any state of a parent."""
    return await asyncio.to_thread(_spawn, connection.fileno())


def _spawn(fd: int) -> Child:
    with _blocked({signal.SIGINT, signal.SIGTERM}):
        process = subprocess.Popen(
            [sys.executable, "-m", "triptych.engine.worker", str(fd)], stdin=subprocess.DEVNULL, pass_fds=(fd,)
        )
    return Child(pid=process.pid, pidfd=os.pidfd_open(process.pid), process=process)
