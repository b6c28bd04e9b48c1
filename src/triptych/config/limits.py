"""How much one request may ask for: the operator's limits, those of the output formats, and the seeds there are.

Every check is of plain values, so it serves requests, presets of a stage file and `triptych generate` alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from triptych.config.parameter_errors import invalid, shown

__all__ = [
    "LARGEST_SIDE",
    "MAX_SEED",
    "Limits",
    "check_entries",
    "check_frames",
    "check_listed",
    "check_pixels",
    "check_seconds",
    "check_seed",
    "check_sides",
    "check_steps",
    "check_timeout",
]

MAX_SEED = 2**63 - 1
LARGEST_SIDE: Mapping[str, int] = {"jpeg": 65_500, "webp": 16_383, "mp4": 16_384}
"""Pixels a side that the encoder of a format can write; a format that is not here takes any."""


_MAX_ENTRIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the operator allows: pixels per frame, frames per clip, denoising steps, seconds per request."""

    max_pixels: int
    max_num_frames: int
    max_num_inference_steps: int
    request_timeout_s: float


def check_entries(values: Mapping[str, object]) -> None:
    """Entries of values that are objects: every bad one is an error to collect. Raises `TriptychError`."""
    for name, value in values.items():
        if isinstance(value, dict) and len(value) > _MAX_ENTRIES:
            raise invalid(name, f"must have at most {_MAX_ENTRIES} entries, got {len(value)}")


def check_listed(value: str, listed: Sequence[str], *, param: str, unit: str = "", got: str | None = None) -> None:
    """What a model can make as it is listed only; an empty list allows all. Raises `TriptychError`."""
    if listed and value not in listed:
        raise invalid(param, f"must be {' or '.join(listed)}{unit} with this model, got {got or value}")


def check_pixels(sides: Sequence[int], limits: Limits, *, param: str) -> None:
    """Pixels of a frame of which both sides are known, or one. Raises `TriptychError`."""
    if prod(sides) > limits.max_pixels:
        pixels = f"{'x'.join(map(shown, sides))} has {shown(prod(sides))} pixels"
        raise invalid(param, f"{pixels}, the limit is {limits.max_pixels}")


def check_sides(sides: Sequence[int], output_format: str, *, param: str) -> None:
    """Sides of a frame in pixels, against what its encoder can write. Raises `TriptychError`."""
    largest = LARGEST_SIDE.get(output_format)
    if largest is not None and (side := max(sides)) > largest:
        raise invalid(param, f"must be at most {largest} pixels a side for {output_format}, got {shown(side)}")


def check_steps(steps: int, limits: Limits, *, fewest: int = 1) -> None:
    """Denoising steps, also against the `fewest` that the model can do with. Raises `TriptychError`."""
    if steps < fewest:
        raise invalid("num_inference_steps", f"must be at least {fewest} with this model, got {steps}")
    if steps > limits.max_num_inference_steps:
        raise invalid("num_inference_steps", f"must be at most {limits.max_num_inference_steps}, got {shown(steps)}")


def check_frames(frames: int, limits: Limits, *, param: str) -> None:
    """Frames of a clip. Raises `TriptychError`."""
    if frames > limits.max_num_frames:
        raise invalid(param, f"must be at most {limits.max_num_frames} frames, got {shown(frames)}")


def check_seconds(seconds: float, fps: int, limits: Limits, *, slack: int) -> None:
    """Length of a clip; the model may round it by up to `slack` frames. Raises `TriptychError`."""
    if seconds * fps > limits.max_num_frames + slack:
        limit = f"{fps} fps and at most {limits.max_num_frames} frames"
        raise invalid("seconds", f"is too long for {limit}, got {shown(seconds)}")


def check_seed(seed: int, n: int) -> None:
    """The seeds of all `n` outputs. Raises `TriptychError`."""
    if seed + n - 1 > MAX_SEED:
        raise invalid("seed", f"must be at most {MAX_SEED - n + 1} for n {n} (image i uses seed + i), got {seed}")


def check_timeout(value: float, limits: Limits) -> None:
    """`timeout` of a request in seconds. Raises `TriptychError`."""
    if value > limits.request_timeout_s:
        raise invalid("timeout", f"must be at most {limits.request_timeout_s:g} seconds, got {shown(value)}")
