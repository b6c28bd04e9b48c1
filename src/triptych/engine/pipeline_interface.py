"""What the call of a loaded pipeline takes, read from its signature: `ModelInfo` for validation, keyword arguments
for each unit.

Parameters keep the names of diffusers, so nothing here knows a model family; `triptych.json` overlays the defaults.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from PIL import Image

from triptych.engine.base import EngineStartError
from triptych.engine.model_settings import SETTINGS_FILE, ModelSettings
from triptych.engine.pipeline_sizes import default_size, frame_multiple, size_multiple
from triptych.errors import ErrorCode, TriptychError
from triptych.messages import Generate, MediaInput, ModelInfo, SamplingParams
from triptych.wire import Frame

__all__ = ["PipelineInterface"]

_OPTIONAL = (
    "negative_prompt",
    "width",
    "height",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
    "strength",
    "num_frames",
)
_FRAME_RATES = ("frame_rate", "fps")
_DEFAULT_FPS = 16
_MAX_SEQUENCE_LENGTH = 1024
_MAX_PICTURES = 16
# For these a list of pictures is one request; everywhere else in diffusers it is a batch of requests.
_TAKES_SEVERAL = frozenset(
    {"Flux2KleinKVPipeline", "Flux2KleinPipeline", "Flux2Pipeline", "QwenImageEditPlusPipeline", "ZImageOmniPipeline"}
)
_CLIP_ENCODERS = ("text_encoder", "text_encoder_2")
# No published table of resolution bins starts below this many pixels; smaller models refuse to be binned.
_SMALLEST_BINNED_SIDE = 256


class PipelineInterface:
    """Signature, defaults and limits of one pipeline. Raises `EngineStartError` if the settings do not fit it."""

    def __init__(self, pipe: Any, settings: ModelSettings) -> None:
        self._pipe = pipe
        self._defaults = settings.default_sampling_params
        self._signature = dict(inspect.signature(type(pipe).__call__).parameters)
        self._types = _scalar_types(type(pipe).__call__, self._signature)
        self._call_args = self._fixed_arguments(settings)
        # Pipelines that begin with the picture instead of noise make their output as large as it.
        self._redraws = {"image", "strength"}.issubset(self._signature)
        self._frame_rate = next((name for name in _FRAME_RATES if name in self._signature), None)
        self.info = self._describe(settings)

    def _fixed_arguments(self, settings: ModelSettings) -> dict[str, Any]:
        for name, value in settings.call_args.items():
            if name not in self._types or not _fits(value, self._types[name]):
                raise EngineStartError(
                    f"{SETTINGS_FILE}: call_args.{name}: {value!r} does not fit {type(self._pipe).__name__}; "
                    f"wanted one of {', '.join(sorted(self._types))}"
                )
        arguments = dict(settings.call_args)
        if "output_type" in self._signature:
            # Without a VAE, "pt" is the raw sample of the scheduler in some pipelines.
            arguments["output_type"] = "np" if getattr(self._pipe, "vae", None) is None else "pt"
        return arguments

    def _describe(self, settings: ModelSettings) -> ModelInfo:
        signature, defaults = self._signature, self._defaults
        multiple = size_multiple(self._pipe)
        width, height = default_size(self._pipe, signature, multiple)
        width, height = defaults.width or width, defaults.height or height
        if settings.sizes and (width, height) not in settings.sizes:
            raise EngineStartError(f"{SETTINGS_FILE}: the default size {width}x{height} is not among `sizes`")
        if "use_resolution_binning" in signature and min(width, height) < _SMALLEST_BINNED_SIDE:
            self._call_args.setdefault("use_resolution_binning", False)
        video = "num_frames" in signature
        frames = (defaults.num_frames or self._default("num_frames", 1)) if video else 1
        if settings.frame_counts and frames not in settings.frame_counts:
            raise EngineStartError(f"{SETTINGS_FILE}: the default of {frames} frames is not among `frame_counts`")
        parameters = ["prompt", "seed", *(name for name in _OPTIONAL if name in signature)]
        parameters += [name for name in ("width", "height") if self._redraws and name not in signature]
        return ModelInfo(
            pipeline=type(self._pipe).__name__,
            kind="video" if video else "image",
            parameters=tuple(parameters),
            extra_parameters=tuple(sorted(name for name in self._types if self._is_extra(name))),
            size_multiple=multiple,
            default_width=width,
            default_height=height,
            default_num_inference_steps=defaults.num_inference_steps or self._default("num_inference_steps", 1),
            frame_multiple=frame_multiple(self._pipe) if video else 1,
            default_num_frames=frames,
            default_fps=defaults.fps or self._default(self._frame_rate or "", _DEFAULT_FPS),
            sizes=settings.sizes,
            frame_counts=settings.frame_counts,
            max_images=_MAX_PICTURES if type(self._pipe).__name__ in _TAKES_SEVERAL else 1,
            default_strength=self._default_strength(),
        )

    def _default_strength(self) -> float | None:
        if not self._redraws:
            return None
        said, own = self._defaults.strength, self._signature["strength"].default
        return said if said is not None else own if isinstance(own, float) else None

    def _default(self, name: str, otherwise: int) -> int:
        value = self._signature[name].default if name in self._signature else None
        return value if isinstance(value, int) else otherwise

    def _is_extra(self, name: str) -> bool:
        owned = name in SamplingParams.__struct_fields__ or name in _FRAME_RATES or name in self._call_args
        internal = name in ("return_dict", "batch_size") or name.endswith("_per_prompt")
        if name == "clip_skip" and not self._can_skip_layers():
            return False
        return not (owned or internal or name.startswith(("callback", "image")))

    def fps(self, params: SamplingParams) -> int:
        """Frames a second of the clip."""
        return params.fps or self.info.default_fps

    def pixels(self, params: SamplingParams) -> int:
        """Pixels of the picture, or of all frames of the clip."""
        info = self.info
        area = (params.width or info.default_width) * (params.height or info.default_height)
        return area * (params.num_frames or info.default_num_frames)

    def arguments(self, unit: Generate, frames: Sequence[Frame]) -> dict[str, Any]:
        """Keyword arguments of the pipeline's call for one unit. Raises `TriptychError`."""
        params = unit.params
        arguments: dict[str, Any] = {"prompt": params.prompt, **self._call_args}
        for name in _OPTIONAL:
            said = getattr(params, name)
            value = getattr(self._defaults, name) if said is None else said
            if value is None:
                continue
            if name in self._signature:
                arguments[name] = value
            elif said is not None and name not in self.info.parameters:
                raise self._unsupported(name)
        if self._frame_rate is not None:
            arguments[self._frame_rate] = self.fps(params)
        arguments |= self._checked_extra_args(params)
        arguments |= self._inputs(unit, frames)
        if "generator" in self._signature:
            arguments["generator"] = torch.Generator("cpu").manual_seed(params.seed)
        return arguments

    def _unsupported(self, name: str) -> TriptychError:
        message = f"{name} is not supported by this model ({self.info.pipeline})"
        return TriptychError(ErrorCode.UNSUPPORTED_PARAMETER, message, param=name)

    def _checked_extra_args(self, params: SamplingParams) -> dict[str, Any]:
        for name, value in params.extra_args.items():
            param = f"extra_args.{name}"
            if name not in self.info.extra_parameters:
                raise self._unsupported(param)
            if not _fits(value, self._types[name]):
                wanted = " or ".join(sorted(kind.__name__ for kind in self._types[name]))
                raise TriptychError(ErrorCode.INVALID_VALUE, f"{param} must be {wanted}, got {value!r}", param=param)
        longest = max(_MAX_SEQUENCE_LENGTH, self._default("max_sequence_length", 0))
        for name, least, most in (("max_sequence_length", 1, longest), ("clip_skip", 0, self._text_layers() - 1)):
            said = params.extra_args.get(name)
            if said is not None and not least <= int(said) <= most:
                param = f"extra_args.{name}"
                message = f"{param} must be between {least} and {most}, got {said}"
                raise TriptychError(ErrorCode.INVALID_VALUE, message, param=param)
        return params.extra_args

    def _can_skip_layers(self) -> bool:
        """With one text encoder diffusers reaches for its `text_model`, which transformers 5 no longer has."""
        single = getattr(self._pipe, "text_encoder_2", None) is None
        return not single or hasattr(getattr(self._pipe, "text_encoder", None), "text_model")

    def _text_layers(self) -> int:
        """Layers of the shallowest CLIP text encoder: so many can be skipped, less one."""
        configs = [getattr(getattr(self._pipe, name, None), "config", None) for name in _CLIP_ENCODERS]
        return min((getattr(config, "num_hidden_layers", 1) for config in configs if config is not None), default=1)

    def _inputs(self, unit: Generate, frames: Sequence[Frame]) -> dict[str, Any]:
        pictures = [_picture(media, frames) for media in unit.inputs if media.kind == "image"]
        masks = [_picture(media, frames) for media in unit.inputs if media.kind == "mask"]
        width, height = unit.params.width, unit.params.height
        arguments: dict[str, Any] = {}
        if width and height and self._redraws:
            pictures = [picture.resize((width, height), Image.Resampling.LANCZOS) for picture in pictures]
            masks = [mask.resize((width, height), Image.Resampling.LANCZOS) for mask in masks]
        elif width and height and "max_area" in self._signature:
            arguments["max_area"] = width * height  # else the size that was asked for would only be a shape
        if pictures:
            arguments["image"] = pictures if self.info.max_images > 1 else pictures[0]
        if masks:
            arguments["mask_image"] = masks[0]
        return arguments


def _picture(media: MediaInput, frames: Sequence[Frame]) -> Image.Image:
    return Image.frombytes(media.mode, (media.width, media.height), bytes(frames[media.frame]))


def _scalar_types(call: Any, signature: dict[str, inspect.Parameter]) -> dict[str, set[type]]:
    """Parameters whose annotation allows a number, string or boolean, with the types it allows."""
    hints = get_type_hints(call)
    found: dict[str, set[type]] = {}
    for name in signature:
        annotation = hints.get(name)
        members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
        scalars = {member for member in members if member in (bool, int, float, str)}
        if scalars and not name.endswith(("_embeds", "_kwargs")) and name != "output_type":
            found[name] = scalars
    return found


def _fits(value: bool | int | float | str, allowed: set[type]) -> bool:
    return type(value) in allowed or (type(value) is int and float in allowed)
