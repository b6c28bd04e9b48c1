"""Everything that crosses a process, one msgspec struct each.

A route builds one immutable `GenerationRequest`; the orchestrator cuts it into units and sends each as `Generate`
to a replica; `Progress`, `Preview` and exactly one of `Output`, `Failure`, `Aborted` come back. Large payloads
(input pictures, encoded outputs) travel beside the struct as raw frames (see `wire`), never inside it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = [
    "HEARTBEAT_INTERVAL_S",
    "Abort",
    "Aborted",
    "Address",
    "Failure",
    "FromReplica",
    "Generate",
    "GenerationRequest",
    "Heartbeat",
    "Lora",
    "MediaInput",
    "ModelInfo",
    "Output",
    "OutputSpec",
    "Preview",
    "Progress",
    "Ready",
    "ReplicaSpec",
    "SamplingParams",
    "Start",
    "StartFailed",
    "Stop",
    "ToReplica",
    "Update",
    "WarmUp",
]

Scalar = int | float | str | bool

HEARTBEAT_INTERVAL_S = 1.0


class Lora(msgspec.Struct, frozen=True):
    """A LoRA by registered name; scale 0 is the base model."""

    name: str
    scale: float = 1.0


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What one picture or clip should be. None means the pipeline's own default. Sizes in pixels."""

    prompt: str
    seed: int
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    strength: float | None = None
    num_frames: int | None = None
    fps: int | None = None
    lora: Lora | None = None
    extra_args: dict[str, Scalar] = {}


class OutputSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the result is encoded. `compression` is 0..100 (quality for jpeg and webp); None: the codec's default."""

    format: Literal["png", "jpeg", "webp", "mp4"] = "png"
    compression: int | None = None


class MediaInput(msgspec.Struct, frozen=True):
    """One decoded input picture; `height x width x len(mode)` bytes, row-major, in raw frame `frame`."""

    kind: Literal["image", "mask"]
    mode: Literal["RGB", "L"]
    width: int
    height: int
    frame: int


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One validated request, every default resolved. Output i of n is a unit with seed `params.seed + i`."""

    id: str
    model: str
    params: SamplingParams
    timeout_s: float
    n: int = 1
    output: OutputSpec = OutputSpec()
    inputs: tuple[MediaInput, ...] = ()
    frames: tuple[bytes, ...] = ()
    previews: int = 0
    priority: int = 0
    client_request_id: str | None = None
    session: str | None = None
    user: str | None = None
    owner: str | None = None


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Which try of which unit a message speaks of; results with a stale attempt or incarnation are dropped."""

    request_id: str
    unit: int
    attempt: int
    incarnation: int


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that one engine process needs to know. `engine_args` is the validated stage-file section as plain data.

    `devices` are the logical ids of the stage file, as users see them; `visible_devices` is what the platform's
    visible-devices variable must hold in the engine process (empty unless `device_kind` is `cuda`).
    """

    replica_id: int
    stage_id: int
    engine: str
    model: str
    device_kind: Literal["cpu", "cuda", "none"]
    devices: tuple[str, ...]
    visible_devices: tuple[str, ...] = ()
    cpu_threads: int
    cpu_affinity: tuple[int, ...] = ()
    max_num_seqs: int = 1
    engine_args: dict[str, Any] = {}
    log_level: str = "info"
    log_format: str = "text"


class WarmUp(msgspec.Struct, frozen=True):
    """What the small picture took that a replica made before it was ready. Times in seconds.

    `work` is its pixels times frames, `seconds` all of it with what only happens once, `step_s` its last denoising
    step, `decode_s` what came after that.
    """

    work: float
    seconds: float
    step_s: float
    decode_s: float


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the loaded pipeline is and takes; request validation reads it.

    `parameters` are the names of common parameters (and `extra_args` names) that the pipeline's call accepts.
    Sizes must be multiples of `size_multiple` pixels, frame counts `k * frame_multiple + 1`. `sizes`, when given,
    lists the only (width, height) pairs that the model draws well, and `frame_counts` the only numbers of frames.
    `loras` are the names that requests may ask for. Fewer steps than `min_num_inference_steps` end in an error.
    `warm_up` is None where none was measured.

    All of that is said of calls with a prompt alone, which the model refuses if `needs_image`. With input pictures it
    is what `image` says, with a mask beside them what `mask` says; None: it takes none. There `max_images` counts the
    pictures of one call, and `default_strength` is that of models that begin with the picture instead of noise.
    """

    pipeline: str
    kind: Literal["image", "video"]
    parameters: tuple[str, ...]
    extra_parameters: tuple[str, ...] = ()
    size_multiple: int = 8
    default_width: int = 1024
    default_height: int = 1024
    default_num_inference_steps: int = 50
    min_num_inference_steps: int = 1
    frame_multiple: int = 1
    default_num_frames: int = 1
    default_fps: int = 16
    sizes: tuple[tuple[int, int], ...] = ()
    frame_counts: tuple[int, ...] = ()
    warm_up: WarmUp | None = None
    loras: tuple[str, ...] = ()
    needs_image: bool = False
    max_images: int = 1
    default_strength: float | None = None
    image: ModelInfo | None = None
    mask: ModelInfo | None = None


# ---- server to replica


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First message on a new socket: load this, as this incarnation."""

    spec: ReplicaSpec
    incarnation: int


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Run one unit; frames are the input pictures. `alone` asks for forwards shared with no other unit."""

    address: Address
    params: SamplingParams
    output: OutputSpec = OutputSpec()
    inputs: tuple[MediaInput, ...] = ()
    previews: int = 0
    priority: int = 0
    alone: bool = False


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop this unit at its next forward; answered by `Aborted`, or by the `Output` that overtook it."""

    address: Address


class Update(msgspec.Struct, frozen=True, tag="update"):
    """New priority for a running unit."""

    address: Address
    priority: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Nothing more will be asked: leave with exit code 0."""


# ---- replica to server


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Loaded and warmed up. `pids` lists every process of the replica, leader first."""

    incarnation: int
    pids: tuple[int, ...]
    slots: int
    model: ModelInfo


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The replica cannot serve; one readable line. The process exits after sending it."""

    incarnation: int
    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent every `HEARTBEAT_INTERVAL_S`; `steps` counts forwards since the start, `phase` names what runs now."""

    incarnation: int
    steps: int
    phase: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """`step` of `steps` denoising steps done (0 before the first); `phase` is encode, step or decode."""

    address: Address
    step: int
    steps: int
    phase: Literal["encode", "step", "decode"] = "step"


class Preview(msgspec.Struct, frozen=True, tag="preview"):
    """Partial picture number `index` (from 0) after step `step`; its encoded bytes are frame 0. Sizes in pixels."""

    address: Address
    index: int
    step: int
    mime: str
    width: int
    height: int


class Output(msgspec.Struct, frozen=True, tag="output"):
    """The result; its encoded bytes are frame 0. Times in seconds, memory in MB (device peak; on CPU the process's)."""

    address: Address
    mime: str
    width: int
    height: int
    inference_s: float
    steps: int
    batch_size_mean: float
    peak_memory_mb: float
    num_frames: int = 1
    fps: int = 0
    encode_s: float = 0.0


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The unit failed for good on this replica; `code` is an `errors.ErrorCode` value."""

    address: Address
    code: str
    message: str
    param: str | None = None


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """The unit was stopped as asked; its slot is free."""

    address: Address


ToReplica = Start | Generate | Abort | Update | Stop
FromReplica = Ready | StartFailed | Heartbeat | Progress | Preview | Output | Failure | Aborted
