"""The configuration tree of a stage file, frozen after validation.

One model per YAML mapping, field names as in the file. Everything behind the command line reads this tree; nothing
behind it reads YAML. `stage_file` builds it and turns validation errors into messages with key path, found and wanted.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from triptych.config.fields import DeviceIds, Section, problem
from triptych.config.switches import AttentionBackend, Cache, Compile, Offload, Quantization, WarmUp

__all__ = ["EngineArgs", "ParallelConfig", "RuntimeConfig", "SimulatedConfig", "StageConfig", "StageFile"]


_MAX_COUNT = 1024
_Count = Annotated[int, Field(ge=1, le=_MAX_COUNT)]


class ParallelConfig(Section):
    """Devices of one replica: `world_size`, or the product of the degrees; given both, they must agree."""

    world_size: _Count | None = None
    ulysses_degree: _Count = 1
    ring_degree: _Count = 1
    cfg_parallel_size: _Count = 1
    tensor_parallel_size: _Count = 1

    @property
    def devices_per_replica(self) -> int:
        """`world_size`, or the product of the degrees where it is left out."""
        return self.world_size or prod(self._degrees().values())

    def _degrees(self) -> dict[str, int]:
        return {name: value for name, value in self if name != "world_size" and name in self.model_fields_set}

    @model_validator(mode="after")
    def _agree(self) -> Self:
        degrees = self._degrees()
        if self.world_size is not None and degrees and prod(degrees.values()) != self.world_size:
            product = " x ".join(f"{name} {value}" for name, value in degrees.items())
            raise problem(
                f"world_size is {self.world_size} but {product} = {prod(degrees.values())}",
                "world_size equal to the product of the degrees, or only one of the two",
            )
        if self.devices_per_replica > _MAX_COUNT:
            raise problem(f"a replica would take {self.devices_per_replica} devices", f"at most {_MAX_COUNT}")
        return self


class SimulatedConfig(Section):
    """`engine: simulated`: whole service time, or time per step times steps (seconds); what is made and shown."""

    seconds_per_request: float | None = Field(default=None, ge=0)
    seconds_per_step: float | None = Field(default=None, ge=0)
    image: Literal["noise", "flat"] = "noise"
    kind: Literal["image", "video"] = "image"

    @model_validator(mode="after")
    def _one_clock(self) -> Self:
        if self.seconds_per_request is not None and self.seconds_per_step is not None:
            raise problem("two service times are given", "seconds_per_request or seconds_per_step, not both")
        return self


class EngineArgs(Section):
    """How one replica loads and runs its model."""

    model: str | None = Field(default=None, min_length=1)
    engine: str = Field(default="diffusers", min_length=1)
    parallel_config: ParallelConfig = ParallelConfig()
    max_num_seqs: _Count = 1
    max_num_batched_pixels: _Count | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    deterministic: bool = False
    warmup: WarmUp = True
    compile: Compile = None
    attention_backend: AttentionBackend = None
    quantization: Quantization = None
    cache: Cache = None
    offload: Offload = None
    vae_tiling: bool = False
    vae_slicing: bool = False
    lora_modules: dict[str, str] = Field(default={})
    revision: str | None = None
    simulated: SimulatedConfig = SimulatedConfig()

    @model_validator(mode="after")
    def _simulated_is_read(self) -> Self:
        if "simulated" in self.model_fields_set and self.engine != "simulated":
            raise problem(
                f"`simulated` is read by engine simulated only, and engine is {self.engine!r}",
                "`engine: simulated`, or no `simulated` section",
            )
        return self


class RuntimeConfig(Section):
    """Where and how often the stage runs. `devices` are logical ids in list order."""

    devices: DeviceIds | None = None
    num_replicas: _Count = 1
    cpu_threads: _Count | None = None
    executor: Literal["process", "ray"] = "process"
    routing: str = "round_robin"
    max_queue_size: int = Field(default=1024, ge=1)
    max_parallel_loads: _Count = 4


class StageConfig(Section):
    """One stage: today the only one, of type diffusion."""

    stage_id: int = Field(ge=0)
    stage_type: Literal["diffusion"]
    runtime: RuntimeConfig = RuntimeConfig()
    engine_args: EngineArgs = EngineArgs()
    default_sampling_params: dict[str, Any] = Field(default={})


class StageFile(Section):
    """The whole file."""

    stages: Annotated[tuple[StageConfig, ...], Field(strict=False)]
    _warnings: tuple[str, ...] = PrivateAttr(default=())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Keys of the file that were read over, one sentence each."""
        return self._warnings
