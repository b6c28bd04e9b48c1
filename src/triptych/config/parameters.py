"""The common parameters of every generation route and of `triptych generate`: one table, one validation.

JSON values or form strings become `CommonParameters` (what the caller said), and `build_request` turns those into the
immutable `GenerationRequest` with every default resolved: request over stage file over model. Numbers are strict, as
OpenAI's are: `true` is no integer and neither is `2.0`; JSON null means the default.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triptych.errors import ConfigError, ErrorCode, TriptychError
from triptych.messages import GenerationRequest, ModelInfo, OutputSpec, SamplingParams

__all__ = [
    "CommonParameters",
    "Limits",
    "LoraParameter",
    "SamplingDefaults",
    "build_request",
    "nearest",
    "parameter_error",
    "parse_parameters",
    "shown",
    "unsupported_parameters",
    "validate_defaults",
]

MAX_SEED = 2**63 - 1
MAX_TEXT_CHARACTERS = 32_000

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)]
Label = Annotated[str, Field(max_length=256)]
Count = Annotated[int, Field(ge=1, le=10)]
Positive = Annotated[int, Field(ge=1)]
Guidance = Annotated[float, Field(ge=0, le=100)]
Scalar = bool | Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | float | Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the operator allows: pixels per frame, frames per clip, denoising steps, seconds per request."""

    max_pixels: int
    max_num_frames: int
    max_num_inference_steps: int
    request_timeout_s: float


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class LoraParameter(_Model):
    """A LoRA by registered name."""

    name: Label
    scale: Annotated[float, Field(ge=-10, le=10)] = 1.0


class SamplingDefaults(_Model):
    """The parameters that a stage file may preset in `default_sampling_params`; None is "not said"."""

    negative_prompt: Text | None = None
    n: Count | None = None
    num_outputs_per_prompt: Count | None = None
    size: Annotated[str, Field(pattern=r"^([1-9][0-9]{0,8}[xX][1-9][0-9]{0,8}|auto)$")] | None = None
    width: Positive | None = None
    height: Positive | None = None
    num_inference_steps: Positive | None = None
    guidance_scale: Guidance | None = None
    true_cfg_scale: Guidance | None = None
    strength: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    num_frames: Positive | None = None
    fps: Annotated[int, Field(ge=1, le=120)] | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    extra_args: dict[str, Scalar] | None = None


class CommonParameters(SamplingDefaults):
    """What one caller said, field by field; None is "not said"."""

    prompt: Text
    lora: LoraParameter | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    session: Label | None = None
    user: Label | None = None


_STRINGS = frozenset({"prompt", "negative_prompt", "size", "output_format", "session", "user"})
_FREE = frozenset({"prompt", "n", "num_outputs_per_prompt", "seed", "lora", "priority", "timeout", "session", "user"})
_NEVER_EXTRA = frozenset(
    {"generator", "output_type", "return_dict", "num_images_per_prompt", "timesteps", "sigmas", "latents"}
)
_NEVER_EXTRA_PREFIXES = ("callback", "image")
_NEVER_EXTRA_SUFFIXES = ("_embeds", "_kwargs")


def parse_parameters(fields: Mapping[str, Any], *, form: bool = False) -> CommonParameters:
    """Validate JSON values, or form strings parsed by each field's type. Raises `TriptychError`."""
    values = {name: value for name, value in fields.items() if value is not None}
    if form:
        values = {name: _from_form(name, value) for name, value in values.items()}
    if isinstance(extra := values.get("extra_args"), dict):
        values["extra_args"] = {name: value for name, value in extra.items() if value is not None}
    try:
        parameters = CommonParameters.model_validate(values)
    except ValidationError as error:
        raise parameter_error(error, CommonParameters.model_fields) from None
    if not parameters.prompt.strip():
        raise _invalid("prompt", f"must not be blank, got {shown(parameters.prompt)}")
    return parameters


