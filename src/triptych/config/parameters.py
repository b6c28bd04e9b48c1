"""The common parameters of every generation route and of `triptych generate`: one table, one validation.

JSON values or form strings become `CommonParameters` (what the caller said), and `build_request` turns those into the
immutable `GenerationRequest` with every default resolved: request over stage file over model. Numbers are strict, as
OpenAI's are: `true` is no integer and neither is `2.0`; JSON null means the default.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triptych.config.input_media import call_with, check_strength
from triptych.config.limits import (
    MAX_SEED,
    Limits,
    check_entries,
    check_frames,
    check_listed,
    check_pixels,
    check_seconds,
    check_seed,
    check_sides,
    check_steps,
    check_timeout,
)
from triptych.config.lora import resolve_lora
from triptych.config.parameter_errors import (
    MAX_TEXT_CHARACTERS,
    first_error,
    invalid,
    nearest,
    parameter_error,
    shown,
)
from triptych.errors import ConfigError, ErrorCode, TriptychError
from triptych.messages import GenerationRequest, MediaInput, ModelInfo, OutputSpec, SamplingParams

__all__ = [
    "CommonParameters",
    "Limits",
    "LoraParameter",
    "Priority",
    "SamplingDefaults",
    "build_request",
    "check_timeout",
    "check_without_model",
    "nearest",
    "parameter_error",
    "parse_parameters",
    "shown",
    "unsupported_parameters",
    "validate_defaults",
]

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)]
Label = Annotated[str, Field(max_length=256)]
Count = Annotated[int, Field(ge=1, le=10)]
Positive = Annotated[int, Field(ge=1)]
Guidance = Annotated[float, Field(ge=0, le=100)]
Priority = Annotated[int, Field(ge=-100, le=100)]
Scalar = bool | Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | float | Text


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
    priority: Priority | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    session: Label | None = None
    user: Label | None = None


_STRINGS = frozenset({"prompt", "negative_prompt", "size", "output_format", "session", "user", "name"})
_FREE = frozenset({"prompt", "n", "num_outputs_per_prompt", "seed", "lora", "priority", "timeout", "session", "user"})
_NEVER_EXTRA = frozenset(
    {"generator", "output_type", "return_dict", "num_images_per_prompt", "timesteps", "sigmas", "latents"}
)
_NEVER_EXTRA_PREFIXES = ("callback", "image")
_NEVER_EXTRA_SUFFIXES = ("_embeds", "_kwargs")
_LARGEST_FRAME_MULTIPLE = 16  # models round clips to 1 more than a multiple of 4 or 8 frames; 16 leaves room


def parse_parameters(fields: Mapping[str, Any], *, form: bool = False) -> CommonParameters:
    """Validate JSON values, or form strings parsed by each field's type. Raises `TriptychError`."""
    values = {name: value for name, value in fields.items() if value is not None}
    if form:
        values = {name: _from_form(name, value) for name, value in values.items()}
    check_entries(values)
    if isinstance(extra := values.get("extra_args"), dict):
        values["extra_args"] = {name: value for name, value in extra.items() if value is not None}
    try:
        parameters = CommonParameters.model_validate(values)
    except ValidationError as error:
        raise parameter_error(error, CommonParameters.model_fields) from None
    if not parameters.prompt.strip():
        raise invalid("prompt", f"must not be blank, got {shown(parameters.prompt)}")
    return parameters


def validate_defaults(mapping: Mapping[str, Any], *, where: str, limits: Limits | None = None) -> SamplingDefaults:
    """Validate a stage file's `default_sampling_params`; `where` is its key path. Raises `ConfigError`."""
    try:
        defaults = SamplingDefaults.model_validate(dict(mapping))
        _check_names(defaults)
        if limits is not None:
            check_without_model(defaults, limits)
    except ValidationError as error:
        param, message, found = first_error(error)
        if error.errors(include_url=False)[0]["type"] == "extra_forbidden":
            message = f"is not a sampling parameter that can be preset{nearest(param, SamplingDefaults.model_fields)}"
        raise ConfigError(message, where=f"{where}.{param}", found=found) from None
    except TriptychError as error:
        raise ConfigError(error.message, where=f"{where}.{error.param}") from None
    return defaults


