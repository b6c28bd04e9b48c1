"""Entry point of a replica process: private socket on one side, engine on the other.

The first message is `Start`. The main thread owns the device: it loads the engine, reports `Ready` and runs it. A
reader thread hands the engine what arrives and ends the process at end of file (the server is gone). Results go out
from whatever thread has them, one record at a time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from typing import Any

import setproctitle

from triptych.engine.base import Engine, EngineStartError
from triptych.engine.registry import EngineEntry, engine_entry, import_engine
from triptych.errors import ConfigError
from triptych.messages import (
    HEARTBEAT_INTERVAL_S,
    Abort,
    FromReplica,
    Generate,
    Heartbeat,
    Ready,
    ReplicaSpec,
    Start,
    StartFailed,
    Stop,
    ToReplica,
    Update,
)
from triptych.telemetry.logging import configure_logging
from triptych.wire import Frame, WireError, encode, keep_frame_memory, to_replica_decoder

__all__ = ["EXIT_BAD_FORK", "ForkedWorker", "Worker", "main"]

EXIT_FAILED = 1
EXIT_BAD_FORK = 76

logger = logging.getLogger("triptych.engine.worker")  # not __name__: in a fresh interpreter this is __main__


class ForkedWorker:
    """What the forkserver's child unpickles and runs in place of a `multiprocessing.Process`.

    It is found by its own module's name, so the child never imports the server's `__main__`.
    """

    def _bootstrap(self, parent_sentinel: int) -> int:
        fds = forkserver.get_inherited_fds()
        assert fds is not None
        connection, stderr_fd = fds
        os.dup2(stderr_fd, 2)  # the server reads it: the last words of a replica tell how it ended
        os.close(stderr_fd)
        return main(socket.socket(fileno=connection))


def main(connection: socket.socket) -> int:
    """Serve one incarnation over `connection`; returns the exit code, and returns only when nothing runs."""
    # A signal to the process group is the server's affair: replicas end by `Stop` or by end of file.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # what a hung replica is asked before it is killed
    keep_frame_memory()
    os.dup2(sys.__stderr__.fileno() if sys.__stderr__ else 2, 1)
    sys.stdout = sys.stderr
    channel = _Channel(connection)
    first = channel.receive()
    if first is None:
        return 0
    message, _ = first
    if not isinstance(message, Start):
        raise WireError(f"the first message must be Start, not {type(message).__name__}")
    return Worker(message, channel).run()


class _Channel:
    """The socket to the server: blocking, records sent whole from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._records = self._read()

    def _read(self) -> Iterator[tuple[ToReplica, Sequence[Frame]]]:
        decoder = to_replica_decoder()
        while count := self._connection.recv_into(decoder.get_buffer()):
            yield from decoder.buffer_updated(count)

    def receive(self) -> tuple[ToReplica, Sequence[Frame]] | None:
        """Wait for the next record; None at end of file."""
        try:
            return next(self._records, None)
        except ConnectionError:
            return None

    def send(self, message: FromReplica, frames: Sequence[Frame] = ()) -> None:
        """Send one record; waits while the server reads more slowly than we write, ends the process if it is gone."""
        buffers = encode(message, frames)
        try:
            with self._sending:
                while buffers:
                    _drop_sent(buffers, self._connection.sendmsg(buffers))
        except ConnectionError:
            os._exit(0)


def _drop_sent(buffers: list[Frame], sent: int) -> None:
    whole = 0
    while whole < len(buffers) and sent >= len(buffers[whole]):
        sent -= len(buffers[whole])
        whole += 1
    del buffers[:whole]
    if sent:
        buffers[0] = memoryview(buffers[0])[sent:]


