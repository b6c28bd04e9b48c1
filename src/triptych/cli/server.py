"""The server process from the bound socket to the exit code.

Start-up and shutdown are each one numbered sequence in one function. The server owns its signals: uvicorn installs
none, replicas ignore them, so a Ctrl-C that reaches the whole process group is still an orderly drain.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.api.app import create_app
from triptych.api.protocol import HttpProtocol
from triptych.api.results import Results
from triptych.config.model_source import fetch_model
from triptych.config.plan import ServePlan
from triptych.engine.registry import engine_entry
from triptych.errors import ConfigError, ErrorCode
from triptych.jobs.folder import data_folder
from triptych.jobs.store import JobStore
from triptych.jobs.video_jobs import VideoJobs
from triptych.orchestrator.orchestrator import Orchestrator
from triptych.replicas.process import ProcessExecutor
from triptych.replicas.supervisor import Supervisor
from triptych.replicas.watchdog import PACED_LIMITS, WatchdogLimits

__all__ = ["run_server"]

_log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75  # longer than the idle time of common client pools, so that they close first
_ANSWER_FLUSH_S = 5.0  # time for the last answers to leave after the last unit ended
_LAST_WRITES_S = 10.0  # time for clips that are being written
_REPLICA_STOP_S = 5.0  # time for idle replicas to leave by themselves
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_server(plan: ServePlan, listener: socket.socket) -> int:
    """Serve at `listener` until told to stop; the exit code is 0 after a drain, 1 when the server cannot go on.

    Raises `ConfigError` for a data folder that cannot be used.
    """
    settings = plan.settings
    port = listener.getsockname()[1]
    with (
        data_folder(settings.data_dir, port=port, where=settings.named("data_dir")) as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_Server(plan, listener, folder).run())


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers; stop it with `should_exit`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _ClosingApp:
    """Asks every client to close its connection after the answer, once `closing` is set.

    A client that keeps its connection would send its next request into the socket that the end of the drain closes,
    and see a reset; one with a new connection is refused, which says that nothing was done.
    """

    def __init__(self, app: ASGIApp, closing: asyncio.Event) -> None:
        self._app = app
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and self._closing.is_set():
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_and_close)


class _Server:
    """One serving process; `run` is its whole life."""

    def __init__(self, plan: ServePlan, listener: socket.socket, folder: Path) -> None:
        self._plan = plan
        self._listener = listener
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._exit_code = 0
        settings = plan.settings
        self._orchestrator = Orchestrator(
            routing=plan.stage.runtime.routing,
            max_queue_size=plan.stage.runtime.max_queue_size,
        )
        engine = plan.stage.engine_args.engine
        self._supervisor = Supervisor(
            plan.replicas,
            ProcessExecutor(engine),
            listener=self._orchestrator,
            max_parallel_loads=plan.stage.runtime.max_parallel_loads,
            limits=PACED_LIMITS if engine_entry(engine).paced else WatchdogLimits(),
        )
        self._orchestrator.attach(self._supervisor)
        self._jobs = VideoJobs(
            JobStore(folder),
            self._orchestrator,
            model=plan.model,
            keep_s=settings.job_ttl,
            max_bytes=settings.max_job_storage,
        )
        self._results = Results(folder / "results")
        app = create_app(
            self._orchestrator,
            self._jobs,
            self._results,
            settings,
            served_model_names=plan.served_model_names,
            defaults=plan.stage.default_sampling_params,
        )
        self._http = _HttpServer(
            uvicorn.Config(
                _ClosingApp(app, self._stop),
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
            )
        )

    def _fail(self, reason: str) -> None:
        _log.error("the server cannot go on: %s", reason)
        self._exit_code = 1
        self._stop.set()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            _log.warning("%s again: stopping now", number.name)
            self._stop_now.set()
        else:
            limit_s = self._plan.settings.shutdown_timeout
            _log.info("%s: running requests have %g s to end; a second signal stops at once", number.name, limit_s)
            self._stop.set()

    async def run(self) -> int:
        """Start in an order in which nothing is taken that could not be answered; stop in the reverse one."""
        try:
            async with asyncio.TaskGroup() as tasks:
                # 1. Signals first: one that arrives during the start is already an orderly stop.
                for number in _STOP_SIGNALS:
                    asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
                # 2. The port answers from here on: health routes tell of the start, work is 503 not_ready.
                http = tasks.create_task(self._http.serve(sockets=[self._listener]), name="http")
                deadlines = tasks.create_task(self._orchestrator.run(), name="deadlines")
                jobs = tasks.create_task(self._jobs.run(), name="jobs")
                results = tasks.create_task(self._results.expire(), name="results")
                # 3. Weights once, then the replicas, each ready on its own.
                replicas = tasks.create_task(self._keep_replicas(), name="replicas")
                await self._stop.wait()
                replicas.cancel()
                await self._drain()
                # The port answers until here; then the last answers leave.
                await self._close_http(http)
                # Every request has ended, so clips that are being written are all that jobs have left to do.
                self._jobs.close()
                if not await self._finished(jobs, _LAST_WRITES_S):
                    _log.warning("the disk does not take the last clips: the next server makes them again")
                    jobs.cancel()
                results.cancel()
                deadlines.cancel()
        finally:
            # Replicas go last: nobody can ask for them any more.
            await self._stop_replicas()
            # What is left is the end of the interpreter; a signal must not turn a clean stop into another exit code.
            for number in _STOP_SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)
        return self._exit_code

    async def _keep_replicas(self) -> None:
        settings = self._plan.settings
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        scheme = "http" if settings.ssl_certfile is None else "https"
        url = f"{scheme}://{host}:{self._listener.getsockname()[1]}"
        _log.info("starting %d x %s; %s answers already", len(self._plan.replicas), self._plan.model, url)
        try:
            await _in_daemon_thread(lambda: fetch_model(self._plan.model_source, settings.revision))
        except ConfigError as error:
            self._fail(str(error))
            return
        await self._supervisor.start()
        failed = asyncio.create_task(self._orchestrator.failed(), name="failed")
        serving = asyncio.create_task(self._orchestrator.serving(), name="serving")
        try:
            await asyncio.wait({failed, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                _log.info("ready: %s takes requests for %s (%s)", url, self._plan.model, serving.result().pipeline)
            self._fail(await failed)
        finally:
            failed.cancel()
            serving.cancel()

    async def _drain(self) -> None:
        # 1. Readiness is withdrawn; new work and queued units are told `draining`.
        self._orchestrator.begin_drain()
        # 2. Running units finish, within the limit or until a second signal.
        drained = asyncio.create_task(self._orchestrator.drained(), name="drained")
        if not await self._finished(drained, self._plan.settings.shutdown_timeout):
            _log.warning("work still runs: it is ended now")
            drained.cancel()
        # 3. What still runs gets its answer, too.
        self._orchestrator.abort_all(ErrorCode.DRAINING)

    async def _close_http(self, http: asyncio.Task[None]) -> None:
        self._http.should_exit = True
        if not await self._finished(http, _ANSWER_FLUSH_S):
            _log.warning("clients that do not take their answers are cut off")
            self._http.force_exit = True
            for connection in list(self._http.server_state.connections):
                connection.transport.abort()
        await http

    async def _stop_replicas(self) -> None:
        stop = asyncio.create_task(self._supervisor.stop(timeout_s=_REPLICA_STOP_S), name="stop replicas")
        if not await self._finished(stop, _REPLICA_STOP_S):
            await self._supervisor.stop(timeout_s=0)  # cuts the other one short
        await stop

    async def _finished(self, task: asyncio.Task[None], limit_s: float) -> bool:
        """Wait for the task, at most `limit_s` and never past a second signal; True when it is done."""
        now = asyncio.create_task(self._stop_now.wait(), name="stop now")
        await asyncio.wait({task, now}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        return task.done()


async def _in_daemon_thread(work: Callable[[], object]) -> None:
    """Run blocking work of minutes on a thread that does not keep the process alive when it is called off."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: Exception | None = None
        try:
            work()
        except Exception as raised:  # noqa: BLE001 - raised again where it is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="fetch model", daemon=True).start()
    await done