def check_without_model(said: SamplingDefaults, limits: Limits) -> None:
    """Refuse what no model could make of these values alone, before one is loaded. Raises `TriptychError`."""
    _check_names(said)
    if said.seed is not None:
        check_seed(said.seed, _count(said) or 1)
    if sides := [side for side in _size_pair(said) if side is not None]:
        check_pixels(sides, limits, param=_size_param(said))
        check_sides(sides, said.output_format or "png", param=_size_param(said))
    if said.num_inference_steps is not None:
        check_steps(said.num_inference_steps, limits)
    if said.num_frames is not None:
        check_frames(said.num_frames, limits, param="num_frames")
    if said.seconds is not None:
        check_seconds(said.seconds, said.fps or 1, limits, slack=_LARGEST_FRAME_MULTIPLE)


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
    inputs: tuple[MediaInput, ...] = (),
    frames: tuple[bytes, ...] = (),
    request_id: str | None = None,
    client_request_id: str | None = None,
    owner: str | None = None,
) -> GenerationRequest:
    """Check against model and limits, resolve every default once, draw the seed. Raises `TriptychError`.

    `inputs` are the pictures and the mask, their pixels in `frames`; without a size the output is as large as they.
    """
    lora = resolve_lora(parameters.lora, registered=info.loras)
    info = call_with(inputs, info, limits)
    _check_supported(parameters, info)
    n, video = _count(parameters) or _count(defaults) or 1, info.kind == "video"

    def pick(name: str) -> Any:
        if (value := getattr(parameters, name)) is not None:
            return value
        return getattr(defaults, name) if _is_supported(name, defaults, info) else None

    output = OutputSpec("mp4") if video else OutputSpec(pick("output_format") or "png", pick("output_compression"))
    preset = SamplingDefaults() if inputs else defaults  # the size of the picture goes before that of the stage file
    width, height = _resolve_size(parameters, preset, info, limits, output_format=output.format)
    num_frames, fps = _resolve_frames(parameters, defaults, info, limits) if video else (None, None)
    steps, strength = _resolve_steps(pick("num_inference_steps"), info, limits), pick("strength")
    check_strength(strength, steps, info)
    params = SamplingParams(
        prompt=parameters.prompt,
        seed=_resolve_seed(pick("seed"), n),
        negative_prompt=pick("negative_prompt"),
        width=width,
        height=height,
        num_inference_steps=steps,
        guidance_scale=pick("guidance_scale"),
        true_cfg_scale=pick("true_cfg_scale"),
        strength=strength,
        num_frames=num_frames,
        fps=fps,
        lora=lora,
        extra_args=_resolve_extra_args(parameters, defaults, info),
    )
    return GenerationRequest(
        id=request_id or f"req_{secrets.token_hex(16)}",
        model=model,
        params=params,
        timeout_s=_resolve_timeout(parameters.timeout, limits),
        n=n,
        output=output,
        inputs=inputs,
        frames=frames,
        priority=parameters.priority or 0,
        client_request_id=client_request_id,
        session=parameters.session,
        user=parameters.user,
        owner=owner,
    )


def _from_form(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_form(key, inner) for key, inner in value.items()}
    if name in _STRINGS or not isinstance(value, str):
        return value
    try:
        parsed = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return value
    return value if parsed is None else parsed


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


def _check_names(said: SamplingDefaults) -> None:
    """What is wrong whatever the values are: two names that disagree, and reserved names."""
    for name in said.extra_args or {}:
        if _is_reserved(name):
            message = f"extra_args may not set {shown(name)}: the name is reserved"
            raise TriptychError(ErrorCode.UNSUPPORTED_PARAMETER, message, param=f"extra_args.{name}")
    _count(said)
    _size_pair(said)


def _check_supported(parameters: CommonParameters, info: ModelInfo) -> None:
    _check_names(parameters)
    for name in unsupported_parameters(parameters, info):
        takes = f"; extra_args it takes: {', '.join(info.extra_parameters) or 'none'}" if "." in name else ""
        if name == "strength" and info.image is not None and name in info.image.parameters:
            takes = " without an input picture"
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
        raise invalid("num_outputs_per_prompt", f"is another name of n and must agree with it, got {alias} and n {n}")
    return alias if n is None else n