def validate_defaults(mapping: Mapping[str, Any], *, where: str) -> SamplingDefaults:
    """Validate a stage file's `default_sampling_params`; `where` is its key path. Raises `ConfigError`."""
    try:
        defaults = SamplingDefaults.model_validate(dict(mapping))
        _count(defaults)
        _size_pair(defaults)
    except ValidationError as error:
        param, message, found = _first_error(error)
        if error.errors(include_url=False)[0]["type"] == "extra_forbidden":
            message = f"is not a sampling parameter that can be preset{nearest(param, SamplingDefaults.model_fields)}"
        raise ConfigError(message, where=f"{where}.{param}", found=found) from None
    except TriptychError as error:
        raise ConfigError(error.message, where=f"{where}.{error.param}") from None
    for name in defaults.extra_args or {}:
        if _is_reserved(name):
            raise ConfigError("is reserved and cannot be passed on", where=f"{where}.extra_args.{name}")
    return defaults


def unsupported_parameters(parameters: SamplingDefaults, info: ModelInfo) -> list[str]:
    """Names of the parameters that were said but mean nothing to the loaded pipeline."""
    said = [name for name in type(parameters).model_fields if getattr(parameters, name) is not None]
    refused = [name for name in said if name != "extra_args" and not _is_supported(name, parameters, info)]
    return refused + [f"extra_args.{name}" for name in parameters.extra_args or {} if name not in info.extra_parameters]


def build_request(
    parameters: CommonParameters,
    *,
    model: str,
    info: ModelInfo,
    defaults: SamplingDefaults,
    limits: Limits,
    request_id: str | None = None,
    client_request_id: str | None = None,
    owner: str | None = None,
) -> GenerationRequest:
    """Check against model and limits, resolve every default once, draw the seed. Raises `TriptychError`."""
    _check_supported(parameters, info)
    n = _count(parameters) or _count(defaults) or 1
    video = info.kind == "video"
    width, height = _resolve_size(parameters, defaults, info, limits)
    num_frames, fps = _resolve_frames(parameters, defaults, info, limits) if video else (None, None)

    def pick(name: str) -> Any:
        if (value := getattr(parameters, name)) is not None:
            return value
        return getattr(defaults, name) if _is_supported(name, defaults, info) else None

    params = SamplingParams(
        prompt=parameters.prompt,
        seed=_resolve_seed(pick("seed"), n),
        negative_prompt=pick("negative_prompt"),
        width=width,
        height=height,
        num_inference_steps=_resolve_steps(pick("num_inference_steps"), info, limits),
        guidance_scale=pick("guidance_scale"),
        true_cfg_scale=pick("true_cfg_scale"),
        strength=pick("strength"),
        num_frames=num_frames,
        fps=fps,
        extra_args=_resolve_extra_args(parameters, defaults, info),
    )
    output = OutputSpec("mp4") if video else OutputSpec(pick("output_format") or "png", pick("output_compression"))
    return GenerationRequest(
        id=request_id or f"req_{secrets.token_hex(16)}",
        model=model,
        params=params,
        timeout_s=_resolve_timeout(parameters.timeout, limits),
        n=n,
        output=output,
        priority=parameters.priority or 0,
        client_request_id=client_request_id,
        session=parameters.session,
        user=parameters.user,
        owner=owner,
    )


