"""An engine that sleeps by a cost model and answers with a real picture or clip: no torch, no weights.

Units run side by side in `max_num_seqs` slots on one thread that sleeps until the next one is due; with no service
time at all a unit is answered by the thread that brought it. A prompt may ask for a fault: `[[crash]]`, `[[hang]]`,
`[[oom]]`, `[[error]]` (each as soon as the unit runs) or `[[slow:<seconds>]]` (its whole service time).
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import resource
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from PIL import Image

from triptych.engine.base import Emit, EngineStartError
from triptych.engine.preview_plan import preview_steps
from triptych.errors import ErrorCode
from triptych.media.mp4_text import append_text
from triptych.media.png_text import splice_text
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
    Progress,
    ReplicaSpec,
    Update,
)
from triptych.wire import Frame

__all__ = ["SimulatedEngine"]

_DEFAULT_SECONDS_PER_REQUEST = 0.5
_PROGRESS_INTERVAL_S = 0.05
_SIGN_OF_LIFE_S = 0.5  # the heartbeat counts a forward at least this often while a unit runs, however long its steps
_PICTURES_KEPT = 32
_NOISE_LEVELS = 32  # per channel: a 1024x1024 picture then takes about 2 MB, as a real one does
_TEXT_KEYWORD = "triptych"
_FAULT = re.compile(r"\[\[(?:(crash|hang|oom|error)|slow:(\d+(?:\.\d+)?))\]\]")

_MODEL = ModelInfo(
    pipeline="SimulatedPipeline",
    kind="image",
    parameters=(
        "prompt",
        "negative_prompt",
        "width",
        "height",
        "num_inference_steps",
        "guidance_scale",
        "true_cfg_scale",
        "num_frames",
        "fps",
    ),
    size_multiple=1,
)
_VIDEO_MODEL = msgspec.structs.replace(
    _MODEL, kind="video", default_width=128, default_height=128, default_num_frames=16, default_fps=16
)


def _taking_pictures(model: ModelInfo) -> ModelInfo:
    """It accepts pictures and a mask beside the prompt."""
    parameters = (*model.parameters, "strength")
    call = msgspec.structs.replace(model, parameters=parameters, max_images=16, default_strength=0.8)
    return msgspec.structs.replace(model, image=call, mask=call)


_Look = tuple[str, int, int, int | None, int, int]  # format, width, height, compression, frames, frames per second


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long a unit takes: a whole service time, or a time per step. Seconds."""

    seconds_per_request: float | None
    seconds_per_step: float | None

    @classmethod
    def from_engine_args(cls, section: dict[str, Any]) -> CostModel:
        """Read `engine_args.simulated`. Raises `EngineStartError`."""
        request, step = section.get("seconds_per_request"), section.get("seconds_per_step")
        if request is not None and step is not None:
            raise EngineStartError(
                "engine_args.simulated: seconds_per_request and seconds_per_step exclude each other; give one of them"
            )
        return cls(_DEFAULT_SECONDS_PER_REQUEST if request is None and step is None else request, step)

    def service_s(self, steps: int) -> float:
        """Service time of a unit with `steps` denoising steps."""
        if self.seconds_per_step is not None:
            return self.seconds_per_step * steps
        return self.seconds_per_request or 0.0


@dataclass(slots=True)
class _Unit:
    """A unit with its fault and its timetable on the monotonic clock, in seconds."""

    message: Generate
    steps: int
    service_s: float
    fault: str | None
    started_at: float = 0.0
    step: int = 0
    progress_at: float = math.inf
    previews: int = 0  # partial pictures sent

    @property
    def due_at(self) -> float:
        return self.started_at + self.service_s

    def start(self, now: float) -> None:
        self.started_at = now
        self._plan_progress(now)

    def previews_due(self, step: int) -> list[tuple[int, int]]:
        """Index and step of the partial pictures to be sent by now."""
        planned = list(enumerate(preview_steps(self.steps, self.message.previews)))[self.previews :]
        due = [(index, at) for index, at in planned if at <= step]
        self.previews += len(due)
        return due

    def advance(self, now: float) -> Progress:
        self.step = max(self.step, min(int((now - self.started_at) / self.service_s * self.steps), self.steps - 1))
        self._plan_progress(now)
        return Progress(address=self.message.address, step=self.step, steps=self.steps)

    def _plan_progress(self, now: float) -> None:
        """Next step boundary worth a message: in the future, not too soon after the last, and not the end."""
        self.progress_at = math.inf
        if self.service_s > 0:
            step_s = self.service_s / self.steps
            step = max(self.step + 1, math.ceil((now + _PROGRESS_INTERVAL_S - self.started_at) / step_s))
            if step < self.steps:
                self.progress_at = self.started_at + step * step_s


