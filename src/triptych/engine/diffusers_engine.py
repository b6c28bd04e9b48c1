"""Serves a diffusers pipeline: units in, encoded pictures and clips out.

`run` owns the device: between any two forwards it looks at the commands that other threads queued (submit, abort,
update, stop), starts units while slots are free, and lets the hub make one step. Pixels of an ended unit go to a small
pool of encoder threads; while that is full no new unit starts, so memory stays bounded.
"""

from __future__ import annotations

import functools
import logging
import queue
import resource
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from triptych.config.tree import EngineArgs
from triptych.engine.base import Emit, EngineStartError
from triptych.engine.denoised import SchedulerStep
from triptych.engine.failures import failure_of, is_out_of_memory, one_line
from triptych.engine.hub import Hub, Task, UnitAborted
from triptych.engine.loading import device_of, load_pipeline, locate_model
from triptych.engine.lora import Loras
from triptych.engine.model_settings import read_settings
from triptych.engine.parallel import Leader, fork_followers
from triptych.engine.pipeline_modes import Mode, PipelineModes
from triptych.engine.pipeline_view import OnStep
from triptych.engine.pixels import to_pixels
from triptych.engine.previews import PreviewMaker
from triptych.engine.progress import ProgressReporter
from triptych.engine.switches import denoisers, enable_cache
from triptych.engine.warm_up import warm_up
from triptych.errors import ErrorCode, TriptychError
from triptych.media.codecs import CODECS
from triptych.messages import (
    Abort,
    Aborted,
    Address,
    Failure,
    Generate,
    ModelInfo,
    Output,
    OutputSpec,
    Preview,
    ReplicaSpec,
    SamplingParams,
    Update,
)
from triptych.wire import Frame

__all__ = ["DiffusersEngine"]

_log = logging.getLogger(__name__)

_ENCODERS = 2
_CLIP_PREVIEW = OutputSpec("jpeg", 90)  # of its first frame
_MB = 1024 * 1024


@dataclass(slots=True)
class _Submitted:
    unit: Generate
    frames: Sequence[Frame]


@dataclass(slots=True)
class _Running:
    """A unit on the device."""

    unit: Generate
    task: Task
    progress: ProgressReporter
    started_s: float
    preview: Future[None] | None = None  # the newest one, on its way out


class _Stop:
    pass


class _Wake:
    pass


