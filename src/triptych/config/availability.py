"""What is understood and checked but not built in this version: one line each, deleted when it is built.

`check` lists what a configuration uses of it as warnings, `serve` refuses to start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triptych.config.devices import Origin
from triptych.config.settings import ServeSettings
from triptych.config.tree import StageConfig
from triptych.errors import ConfigError

__all__ = ["unavailable"]

_OFF: tuple[Any, ...] = (None, False, (), {}, [], "", "none", "off")

# Key of the stage, and what it says there; anything but _OFF is refused.
_STAGE_KEYS: tuple[tuple[str, Callable[[StageConfig], Any]], ...] = (
    ("runtime.executor", lambda stage: stage.runtime.executor if stage.runtime.executor != "process" else None),
    ("engine_args.parallel_config", lambda stage: _several_plans(stage)),
)

# Settings that are not a key of the stage as well.
_SETTINGS: tuple[tuple[str, Callable[[ServeSettings], Any]], ...] = (
    ("ray_address", lambda settings: settings.ray_address),
)


def _several_plans(stage: StageConfig) -> dict[str, int] | None:
    """diffusers combines no two of its plans for text of any length; parts of the batch go with each of them."""
    parallel = stage.engine_args.parallel_config
    plans = ("ulysses_degree", "ring_degree", "tensor_parallel_size")
    degrees = {name: value for name, value in parallel if name in plans and value > 1}
    return degrees if len(degrees) > 1 else None


def unavailable(settings: ServeSettings, stage: StageConfig, *, origin: Origin) -> tuple[ConfigError, ...]:
    """One error per part of this configuration that this version cannot serve."""
    used = [(origin(key), value) for key, read in _STAGE_KEYS if (value := read(stage)) not in _OFF]
    used += [(settings.named(field), value) for field, read in _SETTINGS if (value := read(settings)) not in _OFF]
    return tuple(
        ConfigError("not available in this version", where=where, found=None if value is True else value)
        for where, value in used
    )