class SimulatedEngine:
    """Satisfies `engine.base.Engine`; what input pictures show is ignored."""

    def __init__(self, spec: ReplicaSpec, emit: Emit) -> None:
        section = spec.engine_args.get("simulated") or {}
        self._emit = emit
        self._slots = spec.max_num_seqs
        self._cost = CostModel.from_engine_args(section)
        self._flat = section.get("image") == "flat"
        self._model = _taking_pictures(_VIDEO_MODEL if section.get("kind") == "video" else _MODEL)
        self._pictures: dict[_Look, bytes] = {}
        self._changed = threading.Condition()
        self._waiting: deque[_Unit] = deque()
        self._running: dict[Address, _Unit] = {}
        self._stopping = False
        self._loaded = False
        self._hung = False
        self._drawing = False
        self._steps = 0

    def load(self) -> ModelInfo:
        """Nothing to load."""
        self._loaded = True
        return self._model

    @property
    def processes(self) -> tuple[int, ...]:
        """None: it sleeps in this one."""
        return ()

    def submit(self, unit: Generate, frames: Sequence[Frame]) -> None:
        """Take one unit; answers at once when it costs nothing."""
        work = self._plan(unit)
        if work.service_s == 0 and work.fault is None and not self._hung:
            self._finish(work)
            return
        with self._changed:
            self._waiting.append(work)
            self._changed.notify()

    def abort(self, message: Abort) -> None:
        """End a unit at once."""
        if self._hung:
            return
        with self._changed:
            known = self._running.pop(message.address, None) is not None
            for work in self._waiting:
                if work.message.address == message.address:
                    self._waiting.remove(work)
                    known = True
                    break
            self._changed.notify()
        if known:
            self._emit(Aborted(address=message.address), ())

    def update(self, message: Update) -> None:
        """Priority means nothing here: running units do not compete."""

    def stop(self) -> None:
        """Let `run` return once idle."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def heartbeat(self) -> tuple[int, str]:
        """Forwards made so far and the phase; a long step is several forwards."""
        if not self._loaded:
            return 0, "load"
        if self._drawing:
            return self._steps, "decode"
        return self._steps, "step" if self._running or self._hung else "idle"

    def run(self) -> None:
        """Sleep from one due time to the next until stopped and idle."""
        while True:
            with self._changed:
                now = time.monotonic()
                progress = self._fill_slots(now)
                finished = sorted((w for w in self._running.values() if w.due_at <= now), key=lambda w: w.due_at)
                moving = [work for work in self._running.values() if work.progress_at <= now < work.due_at]
                if not finished and not moving and not progress:
                    if self._stopping and not self._running:
                        return
                    pause_s = self._pause_s(now)
                    if not self._changed.wait(pause_s) and pause_s == _SIGN_OF_LIFE_S:
                        self._steps += 1
                    continue
                # Whoever takes a unit out of `_running` answers it: this thread, or an abort.
                for work in finished:
                    del self._running[work.message.address]
                for work in moving:
                    before = work.step
                    progress.append(work.advance(now))
                    self._steps += work.step - before
            for message in progress:
                self._emit(message, ())
            for work in moving:
                self._show(work, work.step)
            for work in finished:
                self._end(work)

    def _plan(self, unit: Generate) -> _Unit:
        steps = unit.params.num_inference_steps or self._model.default_num_inference_steps
        service_s, fault = self._cost.service_s(steps), None
        if "[[" in unit.params.prompt and (found := _FAULT.search(unit.params.prompt)):
            fault = found[1]
            service_s = 0.0 if fault else float(found[2])
        return _Unit(message=unit, steps=steps, service_s=service_s, fault=fault)

    def _fill_slots(self, now: float) -> list[Progress]:
        """Start who waits; the sign of a start comes before whatever the unit does to this process."""
        started = []
        while self._waiting and len(self._running) < self._slots:
            work = self._waiting.popleft()
            work.start(now)
            self._running[work.message.address] = work
            started.append(Progress(address=work.message.address, step=0, steps=work.steps))
        return started

    def _pause_s(self, now: float) -> float | None:
        times = [min(work.progress_at, work.due_at) for work in self._running.values()]
        return min(max(0.0, min(times) - now), _SIGN_OF_LIFE_S) if times else None

    def _end(self, work: _Unit) -> None:
        if work.fault is None:
            self._finish(work)
            return
        if work.fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if work.fault == "hang":  # this thread never comes back, and nothing is answered any more
            self._hung = True
            threading.Event().wait()
        code = ErrorCode.OUT_OF_MEMORY if work.fault == "oom" else ErrorCode.ENGINE_ERROR
        self._emit(Failure(work.message.address, code.value, f"simulated fault: {work.fault}"), ())

    def _finish(self, work: _Unit) -> None:
        unit, info = work.message, self._model
        if (unit.output.format == "mp4") != (info.kind == "video"):
            message = f"output format {unit.output.format} does not fit a model that makes one {info.kind}"
            self._emit(Failure(unit.address, ErrorCode.INVALID_VALUE.value, message, "output_format"), ())
            return
        width = unit.params.width or info.default_width
        height = unit.params.height or info.default_height
        num_frames, fps = 1, 0
        if info.kind == "video":
            num_frames, fps = unit.params.num_frames or info.default_num_frames, unit.params.fps or info.default_fps
        self._drawing = True
        try:
            data = self._picture(work, (unit.output.format, width, height, unit.output.compression, num_frames, fps))
            self._show(work, work.steps)
        except (OSError, ValueError) as error:  # Pillow's word for a side that the format cannot hold
            message = f"{width}x{height} cannot be encoded as {unit.output.format}: {error}"
            self._emit(Failure(unit.address, ErrorCode.INVALID_VALUE.value, message, "output_format"), ())
            return
        except (MemoryError, OverflowError):
            message = f"there is too little memory to draw {width}x{height}"
            self._emit(Failure(unit.address, ErrorCode.OUT_OF_MEMORY.value, message, "size"), ())
            return
        finally:
            self._drawing = False
        data = _marked(data, unit)
        self._steps += work.steps - work.step
        self._emit(
            Output(
                address=unit.address,
                mime=f"{info.kind}/{unit.output.format}",
                width=width,
                height=height,
                inference_s=time.monotonic() - work.started_at if work.service_s else 0.0,
                steps=work.steps,
                batch_size_mean=1.0,
                peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                num_frames=num_frames,
                fps=fps,
            ),
            (data,),
        )

    def _show(self, work: _Unit, step: int) -> None:
        """Send the partial pictures due after so many steps: the final one, of a clip a frame as JPEG."""
        unit, info = work.message, self._model
        for index, at in work.previews_due(step):
            wanted = unit.output if info.kind == "image" else OutputSpec("jpeg")
            width, height = unit.params.width or info.default_width, unit.params.height or info.default_height
            try:
                data = self._picture(work, (wanted.format, width, height, wanted.compression, 1, 0))
            except (OSError, ValueError, MemoryError, OverflowError):
                return  # the result fails in the same way, and says so
            preview = Preview(unit.address, index, at, f"image/{wanted.format}", width, height)
            self._emit(preview, (data,))

    def _picture(self, work: _Unit, look: _Look) -> bytes:
        if (data := self._pictures.get(look)) is None:
            if not work.started_at:  # drawing may cost the process, and then it must be known that the unit had begun
                self._emit(Progress(address=work.message.address, step=0, steps=work.steps), ())
            data = self._draw(*look)
            with self._changed:
                if len(self._pictures) >= _PICTURES_KEPT:
                    del self._pictures[next(iter(self._pictures))]
                self._pictures[look] = data
        return data

    def _draw(self, format: str, width: int, height: int, compression: int | None, num_frames: int, fps: int) -> bytes:
        """The picture of this size, or a clip that shows nothing else; the same bytes in every process."""
        encoded = io.BytesIO()
        if self._flat:
            image = Image.new("RGB", (width, height), (66, 133, 180))
        else:
            step = 256 // _NOISE_LEVELS
            levels = bytes(value // step * step for value in range(256))
            noise = random.Random(0).randbytes(width * height * 3)
            image = Image.frombytes("RGB", (width, height), noise.translate(levels))
        if format == "mp4":
            return _still_clip(image, num_frames, fps)
        if format == "png":
            strategy = zlib.Z_DEFAULT_STRATEGY if self._flat else zlib.Z_HUFFMAN_ONLY  # noise has no repetitions
            image.save(encoded, "PNG", compress_level=1, compress_type=strategy)
        elif compression is None:
            image.save(encoded, format.upper())
        else:
            image.save(encoded, format.upper(), quality=compression)
        return encoded.getvalue()


def _still_clip(image: Image.Image, num_frames: int, fps: int) -> bytes:
    # Here, because a simulated fleet of pictures starts faster without the codecs.
    import numpy as np

    from triptych.media.video import encode_mp4

    pixels = np.asarray(image)
    return encode_mp4(np.broadcast_to(pixels, (num_frames, *pixels.shape)), fps=fps)


def _marked(data: bytes, unit: Generate) -> bytes:
    """The output with prompt and seed inside, where its format has a place for them: a swapped answer then shows."""
    if unit.output.format not in ("png", "mp4"):
        return data
    text = json.dumps({"prompt": unit.params.prompt, "seed": unit.params.seed})
    return append_text(data, text) if unit.output.format == "mp4" else splice_text(data, _TEXT_KEYWORD, text)
