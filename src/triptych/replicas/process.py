"""Replicas as processes of this machine: a private socket each, death told by the process itself.

`ProcessExecutor.start` makes a socketpair, forks a child that owns one end and sends `Start` on the other. Frames
are read by the event loop straight into memory of their own. A replica has ended when its pidfd says so and its socket
and stderr are read to the end; only then the listener hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from triptych.engine.registry import engine_entry
from triptych.engine.worker import EXIT_BAD_FORK
from triptych.messages import ReplicaSpec, Start, ToReplica
from triptych.replicas.base import ReplicaListener
from triptych.replicas.launch import Child, ForkServer, spawn
from triptych.replicas.stderr_pipe import StderrPipe, last_words
from triptych.wire import Frame, WireError, encode, from_replica_decoder, keep_frame_memory

__all__ = ["ProcessExecutor", "ProcessReplica"]

_SOCKET_BUFFER_BYTES = 4 * 1024 * 1024  # a whole picture at once, where the kernel's limit allows
_EXIT_GRACE_S = 2.0

logger = logging.getLogger(__name__)


class ProcessExecutor:
    """Starts replicas of one engine; implements `replicas.base.Executor`."""

    def __init__(self, engine: str) -> None:
        """`engine` decides what the forkserver preloads. Raises `ConfigError` for an unknown one."""
        self._forkserver = ForkServer(engine_entry(engine).preload)
        self._spawning = False
        keep_frame_memory()

    @property
    def forkserver_pid(self) -> int | None:
        """Process that replicas are forked from; None before the first start."""
        return self._forkserver.pid

    async def start(self, spec: ReplicaSpec, incarnation: int, listener: ReplicaListener) -> ProcessReplica:
        """Start one incarnation; returns once its process exists. Raises OSError."""
        replica = ProcessReplica(self, Start(spec=spec, incarnation=incarnation), listener)
        await replica.launch()
        return replica

    async def launch(self, connection: socket.socket, stderr_fd: int) -> Child:
        """A new process that owns `connection` and writes to `stderr_fd`; the caller closes its own copies."""
        if self._spawning:
            return await spawn(connection, stderr_fd)
        return await self._forkserver.fork(connection, stderr_fd)

    def leave_forkserver(self) -> bool:
        """Start fresh interpreters from now on; False if that was so already."""
        before, self._spawning = self._spawning, True
        return not before

    async def close(self) -> None:
        """End the forkserver."""
        await self._forkserver.close()


class ProcessReplica(asyncio.BufferedProtocol):
    """One incarnation in one process; implements `replicas.base.ReplicaProcess`."""

    def __init__(self, executor: ProcessExecutor, start: Start, listener: ReplicaListener) -> None:
        self._executor = executor
        self._start = start
        self._listener = listener
        self._decoder = from_replica_decoder()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._child: Child | None = None
        self._stderr: StderrPipe | None = None
        self._open: set[str] = set()  # which of socket, process, stderr and status have not ended yet
        self._timer: asyncio.TimerHandle | None = None
        self._relaunch: asyncio.Task[None] | None = None
        self._killed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """The process while it lives."""
        return () if self._child is None else (self._child.pid,)

    async def launch(self) -> None:
        """Start the process and send `Start`. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            stderr = StderrPipe(lambda: self._ended("stderr"))
            undo.callback(stderr.close)
            try:
                child = await self._executor.launch(theirs, stderr.child_fd)
            finally:
                stderr.close_child_end()
            undo.pop_all()
        self._child, self._stderr = child, stderr
        self._open = {"socket", "process", "stderr"}
        self._loop.add_reader(child.pidfd, self._process_ended)
        try:
            await self._loop.create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            self.kill()
            ours.close()
            self._ended("socket")
            raise
        self.send(self._start)

    # ---- replicas.base.ReplicaProcess

    def send(self, message: ToReplica, frames: Sequence[Frame] = ()) -> None:
        """Queue a message; never blocks."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(encode(message, frames))

    def kill(self) -> None:
        """End it now (SIGKILL)."""
        self._killed = True
        self._signal(signal.SIGKILL)

    def dump_stacks(self) -> None:
        """Ask faulthandler in the process for the stacks of all threads."""
        self._signal(signal.SIGUSR1)

    def is_stopped(self) -> bool:
        """Whether the kernel shows the process as stopped by a signal."""
        if self._child is None:
            return False
        try:
            stat = Path(f"/proc/{self._child.pid}/stat").read_bytes()
        except OSError:  # gone in this moment, or no /proc here
            return False
        return stat.rpartition(b")")[2].split()[0] == b"T"

    def _signal(self, number: signal.Signals) -> None:
        """Through the pidfd, so that it cannot hit another process with the same number."""
        if self._child is not None and "process" in self._open:
            try:
                signal.pidfd_send_signal(self._child.pidfd, number)
            except ProcessLookupError:
                logger.debug("already gone", extra={"pid": self._child.pid})

    # ---- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is ours to use."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the loop shall put what it reads."""
        return self._decoder.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Hand over every message that is complete now."""
        try:
            for message, frames in self._decoder.buffer_updated(nbytes):
                self._listener.on_message(message, frames)
        except WireError:
            logger.exception("what the replica sends cannot be read", extra={"replica": self._start.spec.replica_id})
            self.kill()
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The child's end is closed: it is ending, or must."""
        self._transport = None
        self._ended("socket")
        if "process" in self._open and self._timer is None:
            self._timer = self._loop.call_later(_EXIT_GRACE_S, self.kill)

    # ---- the end

    def _process_ended(self) -> None:
        assert self._child is not None
        self._loop.remove_reader(self._child.pidfd)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_EXIT_GRACE_S, self._give_up)
        if self._child.status_fd is not None:
            self._open.add("status")
            self._loop.add_reader(self._child.status_fd, self._status_arrived)
        self._ended("process")

    def _status_arrived(self) -> None:
        assert self._child is not None and self._child.status_fd is not None
        self._loop.remove_reader(self._child.status_fd)
        self._ended("status")

    def _give_up(self) -> None:
        """The process is gone, yet socket or stderr (held by a grandchild) or status (forkserver stopped) stays."""
        if "socket" in self._open and self._transport is not None:
            self._transport.abort()
        if "stderr" in self._open:
            assert self._stderr is not None
            self._stderr.close()
            self._ended("stderr")
        if "status" in self._open:
            assert self._child is not None and self._child.status_fd is not None
            self._loop.remove_reader(self._child.status_fd)
            self._child.drop_status()
            self._ended("status")

    def _ended(self, what: str) -> None:
        self._open.discard(what)
        if self._open or self._child is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        child, self._child = self._child, None
        assert self._stderr is not None
        code, words = child.exit_code(), last_words(self._stderr.lines)
        child.close()
        if code == EXIT_BAD_FORK and not self._killed:
            if self._executor.leave_forkserver():
                logger.warning("CUDA is unusable in forked replicas; starting each in a fresh interpreter from now on")
            self._relaunch = self._loop.create_task(self._launch_again())
            return
        self._listener.on_exit(_exit_reason(code, words))

    async def _launch_again(self) -> None:
        try:
            await self.launch()
        except OSError as error:
            self._listener.on_exit(f"could not be started: {error}")
        else:
            if self._killed:
                self.kill()


def _exit_reason(code: int | None, words: str | None) -> str:
    if code == 0 or code == -signal.SIGKILL:  # neither is explained by what the process wrote
        words = None
    return _code_text(code) + (f" ({words})" if words else "")


def _code_text(code: int | None) -> str:
    if code is None:
        return "exit code unknown"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
