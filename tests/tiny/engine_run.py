"""An engine in this process with all it sent: what the engine tests drive."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from triptych.engine.base import Engine
from triptych.engine.diffusers_engine import DiffusersEngine
from triptych.messages import (
    Aborted,
    Address,
    Failure,
    FromReplica,
    Generate,
    ModelInfo,
    Output,
    OutputSpec,
    Preview,
    Progress,
    ReplicaSpec,
    SamplingParams,
)

PROMPT = "a red circle above a blue square"


def spec_of(model: Path | str, *, slots: int = 1, **engine_args: Any) -> ReplicaSpec:
    return ReplicaSpec(
        replica_id=0,
        stage_id=0,
        engine="diffusers",
        model=str(model),
        device_kind="cpu",
        devices=("0",),
        cpu_threads=1,
        max_num_seqs=slots,
        engine_args=engine_args,
    )


@dataclass
class EngineRun:
    """One loaded engine; `on_message` is called on each message as it is sent, `pictures` holds those of previews."""

    model: Path
    slots: int = 1
    engine_args: dict[str, Any] = field(default_factory=dict)
    on_message: Callable[[FromReplica], None] | None = None
    messages: list[FromReplica] = field(default_factory=list)
    data: dict[Address, bytes] = field(default_factory=dict)
    pictures: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = DiffusersEngine(spec_of(self.model, slots=self.slots, **self.engine_args), self._emit)
        self.info: ModelInfo = self.engine.load()

    def _emit(self, message: FromReplica, frames: Any) -> None:
        self.messages.append(message)
        if isinstance(message, Output):
            self.data[message.address] = bytes(frames[0])
        elif isinstance(message, Preview):
            self.pictures.append(bytes(frames[0]))
        if self.on_message is not None:
            self.on_message(message)

    def unit(self, number: int = 0, **params: Any) -> Generate:
        """A small, quick unit; `output` and `previews` go to the unit, everything else to its parameters."""
        video = self.info.kind == "video"
        of_unit = {name: params.pop(name) for name in ("output", "previews", "priority", "inputs") if name in params}
        side = self.info.size_multiple if video else 2 * self.info.size_multiple
        width, height = self.info.sizes[0] if self.info.sizes else (side, side)
        small = {"prompt": PROMPT, "seed": 5, "width": width, "height": height, "num_inference_steps": 4}
        if video:
            small["num_frames"] = self.info.frame_multiple + 1
        of_unit.setdefault("output", OutputSpec("mp4" if video else "png"))
        return Generate(Address("request", number, 0, 0), SamplingParams(**(small | params)), **of_unit)

    def run(self, *units: Generate, frames: Sequence[bytes] = ()) -> list[FromReplica]:
        """Run the units to their ends, all on the same input frames; the last messages of each, in their order."""
        engine: Engine = self.engine
        self.messages.clear()
        self.data.clear()
        self.pictures.clear()
        for unit in units:
            engine.submit(unit, frames)
        engine.stop()
        engine.run()
        return [self.end_of(unit.address) for unit in units]

    def bytes_of(self, *units: Generate, frames: Sequence[bytes] = ()) -> list[bytes]:
        """Encoded outputs; fails the test if a unit did not make one."""
        for end in self.run(*units, frames=frames):
            assert isinstance(end, Output), end
        return [self.data[unit.address] for unit in units]

    def end_of(self, address: Address) -> FromReplica:
        """The one message that ended a unit."""
        (end,) = (m for m in self.messages if isinstance(m, Output | Failure | Aborted) and m.address == address)
        return end

    def progress(self, address: Address) -> list[Progress]:
        return [message for message in self.messages if isinstance(message, Progress) and message.address == address]


def decoded(data: bytes) -> np.ndarray[Any, Any]:
    """Pixels of an encoded picture."""
    return np.asarray(Image.open(io.BytesIO(data)))
