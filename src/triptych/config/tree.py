"""The configuration tree of a stage file, frozen after validation.

One model per YAML mapping, field names as in the file. Everything behind the command line reads this tree; nothing
behind it reads YAML. `stage_file` builds it and turns validation errors into messages with key path, found and wanted.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["EngineArgs", "ParallelConfig", "RuntimeConfig", "SimulatedConfig", "StageConfig", "StageFile"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ParallelConfig(_Section):
    """Devices of one replica: `world_size`, or the product of the degrees; given both, they must agree."""

    world_size: int | None = Field(default=None, ge=1)
    ulysses_degree: int = Field(default=1, ge=1)
    ring_degree: int = Field(default=1, ge=1)
    cfg_parallel_size: int = Field(default=1, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)


class SimulatedConfig(_Section):
    """`engine: simulated`: whole service time, or time per step times steps (seconds); what the picture shows."""

    seconds_per_request: float | None = Field(default=None, ge=0)
    seconds_per_step: float | None = Field(default=None, ge=0)
    image: Literal["noise", "flat"] = "noise"


class EngineArgs(_Section):
    """How one replica loads and runs its model."""

    model: str | None = Field(default=None, min_length=1)
    engine: str = Field(default="diffusers", min_length=1)
    parallel_config: ParallelConfig = ParallelConfig()
    max_num_seqs: int = Field(default=1, ge=1)
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    deterministic: bool = False
    warmup: Any = None
    compile: Any = None
    attention_backend: str | None = None
    quantization: Any = None
    cache: Any = None
    offload: Any = None
    vae_tiling: bool = False
    vae_slicing: bool = False
    lora_modules: dict[str, str] = {}
    revision: str | None = None
    simulated: SimulatedConfig = SimulatedConfig()


class RuntimeConfig(_Section):
    """Where and how often the stage runs. `devices` are logical ids in list order."""

    devices: tuple[str, ...] | None = None
    num_replicas: int = Field(default=1, ge=1)
    cpu_threads: int | None = Field(default=None, ge=1)
    executor: Literal["process", "ray"] = "process"
    routing: str = "round_robin"
    max_queue_size: int = Field(default=1024, ge=1)
    max_parallel_loads: int = Field(default=4, ge=1)


class StageConfig(_Section):
    """One stage: today the only one, of type diffusion."""

    stage_id: int = Field(ge=0)
    stage_type: Literal["diffusion"]
    runtime: RuntimeConfig = RuntimeConfig()
    engine_args: EngineArgs = EngineArgs()
    default_sampling_params: dict[str, Any] = {}


class StageFile(_Section):
    """The whole file."""

    stages: tuple[StageConfig, ...]