class DiffusersEngine:
    """One pipeline with `max_num_seqs` slots; see `engine.base.Engine` for the threads that may call what."""

    def __init__(self, spec: ReplicaSpec, emit: Emit) -> None:
        self._spec = spec
        self._emit = emit
        self._commands: queue.SimpleQueue[_Submitted | Abort | Update | _Stop | _Wake] = queue.SimpleQueue()
        self._waiting: deque[_Submitted] = deque()
        self._running: dict[Address, _Running] = {}
        self._encoding = 0
        self._stopping = False
        self._loading = False
        self._args = args = EngineArgs.model_validate(spec.engine_args, strict=False)
        # Before anything starts a thread. What is to be split over ranks is merged first, with one slot, too.
        self._followers = fork_followers(spec, args)
        self._leader: Leader | None = None
        self._hub = Hub(
            merging=(spec.max_num_seqs > 1 or bool(self._followers)) and not args.deterministic,
            max_pixels=args.max_num_batched_pixels,
        )
        self._encoders = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="encode")
        self._pipe: Any = None
        self._modes: PipelineModes
        self._latest_view: Callable[[], Any] = lambda: None
        self._loras: Loras
        self._cleans_up = False
        self._one_step_will_do = False

    # ---- called from any thread

    @property
    def processes(self) -> tuple[int, ...]:
        """Pids of the followers, in the order of their ranks."""
        return tuple(follower.pid for follower in self._followers)

    def submit(self, unit: Generate, frames: Sequence[Frame]) -> None:
        """Take one unit; it waits for a free slot."""
        self._commands.put(_Submitted(unit, frames))

    def abort(self, message: Abort) -> None:
        """End a unit at its next forward."""
        self._commands.put(message)

    def update(self, message: Update) -> None:
        """Change the priority of a unit: lower runs first."""
        self._commands.put(message)

    def stop(self) -> None:
        """Ask `run` to return once idle."""
        self._commands.put(_Stop())

    def heartbeat(self) -> tuple[int, str]:
        """Forwards done and the phase that runs now."""
        return self._hub.forwards, "load" if self._loading else self._hub.phase or "idle"

    # ---- called on the device-owning thread

    def load(self) -> ModelInfo:
        """Load, attach the hub, make a small picture. Raises `EngineStartError`."""
        self._loading = True
        folder = locate_model(self._spec)
        settings = read_settings(folder)
        args = self._args
        if self._followers:
            self._leader = Leader(self._followers, args.parallel_config, device_of(self._spec))
            self._leader.begin()
        self._pipe, self._loras = load_pipeline(self._spec, args, folder)
        try:
            self._modes = PipelineModes(self._pipe, settings)
        except (TypeError, NameError, AttributeError, KeyError) as error:
            name = type(self._pipe).__name__
            raise EngineStartError(f"model {self._spec.model!r}: {name} cannot be served: {one_line(error)}") from error
        if args.cache is not None:
            enable_cache(self._pipe, args.cache, timestep=lambda: self._latest_view().current_timestep)
        if self._leader is not None:
            self._leader.spread(denoisers(self._pipe), lora=lambda: self._loras.active)
        self._hub.attach(self._pipe)
        self._hub.before_group = self._loras.activate
        info = warm_up(
            self._hub,
            functools.partial(self._view, self._modes.loaded),
            self._modes,
            wanted=args.warmup,
            spec=self._spec,
        )
        drawn_in_one = info.warm_up is not None and info.min_num_inference_steps == 1
        self._one_step_will_do = drawn_in_one or info.default_num_inference_steps == 1
        # What a unit that was stopped half-way has left would be taken for the next one's.
        self._cleans_up = args.cache is not None or (args.offload is not None and args.offload.name == "model")
        self._loading = False
        return msgspec.structs.replace(info, loras=self._loras.names)

    def _view(self, mode: Mode, on_step: OnStep) -> Any:
        view = mode.views.view(on_step)
        self._latest_view = weakref.ref(view)
        return view

    def close(self) -> None:
        """Detach the hub from the models, which live on (for tests and embedding)."""
        self._hub.detach()
        self._encoders.shutdown()
        if self._leader is not None:
            self._leader.close()
            self._followers.close()

    def run(self) -> None:
        """Serve until `stop`."""
        while True:
            self._take_commands()
            self._start_units()
            if self._running:
                for task in self._hub.step():
                    self._settle(task)
            elif self._stopping and not self._waiting and not self._encoding:
                break
            else:
                self._obey(self._commands.get())
        self._stopping = False

    def _take_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            self._obey(command)

    def _obey(self, command: _Submitted | Abort | Update | _Stop | _Wake) -> None:
        if isinstance(command, _Submitted):
            self._waiting.append(command)
        elif isinstance(command, Abort):
            self._abort(command.address)
        elif isinstance(command, Update):
            self._update(command)
        elif isinstance(command, _Stop):
            self._stopping = True
        else:
            self._encoding -= 1

    def _abort(self, address: Address) -> None:
        if (running := self._running.get(address)) is not None:
            running.task.abort_requested = True
        for waiting in [waiting for waiting in self._waiting if waiting.unit.address == address]:
            self._waiting.remove(waiting)
            self._emit(Aborted(address), ())

    def _update(self, message: Update) -> None:
        if (running := self._running.get(message.address)) is not None:
            running.task.priority = message.priority
        for waiting in self._waiting:
            if waiting.unit.address == message.address:
                waiting.unit = msgspec.structs.replace(waiting.unit, priority=message.priority)

    def _start_units(self) -> None:
        while self._waiting and len(self._running) < self._spec.max_num_seqs and self._encoding < _ENCODERS:
            submitted = self._waiting.popleft()
            unit = submitted.unit
            try:
                if (ended := self._start(unit, submitted.frames)) is not None:
                    self._settle(ended)
            except Exception as error:  # noqa: BLE001 - what cannot be started fails alone
                self._emit(failure_of(error, unit.address, self._pipe), ())

    def _start(self, unit: Generate, frames: Sequence[Frame]) -> Task | None:
        mode = self._modes.of(unit.inputs)
        if CODECS[unit.output.format].kind != mode.interface.info.kind:
            kind = mode.interface.info.kind
            message = f"output format {unit.output.format} does not fit a model that makes one {kind}"
            raise TriptychError(ErrorCode.INVALID_VALUE, message, param="output_format")
        group = self._loras.state(unit.params.lora)
        arguments = mode.interface.arguments(unit, frames)
        if self._cleans_up:
            self._pipe.maybe_free_model_hooks()
        steps = arguments.get("num_inference_steps") or mode.interface.info.default_num_inference_steps
        progress = ProgressReporter(unit.address, self._emit, steps=steps)
        view = progress.pipe = self._view(mode, self._step_listener(unit, progress))
        task = Task(
            functools.partial(view, **arguments),
            priority=unit.priority,
            alone=unit.alone,
            pixels=mode.interface.pixels(unit.params),
            group=group,
            on_phase=progress.on_phase,
        )
        if self._spec.device_kind == "cuda" and not self._running:
            torch.cuda.reset_peak_memory_stats()
        self._running[unit.address] = _Running(unit, task, progress, time.monotonic())
        return self._hub.start(task)

    def _step_listener(self, unit: Generate, progress: ProgressReporter) -> Callable[[SchedulerStep], None]:
        """What hears of each step of the unit's scheduler."""
        if not unit.previews:
            return progress.on_step
        params, info = unit.params, self._modes.info
        size = info.default_width, info.default_height
        if unit.inputs:
            size = unit.inputs[0].width, unit.inputs[0].height  # what is drawn from a picture has its size
        size = params.width or size[0], params.height or size[1]
        send = functools.partial(self._send_preview, unit)
        previews = PreviewMaker(
            unit.previews, progress, send, size=size, num_frames=params.num_frames or info.default_num_frames
        )

        def on_step(made: SchedulerStep) -> None:
            progress.on_step(made)
            previews.on_step(made)

        return on_step

    def _send_preview(self, unit: Generate, pixels: npt.NDArray[np.uint8], index: int, step: int) -> None:
        """Partial pictures are encoded like the result, those of a clip as JPEG."""
        wanted = unit.output if CODECS[unit.output.format].kind == "image" else _CLIP_PREVIEW
        height, width = pixels.shape[:2]
        preview = Preview(unit.address, index, step, CODECS[wanted.format].mime, width, height)
        running = self._running[unit.address]
        self._encoding += 1
        running.preview = self._encoders.submit(self._encode_preview, preview, wanted, pixels, running.preview)

    def _settle(self, task: Task) -> None:
        """Send the unit of an ended task to the encoders, or tell how it failed."""
        running = next(running for running in self._running.values() if running.task is task)
        del self._running[running.unit.address]
        address = running.unit.address
        try:
            if task.error is not None:
                raise task.error
            pixels = to_pixels(task.result)
            self._check_size(running.unit.params, pixels)
        except UnitAborted:
            self._emit(Aborted(address), ())
            return
        except Exception as error:  # noqa: BLE001 - whatever a pipeline raises ends its own unit only
            unsure = bool(running.unit.inputs) or not self._one_step_will_do
            in_one_step = unsure and running.progress.steps == 1
            self._emit(failure_of(error, address, running.progress.pipe, in_one_step=in_one_step), ())
            if is_out_of_memory(error) and self._spec.device_kind == "cuda":
                torch.cuda.empty_cache()
            return
        finally:
            task.result = task.error = running.progress.pipe = None
        output = self._output(running, pixels)
        self._encoding += 1
        self._encoders.submit(self._encode, output, running.unit.output, pixels, running.preview)

    def _check_size(self, asked: SamplingParams, pixels: npt.NDArray[np.uint8]) -> None:
        height, width = pixels.shape[-3:-1]
        if (asked.width or width, asked.height or height) != (width, height):
            message = f"the model made {width}x{height} instead of {asked.width}x{asked.height}"
            raise TriptychError(ErrorCode.ENGINE_ERROR, message)

    def _output(self, running: _Running, pixels: npt.NDArray[np.uint8]) -> Output:
        video = pixels.ndim == 4
        return Output(
            running.unit.address,
            mime=CODECS[running.unit.output.format].mime,
            width=pixels.shape[-2],
            height=pixels.shape[-3],
            inference_s=time.monotonic() - running.started_s,
            steps=running.progress.step,
            batch_size_mean=running.task.batch_size_mean,
            peak_memory_mb=self._peak_memory_mb(),
            num_frames=len(pixels) if video else 1,
            fps=self._modes.loaded.interface.fps(running.unit.params) if video else 0,
        )

    def _peak_memory_mb(self) -> float:
        if self._spec.device_kind == "cuda":
            return torch.cuda.max_memory_allocated() / _MB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def _encode(
        self, output: Output, wanted: OutputSpec, pixels: npt.NDArray[np.uint8], after: Future[None] | None
    ) -> None:
        """Encode and send, `after` the last preview is out; runs on an encoder thread."""
        began_s = time.monotonic()
        try:
            data = CODECS[wanted.format].encode(pixels, output.fps, wanted.compression)
        except Exception as error:  # noqa: BLE001 - a codec's failure is its unit's failure
            _log.error("cannot encode as %s", wanted.format, exc_info=error)
            message = f"the result cannot be encoded as {wanted.format}: {one_line(error)}"
            self._emit(Failure(output.address, ErrorCode.ENGINE_ERROR, message), ())
        else:
            output = msgspec.structs.replace(output, encode_s=time.monotonic() - began_s)
            wait([after] if after else ())
            self._emit(output, (data,))
        finally:
            self._commands.put(_Wake())

    def _encode_preview(
        self, preview: Preview, wanted: OutputSpec, pixels: npt.NDArray[np.uint8], after: Future[None] | None
    ) -> None:
        """Like `_encode`; what fails here will fail with the result, too, and is told then."""
        try:
            data = CODECS[wanted.format].encode(pixels, 0, wanted.compression)
        except Exception as error:  # noqa: BLE001
            _log.warning("cannot encode a preview as %s", wanted.format, exc_info=error)
        else:
            wait([after] if after else ())
            self._emit(preview, (data,))
        finally:
            self._commands.put(_Wake())
