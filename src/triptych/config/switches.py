"""The switches of diffusers that a stage file may set, checked as far as that needs neither torch nor the model.

`quantization`, `cache` and `offload` are a name, or a mapping with `name` and `options`; what the options mean is
diffusers' own affair, which of them there are is told by the sections below. `combinations` says which switches exclude
each other, `engine.switches` turns them on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from triptych.config.fields import Section, explain, key_path, problem

__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionBackend",
    "Cache",
    "Compile",
    "NamedSwitch",
    "Offload",
    "Quantization",
    "WarmUp",
    "warm_up_shapes",
]

_OFF = (None, False, "none", "off")
_Positive = Annotated[int, Field(ge=1)]
_Range = Annotated[list[int], Field(min_length=2, max_length=2)]

# Those of diffusers, less the ones that fetch code from the hub and run it.
ATTENTION_BACKENDS = (
    *("native", "flex", "xformers", "flash", "flash_varlen", "sage", "sage_varlen"),
    *("_native_cudnn", "_native_efficient", "_native_flash", "_native_math", "_native_npu", "_native_xla"),
    *("_flash_3", "_flash_varlen_3"),
    *("_sage_qk_int8_pv_fp8_cuda", "_sage_qk_int8_pv_fp8_cuda_sm90"),
    *("_sage_qk_int8_pv_fp16_cuda", "_sage_qk_int8_pv_fp16_triton"),
)


def _known_backend(name: str) -> str:
    if name not in ATTENTION_BACKENDS:
        raise problem(f"unknown attention backend {name!r}", f"one of {', '.join(ATTENTION_BACKENDS)}")
    return name


class CompileConfig(Section):
    """How the denoiser is compiled: its repeated blocks, or the whole of it."""

    scope: Literal["blocks", "model"] = "blocks"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str = Field(default="inductor", min_length=1)

    @model_validator(mode="after")
    def _outputs_live_on(self) -> Self:
        if self.scope == "model" and self.mode in ("reduce-overhead", "max-autotune"):
            raise problem(
                f"mode {self.mode} reuses the memory of a model's last output, which requests still hold",
                "scope: blocks, or mode: default or max-autotune-no-cudagraphs",
            )
        return self


class NamedSwitch(Section):
    """One of several implementations by name, with options of its own; those left out are diffusers' defaults."""

    name: str
    options: dict[str, Any] = Field(default={})

    kinds: ClassVar[Mapping[str, type[Section]]]

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        kind = self.kinds.get(self.name)
        if kind is None:
            raise problem(f"unknown name {self.name!r}", f"one of {', '.join(self.kinds)}")
        try:
            kind.model_validate(self.options)
        except ValidationError as error:
            wrong = explain(error)
            wanted = wrong.wanted or f"options of {self.name}: {', '.join(kind.model_fields) or 'none'}"
            message = "unknown option" if wrong.kind == "extra_forbidden" else wrong.message
            raise problem(f"options.{key_path(wrong.location)}: {message}", wanted) from None
        return self


class _NoOptions(Section):
    pass


class _LayerwiseCasting(Section):
    storage_dtype: Literal["float8_e4m3fn", "float8_e5m2"] = "float8_e4m3fn"


class _Bitsandbytes4bit(Section):
    bnb_4bit_quant_type: Literal["nf4", "fp4"] | None = None
    bnb_4bit_use_double_quant: bool | None = None
    bnb_4bit_compute_dtype: Literal["float32", "float16", "bfloat16"] | None = None


class _Bitsandbytes8bit(Section):
    llm_int8_threshold: float | None = Field(default=None, ge=0)


class _TorchAo(Section):
    quant_type: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*Config$")]


class QuantizationConfig(NamedSwitch):
    """Weights in fewer bits. `components` of the pipeline; left out: its denoisers."""

    kinds: ClassVar = {
        "layerwise_casting": _LayerwiseCasting,
        "bitsandbytes_4bit": _Bitsandbytes4bit,
        "bitsandbytes_8bit": _Bitsandbytes8bit,
        "torchao": _TorchAo,
    }

    components: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(default=None, min_length=1, strict=False)


class _FirstBlockCache(Section):
    threshold: float | None = Field(default=None, gt=0)


