"""From the latents of a running pipeline to a picture: its own unpacking and VAE, its own normalisation.

Read from the pipeline and the configuration of its VAE, so a family needs no line here. A clip shows its first frame.
What fits none of the known layouts raises `UnknownLatents`, and then there is just no preview.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

__all__ = ["UnknownLatents", "picture_of"]

_RGB = 3


class UnknownLatents(Exception):
    """No known way leads from these latents to a picture."""


def picture_of(pipe: Any, latents: torch.Tensor, *, width: int, height: int, num_frames: int) -> torch.Tensor:
    """Picture `3 x height x width` in 0..1, sizes in pixels. Runs the VAE; raises `UnknownLatents`."""
    vae = getattr(pipe, "vae", None)
    latents = latents[:1]
    if vae is None:
        picture = latents
    else:
        spatial = _first_frame(_unpacked(pipe, latents, width=width, height=height, num_frames=num_frames))
        picture = _decoded(vae, _patched_out(pipe, _denormalised(vae, spatial)))
    if picture.ndim != 4 or picture.shape[1] != _RGB:
        raise UnknownLatents(f"latents of shape {tuple(latents.shape)} become {tuple(picture.shape)}")
    picture = (picture.float() / 2 + 0.5).clamp(0, 1)
    if picture.shape[-2:] != (height, width):  # drawn in a bin of another size
        picture = torch.nn.functional.interpolate(picture, (height, width), mode="bilinear", antialias=True)
    return picture[0]


def _unpacked(pipe: Any, latents: torch.Tensor, *, width: int, height: int, num_frames: int) -> torch.Tensor:
    """Tokens back to `channels x [frames x] height x width`."""
    if latents.ndim != 3:
        return latents
    unpack = getattr(pipe, "_unpack_latents", None)
    if unpack is None:
        return _rows_and_columns(latents, width=width, height=height)
    parameters = inspect.signature(unpack).parameters
    known: dict[str, Any] = {"height": height, "width": width}
    if "num_frames" in parameters:  # these count in latents, not in pixels
        spatial, temporal = pipe.vae_spatial_compression_ratio, pipe.vae_temporal_compression_ratio
        known = {"height": height // spatial, "width": width // spatial, "num_frames": (num_frames - 1) // temporal + 1}
        known["patch_size"] = pipe.transformer_spatial_patch_size
        known["patch_size_t"] = pipe.transformer_temporal_patch_size
    elif "patch_size" in parameters:
        known["patch_size"] = pipe.transformer.config.patch_size
    known["vae_scale_factor"] = getattr(pipe, "vae_scale_factor", None)
    unpacked: torch.Tensor = unpack(latents, **{name: known[name] for name in known if name in parameters})
    return unpacked


def _rows_and_columns(latents: torch.Tensor, *, width: int, height: int) -> torch.Tensor:
    """Tokens in reading order, of a pipeline that has no function for it."""
    tokens, channels = latents.shape[1:]
    rows = round((tokens * height / width) ** 0.5)
    if rows * (tokens // rows) != tokens:
        raise UnknownLatents(f"{tokens} tokens are no rectangle of {width}x{height}")
    return latents.transpose(1, 2).reshape(1, channels, rows, tokens // rows)


def _first_frame(latents: torch.Tensor) -> torch.Tensor:
    return latents[:, :, :1] if latents.ndim == 5 else latents


def _denormalised(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    config = vae.config
    scale, shift = config.get("scaling_factor") or 1.0, config.get("shift_factor") or 0.0
    if (norm := getattr(vae, "bn", None)) is not None:  # its channels are patches
        std = (norm.running_var + config.get("batch_norm_eps", 1e-5)).sqrt()
        return _per_channel(latents, std) * latents + _per_channel(latents, norm.running_mean)
    mean = config.get("latents_mean", getattr(vae, "latents_mean", None))
    std = config.get("latents_std", getattr(vae, "latents_std", None))
    if mean is None or std is None:
        return latents / scale + shift
    return latents * _per_channel(latents, std) / scale + _per_channel(latents, mean)


def _per_channel(latents: torch.Tensor, values: Any) -> torch.Tensor:
    tensor = torch.as_tensor(values, device=latents.device, dtype=latents.dtype).flatten()
    if len(tensor) != latents.shape[1]:
        raise UnknownLatents(f"{latents.shape[1]} channels, statistics of {len(tensor)}")
    return tensor.view(1, -1, *(1,) * (latents.ndim - 2))


def _patched_out(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    unpatchify = getattr(pipe, "_unpatchify_latents", None)
    return latents if unpatchify is None else unpatchify(latents)


def _decoded(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    config = vae.config
    channels = config.get("latent_channels") or config.get("z_dim")
    if channels is not None and latents.shape[1] != channels:
        raise UnknownLatents(f"{latents.shape[1]} channels, the VAE has {channels}")
    time = (torch.zeros(1, device=latents.device, dtype=vae.dtype),) if config.get("timestep_conditioning") else ()
    decoded: torch.Tensor = vae.decode(latents.to(vae.dtype), *time, return_dict=False)[0]
    return decoded[:, :, 0] if decoded.ndim == 5 else decoded
