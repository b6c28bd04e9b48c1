"""`triptych.json` beside the weights: what a checkpoint wants that its pipeline's defaults do not say.

    {"default_sampling_params": {"num_inference_steps": 20, "guidance_scale": 3.0, "width": 64, "height": 64},
     "call_args": {"use_resolution_binning": false}, "sizes": [[64, 64]], "frame_counts": []}

`call_args` are always passed to the pipeline's call and are closed to requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from triptych.engine.base import EngineStartError

__all__ = ["SETTINGS_FILE", "ModelDefaults", "ModelSettings", "read_settings"]

SETTINGS_FILE = "triptych.json"

Positive = Annotated[int, msgspec.Meta(ge=1)]
Guidance = Annotated[float, msgspec.Meta(ge=0, le=100)]
Scalar = bool | int | float | str


class ModelDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Values for parameters that a request leaves out; None leaves them to the pipeline."""

    negative_prompt: str | None = None
    width: Positive | None = None
    height: Positive | None = None
    num_inference_steps: Positive | None = None
    guidance_scale: Guidance | None = None
    true_cfg_scale: Guidance | None = None
    strength: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    num_frames: Positive | None = None
    fps: Annotated[int, msgspec.Meta(ge=1, le=120)] | None = None


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file. `sizes`, (width, height) in pixels, and `frame_counts` are the only ones to be asked for."""

    default_sampling_params: ModelDefaults = ModelDefaults()
    call_args: dict[str, Scalar] = {}
    sizes: tuple[tuple[Positive, Positive], ...] = ()
    frame_counts: tuple[Positive, ...] = ()


def read_settings(folder: Path) -> ModelSettings:
    """The settings in `folder`, or the empty ones. Raises `EngineStartError`."""
    path = folder / SETTINGS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=ModelSettings)
    except FileNotFoundError:
        return ModelSettings()
    except (OSError, msgspec.DecodeError, UnicodeError) as error:
        raise EngineStartError(f"{path}: {error}") from error