class _FasterCache(Section):
    spatial_attention_block_skip_range: _Positive | None = None
    temporal_attention_block_skip_range: _Positive | None = None
    spatial_attention_timestep_skip_range: _Range | None = None
    temporal_attention_timestep_skip_range: _Range | None = None
    unconditional_batch_skip_range: _Positive | None = None
    unconditional_batch_timestep_skip_range: _Range | None = None
    tensor_format: Literal["BCFHW", "BFCHW", "BCHW"] | None = None
    is_guidance_distilled: bool | None = None


class _PyramidAttentionBroadcast(Section):
    spatial_attention_block_skip_range: _Positive | None = None
    temporal_attention_block_skip_range: _Positive | None = None
    cross_attention_block_skip_range: _Positive | None = None
    spatial_attention_timestep_skip_range: _Range | None = None
    temporal_attention_timestep_skip_range: _Range | None = None
    cross_attention_timestep_skip_range: _Range | None = None


class _MagCache(Section):
    mag_ratios: Annotated[list[float], Field(min_length=2)]
    threshold: float | None = Field(default=None, gt=0)
    max_skip_steps: _Positive | None = None
    retention_ratio: float | None = Field(default=None, ge=0, le=1)
    num_inference_steps: _Positive | None = None


class _TaylorSeerCache(Section):
    cache_interval: _Positive | None = None
    disable_cache_before_step: _Positive | None = None
    disable_cache_after_step: _Positive | None = None
    max_order: Annotated[int, Field(ge=0)] | None = None
    use_lite_mode: bool | None = None


class CacheConfig(NamedSwitch):
    """Steps that are partly taken over from the step before."""

    kinds: ClassVar = {
        "first_block_cache": _FirstBlockCache,
        "faster_cache": _FasterCache,
        "pyramid_attention_broadcast": _PyramidAttentionBroadcast,
        "mag_cache": _MagCache,
        "taylorseer_cache": _TaylorSeerCache,
        "text_kv_cache": _NoOptions,
    }


class _GroupOffload(Section):
    offload_type: Literal["block_level", "leaf_level"] | None = None
    num_blocks_per_group: _Positive | None = None
    use_stream: bool | None = None
    record_stream: bool | None = None
    non_blocking: bool | None = None
    low_cpu_mem_usage: bool | None = None


class OffloadConfig(NamedSwitch):
    """Weights that wait in host memory until they are used."""

    kinds: ClassVar = {"model": _NoOptions, "group": _GroupOffload, "sequential": _NoOptions}


def _by_name(value: object) -> object:
    if value in _OFF:
        return None
    return {"name": value} if isinstance(value, str) else value


def _compile(value: object) -> object:
    return None if value in _OFF else {} if value is True else value


_WARM_UP_WANTED = 'true, false, or a list of "WIDTHxHEIGHT" or "WIDTHxHEIGHTxFRAMES"'
_SHAPE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})(?:x([1-9][0-9]{0,5}))?")


def _warm_up(value: object) -> object:
    """Whether to warm up, or the shapes to do it with, as a tuple."""
    shapes = value if isinstance(value, list | tuple) else ()
    if wrong := [shape for shape in shapes if not isinstance(shape, str) or _SHAPE.fullmatch(shape) is None]:
        raise problem(f"not a shape: {wrong[0]!r}", _WARM_UP_WANTED)
    if not shapes and not isinstance(value, bool):
        raise problem("wrong type", _WARM_UP_WANTED)
    return value if isinstance(value, bool) else tuple(shapes)


def warm_up_shapes(warm_up: bool | tuple[str, ...]) -> tuple[tuple[int, int, int | None], ...]:
    """Width, height and frames of each shape that is named."""
    matches = [_SHAPE.fullmatch(shape) for shape in warm_up] if isinstance(warm_up, tuple) else []
    return tuple((int(m[1]), int(m[2]), int(m[3]) if m[3] else None) for m in matches if m is not None)


AttentionBackend = Annotated[str | None, AfterValidator(lambda name: None if name is None else _known_backend(name))]
Compile = Annotated[CompileConfig | None, BeforeValidator(_compile)]
Quantization = Annotated[QuantizationConfig | None, BeforeValidator(_by_name)]
Cache = Annotated[CacheConfig | None, BeforeValidator(_by_name)]
Offload = Annotated[OffloadConfig | None, BeforeValidator(_by_name)]
WarmUp = Annotated[bool | tuple[str, ...], BeforeValidator(_warm_up)]
