"""One request on an engine in this process: load, run its units on the main thread, collect their outputs.

A Ctrl-C while units run aborts them within a step; a second one ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from triptych.config.model_source import fetch_model
from triptych.config.parameters import CommonParameters, build_request
from triptych.config.plan import ServePlan
from triptych.engine.base import Engine
from triptych.engine.registry import engine_entry, import_engine
from triptych.engine.worker import pin_devices
from triptych.errors import ErrorCode, TriptychError
from triptych.messages import Abort, Address, Failure, FromReplica, Generate, GenerationRequest, MediaInput, Output
from triptych.messages import Progress as ProgressMessage
from triptych.telemetry.logging import configure_logging
from triptych.wire import Frame

__all__ = ["Generation", "Picture"]


@dataclass(frozen=True, slots=True)
class Picture:
    """The output of one unit and its encoded bytes."""

    unit: int
    output: Output
    data: Frame


class Generation:
    """Holds the engine of the plan's first replica."""

    def __init__(self, plan: ServePlan) -> None:
        self._plan = plan
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bars: dict[int, TaskID] = {}
        self._addresses: list[Address] = []
        self._pictures: dict[int, Picture] = {}
        self._failure: Failure | None = None
        self._interrupted = False
        self._engine: Engine

    def load(
        self, parameters: CommonParameters, inputs: tuple[MediaInput, ...], frames: tuple[bytes, ...]
    ) -> GenerationRequest:
        """Load the model and check parameters and pictures against it. Raises what the engine and the checks raise."""
        plan = self._plan
        configure_logging("warning", "text")
        for warning in plan.warnings:
            self._console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
        model = fetch_model(plan.model_source, plan.settings.revision)
        spec = msgspec.structs.replace(plan.replicas[0], model=model, log_level="warning")
        pin_devices(spec)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in replicas, before torch is imported
        with self._console.status(f"loading {plan.model}"):
            self._engine = import_engine(engine_entry(spec.engine))(spec, self._emit)
            info = self._engine.load()
        limits = plan.settings.limits()
        return build_request(
            parameters,
            model=plan.model,
            info=info,
            defaults=plan.defaults,
            limits=limits,
            inputs=inputs,
            frames=frames,
        )

    def run(self, request: GenerationRequest) -> Iterator[Picture]:
        """Run every unit; yields the pictures in order. Raises `TriptychError` or KeyboardInterrupt."""
        self._addresses = [Address(request.id, unit, 0, 0) for unit in range(request.n)]
        with self._bar, self._interruptible():
            for address in self._addresses:
                seed = request.params.seed + address.unit
                self._bars[address.unit] = self._bar.add_task(f"seed {seed}", total=None)
                params = msgspec.structs.replace(request.params, seed=seed)
                unit = Generate(address, params, output=request.output, inputs=request.inputs)
                self._engine.submit(unit, request.frames)
            self._engine.stop()
            self._engine.run()
        if self._failure is not None:
            raise TriptychError(ErrorCode(self._failure.code), self._failure.message, param=self._failure.param)
        if self._interrupted:
            raise KeyboardInterrupt
        yield from (self._pictures[unit] for unit in sorted(self._pictures))

    def _emit(self, message: FromReplica, frames: Sequence[Frame]) -> None:
        if isinstance(message, ProgressMessage):
            self._bar.update(self._bars[message.address.unit], completed=message.step, total=message.steps)
        elif isinstance(message, Output):
            unit = message.address.unit
            self._pictures[unit] = Picture(unit, message, frames[0])
            self._bar.update(self._bars[unit], completed=message.steps, total=message.steps)
        elif isinstance(message, Failure) and self._failure is None:
            self._failure = message
            self._abort_soon()

    def _abort_all(self) -> None:
        for address in self._addresses:
            self._engine.abort(Abort(address))

    def _abort_soon(self) -> None:
        """On a thread of its own: a signal handler or a callback may interrupt code that holds the engine's lock."""
        threading.Thread(target=self._abort_all, name="abort").start()

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        def on_interrupt(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._abort_soon()

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous: Any = signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
