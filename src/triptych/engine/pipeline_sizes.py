"""Which sizes and frame counts a loaded pipeline can make, read from its configuration and asked of `check_inputs`.

Pipelines say it in different ways, or round without a word; the rules here are checked by tests that make pictures
of odd multiples with every supported family.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["default_size", "frame_multiple", "size_multiple"]

_MAX_FACTOR = 64


def size_multiple(pipe: Any) -> int:
    """Pixels that width and height must be multiples of."""
    base = _spatial_compression(pipe) * _patch(pipe)
    for factor in range(1, _MAX_FACTOR + 1):
        verdict = _accepts(pipe, base * factor)
        if verdict is None:
            break
        if verdict:
            return base * factor
    return base


def default_size(pipe: Any, parameters: Mapping[str, inspect.Parameter], multiple: int) -> tuple[int, int]:
    """(width, height) that the pipeline draws when none is asked for."""
    named = [parameters[name].default for name in ("width", "height") if name in parameters]
    if len(named) == 2 and all(isinstance(side, int) for side in named):
        return named[0], named[1]
    if (pixels := pipe.config.get("default_sample_size")) is not None:
        return pixels, pixels
    scale = _spatial_compression(pipe)
    config = getattr(_denoiser(pipe), "config", {})
    if "sample_height" in config and "sample_width" in config:
        return config["sample_width"] * scale, config["sample_height"] * scale
    sample = getattr(pipe, "default_sample_size", None) or config.get("sample_size")
    if isinstance(sample, int):
        return sample * scale, sample * scale
    if sample is not None:
        return sample[1] * scale, sample[0] * scale
    side = 1024 // multiple * multiple
    return side, side


def frame_multiple(pipe: Any) -> int:
    """Frame counts are `k * frame_multiple + 1`."""
    for name in ("vae_scale_factor_temporal", "vae_temporal_compression_ratio"):
        if (ratio := getattr(pipe, name, None)) is not None:
            return int(ratio)
    return 1


def _denoiser(pipe: Any) -> Any:
    for name in ("transformer", "unet", "transformer_2", "prior", "decoder"):
        if (model := getattr(pipe, name, None)) is not None:
            return model
    return None


def _spatial_compression(pipe: Any) -> int:
    for name in ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio"):
        if (ratio := getattr(pipe, name, None)) is not None:
            return int(ratio)
    return 1


def _patch(pipe: Any) -> int:
    """Latent pixels per side of one token, whether the transformer cuts them or the pipeline packs them before."""
    config = getattr(_denoiser(pipe), "config", {})
    declared = config.get("patch_size") or config.get("all_patch_size") or 1
    patch = max(declared[-2:]) if isinstance(declared, list | tuple) else declared
    vae = getattr(pipe, "vae", None)
    latent_channels = (vae.config.get("latent_channels") or vae.config.get("z_dim")) if vae is not None else None
    channels = config.get("out_channels") or config.get("in_channels")
    if latent_channels and channels:
        packed = math.isqrt(channels // latent_channels)
        if packed * packed * latent_channels == channels:
            patch = max(patch, packed)
    return int(patch)


def _accepts(pipe: Any, multiple: int) -> bool | None:
    """Whether `check_inputs` takes odd multiples; None if it cannot be asked."""
    check = getattr(pipe, "check_inputs", None)
    if check is None:
        return None
    defaults = inspect.signature(type(pipe).__call__).parameters
    asked = inspect.signature(check).parameters
    if not {"width", "height"}.issubset(asked):
        return None
    arguments: dict[str, Any] = {}
    for name, parameter in asked.items():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            known = name in defaults and defaults[name].default is not inspect.Parameter.empty
            arguments[name] = defaults[name].default if known else None
    arguments |= {"prompt": "a", "width": 9 * multiple, "height": 11 * multiple}
    try:
        check(**arguments)
    except ValueError as error:
        return None if "divisible" not in str(error) else False
    except (TypeError, AttributeError):
        return None
    return True
