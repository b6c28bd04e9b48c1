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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from triptych.engine.worker import ForkedWorker

__all__ = ["Child", "ForkServer", "spawn"]

T = TypeVar("T")

_FIRST_FORK_S = 300.0  # the first fork waits for the preload, which may read gigabytes from a cold disk
_FORK_S = 30.0  # later ones take milliseconds


@dataclass(slots=True)
class Child:
    """A process that exists. The forkserver, its parent, writes the exit code into `status_fd`; None: we are parent."""

    pid: int
    pidfd: int
    status_fd: int | None = None
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
        self._proven_pid: int | None = None  # the forkserver that has forked before

    @property
    def pid(self) -> int | None:
        """The forkserver's process, None before the first fork and after `close`."""
        return self._server._forkserver_pid

    async def fork(self, connection: socket.socket, stderr_fd: int) -> Child:
        """Fork a replica that owns copies of `connection` and, as its stderr, of `stderr_fd`. Raises OSError."""
        fds = (connection.fileno(), stderr_fd)
        status_fd, server_pid = await _in_thread(self._request, fds, undo=lambda sent: os.close(sent[0]))
        try:
            pid = await self._forked_pid(status_fd, server_pid)
            return Child(pid=pid, pidfd=os.pidfd_open(pid), status_fd=status_fd)
        except BaseException:
            os.close(status_fd)
            raise

    async def _forked_pid(self, status_fd: int, server_pid: int | None) -> int:
        limit_s = _FIRST_FORK_S if server_pid != self._proven_pid else _FORK_S
        try:
            async with asyncio.timeout(limit_s):
                pid = await _read_pid(status_fd)
        except TimeoutError:  # it is stopped or stuck, and would be for whoever asks next
            await asyncio.to_thread(self._end_alone, server_pid)
            raise TimeoutError(f"the forkserver did not fork within {limit_s:g} s") from None
        self._proven_pid = server_pid
        return pid

    def _request(self, fds: Sequence[int]) -> tuple[int, int | None]:
        """Where the child's pid and exit code will be read, and the forkserver that was asked."""
        # Blocked signals are inherited: the forkserver cannot be killed by one before its preload ignores them.
        # The resource tracker unblocks them in the thread that starts it, so it goes first.
        with self._starting:
            resource_tracker.ensure_running()
            os.environ["_TRIPTYCH_SERVER_PID"] = str(os.getpid())  # how the forkserver knows its server
            os.environ["_TRIPTYCH_SOCKET_FOLDER"] = util.get_temp_dir()  # and what to remove should we be killed
            with _blocked({signal.SIGINT, signal.SIGTERM}):
                try:
                    status_fd, data_fd = self._server.connect_to_new_process(list(fds))
                except (ConnectionError, EOFError, FileNotFoundError):
                    # It is dying, yet not so dead that a new one would be started; or its socket was removed.
                    self._end()
                    status_fd, data_fd = self._server.connect_to_new_process(list(fds))
            server_pid = self.pid
        # First what `multiprocessing.spawn.prepare` should set up in the child (nothing), then what the child runs.
        try:
            with open(data_fd, "wb") as stream:  # noqa: PTH123 - a descriptor, not a path
                stream.write(pickle.dumps({}) + pickle.dumps(ForkedWorker()))
        except OSError:
            os.close(status_fd)
            raise
        return status_fd, server_pid

    async def close(self) -> None:
        """End the forkserver; replicas that still run are not touched."""
        await asyncio.to_thread(self._end_alone)

    def _end_alone(self, pid: int | None = None) -> None:
        """End the forkserver; given a pid, only that one and not another that has replaced it meanwhile."""
        with self._starting:
            if pid in (None, self.pid):
                self._end()

    def _end(self) -> None:
        # A cleaner of old files may have removed the folder of its socket, which multiprocessing counts on until exit.
        Path(util.get_temp_dir()).mkdir(mode=0o700, exist_ok=True)
        if self._server._forkserver_pid is not None:
            os.kill(self._server._forkserver_pid, signal.SIGKILL)
            with contextlib.suppress(FileNotFoundError):  # the socket, which goes last
                self._server._stop()


async def _in_thread(work: Callable[[Sequence[int]], T], fds: Sequence[int], *, undo: Callable[[T], object]) -> T:
    """Run `work` in a thread with these descriptors; `undo` its result should nobody wait for it any more.

    The thread gets descriptors of its own: once this task is cancelled, the old numbers may be other files'.
    """
    with contextlib.ExitStack() as copies:
        own = []
        for fd in fds:
            own.append(os.dup(fd))
            copies.callback(os.close, own[-1])
        closing = copies.pop_all()

    def run() -> T:
        with closing:
            return work(own)

    task = asyncio.create_task(asyncio.to_thread(run))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: None if done.cancelled() or done.exception() else undo(done.result()))
        raise


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


async def spawn(connection: socket.socket, stderr_fd: int) -> Child:
    """Start a replica in a fresh interpreter: slower and sharing no memory, but free of any state of a parent."""
    return await _in_thread(_spawn, (connection.fileno(), stderr_fd), undo=_discard)


def _discard(child: Child) -> None:
    assert child.process is not None
    child.process.kill()
    child.process.wait()  # a process killed this early is gone at once
    child.close()


def _spawn(fds: Sequence[int]) -> Child:
    fd, stderr_fd = fds
    command = [sys.executable, "-m", "triptych.engine.worker", str(fd)]
    with _blocked({signal.SIGINT, signal.SIGTERM}):
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr_fd, pass_fds=(fd,))
    return Child(pid=process.pid, pidfd=os.pidfd_open(process.pid), process=process)