class Worker:
    """One incarnation of a replica."""

    def __init__(self, start: Start, channel: _Channel) -> None:
        self._spec = start.spec
        self._incarnation = start.incarnation
        self._channel = channel
        self._engine: Engine | None = None
        self._ready = threading.Event()

    def run(self) -> int:
        """Load, serve until `Stop`, return the exit code."""
        spec = self._spec
        setproctitle.setproctitle(f"triptych: stage {spec.stage_id} replica {spec.replica_id}")
        configure_logging(spec.log_level, spec.log_format, replica=str(spec.replica_id))
        # 1. CUDA reads its variable when first touched, and threads inherit the cores of the one that starts them.
        pin_devices(spec)
        if in_bad_fork(spec):
            return EXIT_BAD_FORK
        # 2. From here on whatever goes wrong becomes one line for the operator.
        try:
            entry = engine_entry(spec.engine)
            _report_missing_preload(entry)
            # An engine of several devices forks here, which threads would forbid.
            self._engine = engine = import_engine(entry)(spec, self._channel.send)
            # 3. The server may vanish at any time, also while the model loads.
            threading.Thread(target=self._read, name="reader", daemon=True).start()
            threading.Thread(target=self._beat, args=(engine,), name="heartbeat", daemon=True).start()
            model = engine.load()
        except (EngineStartError, ConfigError) as error:
            return self._fail(str(error))
        except Exception as error:
            logger.exception("the engine did not load")
            return self._fail(f"{type(error).__name__}: {error}")
        # 4. Serve.
        self._ready.set()
        self._channel.send(
            Ready(
                incarnation=self._incarnation,
                pids=(os.getpid(), *engine.processes),
                slots=spec.max_num_seqs,
                model=model,
            )
        )
        engine.run()
        return 0

    def _fail(self, message: str) -> int:
        self._channel.send(StartFailed(incarnation=self._incarnation, message=" ".join(message.split())))
        return EXIT_FAILED

    def _read(self) -> None:
        try:
            while record := self._channel.receive():
                self._handle(*record)
        except Exception:
            logger.exception("the replica cannot go on")
            os._exit(EXIT_FAILED)
        os._exit(0)

    def _handle(self, message: ToReplica, frames: Sequence[Frame]) -> None:
        engine = self._engine
        if engine is None or not self._ready.is_set():
            if isinstance(message, Stop):  # nothing can run yet, so there is nothing to wait for
                os._exit(0)
            logger.warning("message before ready dropped", extra={"type": type(message).__name__})
            return
        match message:
            case Generate():
                engine.submit(message, frames)
            case Abort():
                engine.abort(message)
            case Update():
                engine.update(message)
            case Stop():
                engine.stop()
            case Start():
                raise WireError("a second Start")

    def _beat(self, engine: Engine) -> None:
        pause = threading.Event()
        while not pause.wait(HEARTBEAT_INTERVAL_S):
            steps, phase = engine.heartbeat()
            self._channel.send(Heartbeat(incarnation=self._incarnation, steps=steps, phase=phase))


def pin_devices(spec: ReplicaSpec) -> None:
    """Confine this process to the devices of `spec`: CUDA by its variable, CPU slots by affinity."""
    if spec.device_kind == "cuda":
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order in which ids were dealt out
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.visible_devices or spec.devices)
    if spec.cpu_affinity:
        try:
            os.sched_setaffinity(0, spec.cpu_affinity)
        except OSError as error:  # a container may forbid or lack these cores; the threads setting still holds
            logger.warning("cannot pin to cores", extra={"cores": spec.cpu_affinity, "error": error})


def in_bad_fork(spec: ReplicaSpec) -> bool:
    """Whether CUDA was already initialised in the forkserver, so that this child can never use it."""
    torch: Any = sys.modules.get("torch")
    return spec.device_kind == "cuda" and torch is not None and bool(torch.cuda._is_in_bad_fork())


def _report_missing_preload(entry: EngineEntry) -> None:
    # The forkserver swallows an ImportError of its preload; say so here, where the import itself will say why.
    forked = entry.preload[0] in sys.modules
    missing = [module for module in entry.preload if module not in sys.modules]
    if forked and missing:
        logger.warning("not preloaded, so this start takes longer", extra={"modules": ",".join(missing)})


if __name__ == "__main__":  # a fresh interpreter instead of a fork: the socket is an inherited descriptor
    with contextlib.closing(socket.socket(fileno=int(sys.argv[1]))) as _connection:
        os._exit(main(_connection))