def parameter_error(error: ValidationError, known: Iterable[str]) -> TriptychError:
    """The first failure of a Pydantic validation as an answer to the client; `known` feeds the nearest-name hint."""
    kind = error.errors(include_url=False)[0]["type"]
    param, message, found = _first_error(error)
    if kind == "missing":
        return TriptychError(ErrorCode.MISSING_PARAMETER, f"{param} is required", param=param)
    if kind == "extra_forbidden":
        message = f"unknown parameter {shown(param)}{nearest(param, known)}"
        return TriptychError(ErrorCode.UNKNOWN_PARAMETER, message, param=param)
    return _invalid(param, f"{message}, got {found if kind == 'string_too_long' else shown(found)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an "unknown" message: `; did you mean 'seed'?`, or nothing when no known name is near."""
    matches = difflib.get_close_matches(name[:64], list(known), n=1)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def shown(value: object) -> str:
    """A value as an error message repeats it: short, one line, containers by type only."""
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**40:
        return "an integer of more than 40 digits"
    text = repr(value[:65] if isinstance(value, str) else value)
    return text if len(text) <= 64 else f"{text[:61]}..."


def _from_form(name: str, value: Any) -> Any:
    if name in _STRINGS or not isinstance(value, str):
        return value
    try:
        parsed = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return value
    return value if parsed is None else parsed


def _first_error(error: ValidationError) -> tuple[str, str, object]:
    first = error.errors(include_url=False)[0]
    location, message, found = [str(part) for part in first["loc"]], first["msg"], first["input"]
    if location[0] == "extra_args" and len(location) > 1:
        location = location[:2]
        message = f"must be a boolean, a finite 64-bit number or a string of at most {MAX_TEXT_CHARACTERS} characters"
    elif first["type"] == "string_pattern_mismatch":
        message = 'must be "WxH" in pixels, such as "1024x1024", or "auto"'
    for start in ("Input should ", "String should "):
        message = message.replace(start, "must ")
    if first["type"] == "string_too_long":
        found = f"{len(str(found))} characters"
    return ".".join(location), message, found


def _invalid(param: str, message: str) -> TriptychError:
    return TriptychError(ErrorCode.INVALID_VALUE, f"{param} {message}", param=param)


def _is_supported(name: str, parameters: SamplingDefaults, info: ModelInfo) -> bool:
    if name in _FREE:
        return True
    if name in ("size", "width", "height"):
        return (name == "size" and parameters.size == "auto") or {"width", "height"}.issubset(info.parameters)
    if name in ("num_frames", "fps", "seconds"):
        return info.kind == "video"
    if name in ("output_format", "output_compression"):
        return info.kind == "image"
    return name in info.parameters


def _check_supported(parameters: CommonParameters, info: ModelInfo) -> None:
    if parameters.lora is not None:
        raise TriptychError(ErrorCode.NOT_AVAILABLE, "lora is not available in this version", param="lora")
    for name in parameters.extra_args or {}:
        if _is_reserved(name):
            message = f"extra_args may not set {shown(name)}: the name is reserved"
            raise TriptychError(ErrorCode.UNSUPPORTED_PARAMETER, message, param=f"extra_args.{name}")
    for name in unsupported_parameters(parameters, info):
        takes = f"; extra_args it takes: {', '.join(info.extra_parameters) or 'none'}" if "." in name else ""
        message = f"{name} is not supported by this model ({info.pipeline}){takes}"
        raise TriptychError(ErrorCode.UNSUPPORTED_PARAMETER, message, param=name)


def _is_reserved(name: str) -> bool:
    return (
        name in CommonParameters.model_fields
        or name in _NEVER_EXTRA
        or name.startswith(_NEVER_EXTRA_PREFIXES)
        or name.endswith(_NEVER_EXTRA_SUFFIXES)
    )


def _count(parameters: SamplingDefaults) -> int | None:
    n, alias = parameters.n, parameters.num_outputs_per_prompt
    if n is not None and alias is not None and n != alias:
        raise _invalid("num_outputs_per_prompt", f"is another name of n and must agree with it, got {alias} and n {n}")
    return alias if n is None else n


def _size_pair(parameters: SamplingDefaults) -> tuple[int | None, int | None]:
    """Width and height as said in either way; None for a side that was not said."""
    width, height = parameters.width, parameters.height
    if parameters.size is None or parameters.size == "auto":
        return width, height
    size_width, size_height = (int(side) for side in parameters.size.lower().split("x"))
    for name, side, other in (("width", width, size_width), ("height", height, size_height)):
        if side is not None and side != other:
            raise _invalid(name, f"must agree with size {parameters.size}, got {side}")
    return size_width, size_height


def _resolve_size(
    parameters: CommonParameters, defaults: SamplingDefaults, info: ModelInfo, limits: Limits
) -> tuple[int | None, int | None]:
    if not {"width", "height"}.issubset(info.parameters):
        return None, None
    said = _size_pair(parameters)
    preset = _size_pair(defaults)
    width, height = (
        first or second or third
        for first, second, third in zip(said, preset, (info.default_width, info.default_height), strict=True)
    )
    blame = (
        "size" if parameters.width is parameters.height is None else "height" if parameters.width is None else "width"
    )
    for name, side in (("width", width), ("height", height)):
        if side % info.size_multiple:
            message = f"must be a positive multiple of {info.size_multiple} pixels, got {name} {shown(side)}"
            raise _invalid("size" if blame == "size" else name, message)
    if width * height > limits.max_pixels:
        pixels = f"{shown(width)}x{shown(height)} has {shown(width * height)} pixels"
        raise _invalid(blame, f"{pixels}, the limit is {limits.max_pixels}")
    if info.sizes and (width, height) not in info.sizes:
        sizes = ", ".join(f"{w}x{h}" for w, h in info.sizes)
        raise _invalid(blame, f"must be one of {sizes}, got {width}x{height}")
    return width, height


def _resolve_frames(
    parameters: CommonParameters, defaults: SamplingDefaults, info: ModelInfo, limits: Limits
) -> tuple[int, int]:
    """Frames and frames per second; `seconds` gives the nearest frame count that the model can make."""
    fps = parameters.fps or defaults.fps or info.default_fps
    said = parameters if parameters.num_frames or parameters.seconds else defaults
    param, num_frames, multiple = "num_frames", said.num_frames, info.frame_multiple
    if said.seconds is not None:
        if said.seconds * fps > limits.max_num_frames + multiple:
            limit = f"{fps} fps and at most {limits.max_num_frames} frames"
            raise _invalid("seconds", f"is too long for {limit}, got {shown(said.seconds)}")
        from_seconds = max(0, int((said.seconds * fps - 1) / multiple + 0.5)) * multiple + 1
        if num_frames is not None and num_frames != from_seconds:
            message = f"must agree with num_frames {num_frames}, got {said.seconds:g} s, {from_seconds} frames"
            raise _invalid("seconds", f"{message} at {fps} fps")
        param, num_frames = "seconds", from_seconds
    frames = num_frames or info.default_num_frames
    if frames > limits.max_num_frames:
        raise _invalid(param, f"must be at most {limits.max_num_frames} frames, got {shown(frames)}")
    if (frames - 1) % multiple:
        below = frames - (frames - 1) % multiple
        message = f"must be 1 more than a multiple of {multiple}, such as {below} or {below + multiple}, got {frames}"
        raise _invalid(param, message)
    return frames, fps


def _resolve_seed(seed: int | None, n: int) -> int:
    if seed is None:
        return secrets.randbits(32)
    if seed + n - 1 > MAX_SEED:
        raise _invalid("seed", f"must be at most {MAX_SEED - n + 1} for n {n} (image i uses seed + i), got {seed}")
    return seed


def _resolve_steps(steps: int | None, info: ModelInfo, limits: Limits) -> int | None:
    if "num_inference_steps" not in info.parameters:
        return None
    steps = steps or info.default_num_inference_steps
    if steps > limits.max_num_inference_steps:
        raise _invalid("num_inference_steps", f"must be at most {limits.max_num_inference_steps}, got {shown(steps)}")
    return steps


def _resolve_timeout(timeout: float | None, limits: Limits) -> float:
    if timeout is None:
        return limits.request_timeout_s
    if timeout > limits.request_timeout_s:
        raise _invalid("timeout", f"must be at most {limits.request_timeout_s:g} seconds, got {shown(timeout)}")
    return timeout


def _resolve_extra_args(
    parameters: CommonParameters, defaults: SamplingDefaults, info: ModelInfo
) -> dict[str, bool | int | float | str]:
    known: Collection[str] = info.extra_parameters
    preset = {name: value for name, value in (defaults.extra_args or {}).items() if name in known}
    return preset | (parameters.extra_args or {})