def _size_pair(parameters: SamplingDefaults) -> tuple[int | None, int | None]:
    """Width and height as said in either way; None for a side that was not said."""
    width, height = parameters.width, parameters.height
    if parameters.size is None or parameters.size == "auto":
        return width, height
    size_width, size_height = (int(side) for side in parameters.size.lower().split("x"))
    for name, side, other in (("width", width, size_width), ("height", height, size_height)):
        if side is not None and side != other:
            raise invalid(name, f"must agree with size {parameters.size}, got {side}")
    return size_width, size_height


def _size_param(parameters: SamplingDefaults) -> str:
    """The parameter that a wrong size is blamed on."""
    if parameters.width is parameters.height is None:
        return "size"
    return "height" if parameters.width is None else "width"


def _resolve_size(
    parameters: CommonParameters, defaults: SamplingDefaults, info: ModelInfo, limits: Limits, *, output_format: str
) -> tuple[int | None, int | None]:
    if not {"width", "height"}.issubset(info.parameters):
        return None, None
    said = _size_pair(parameters)
    preset = _size_pair(defaults)
    width, height = (
        first or second or third
        for first, second, third in zip(said, preset, (info.default_width, info.default_height), strict=True)
    )
    param = _size_param(parameters)
    check_listed(f"{width}x{height}", [f"{w}x{h}" for w, h in info.sizes], param=param)
    for name, side in (("width", width), ("height", height)):
        if side % info.size_multiple:
            message = f"must be a positive multiple of {info.size_multiple} pixels, got {name} {shown(side)}"
            raise invalid("size" if param == "size" else name, message)
    check_pixels((width, height), limits, param=param)
    check_sides((width, height), output_format, param=param)
    return width, height


def _resolve_frames(
    parameters: CommonParameters, defaults: SamplingDefaults, info: ModelInfo, limits: Limits
) -> tuple[int, int]:
    """Frames and frames per second; `seconds` gives the nearest frame count that the model can make."""
    fps = parameters.fps or defaults.fps or info.default_fps
    said = parameters if parameters.num_frames or parameters.seconds else defaults
    param, num_frames, multiple = "num_frames", said.num_frames, info.frame_multiple
    if said.seconds is not None:
        check_seconds(said.seconds, fps, limits, slack=multiple)
        from_seconds = max(0, int((said.seconds * fps - 1) / multiple + 0.5)) * multiple + 1
        if num_frames is not None and num_frames != from_seconds:
            message = f"must agree with num_frames {num_frames}, got {said.seconds:g} s, {from_seconds} frames"
            raise invalid("seconds", f"{message} at {fps} fps")
        param, num_frames = "seconds", from_seconds
    frames = num_frames or info.default_num_frames
    check_frames(frames, limits, param=param)
    got = None if said.seconds is None else f"{said.seconds:g} s, which is {frames} frames at {fps} fps"
    check_listed(str(frames), [str(count) for count in info.frame_counts], param=param, unit=" frames", got=got)
    if (frames - 1) % multiple:
        below = frames - (frames - 1) % multiple
        message = f"must be 1 more than a multiple of {multiple}, such as {below} or {below + multiple}, got {frames}"
        raise invalid(param, message)
    return frames, fps


def _resolve_seed(seed: int | None, n: int) -> int:
    if seed is None:
        return secrets.randbits(32)
    check_seed(seed, n)
    return seed


def _resolve_steps(steps: int | None, info: ModelInfo, limits: Limits) -> int | None:
    if "num_inference_steps" not in info.parameters:
        return None
    steps = steps or info.default_num_inference_steps
    check_steps(steps, limits, fewest=info.min_num_inference_steps)
    return steps


def _resolve_timeout(timeout: float | None, limits: Limits) -> float:
    if timeout is None:
        return limits.request_timeout_s
    check_timeout(timeout, limits)
    return timeout


def _resolve_extra_args(
    parameters: CommonParameters, defaults: SamplingDefaults, info: ModelInfo
) -> dict[str, bool | int | float | str]:
    known: Collection[str] = info.extra_parameters
    preset = {name: value for name, value in (defaults.extra_args or {}).items() if name in known}
    return preset | (parameters.extra_args or {})
