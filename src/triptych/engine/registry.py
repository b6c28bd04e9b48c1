"""Engines by name: the built-in ones and those that installed packages add to the group `triptych.engines`.

The server only looks a name up (which modules the forkserver should preload, is the name known); the dotted
strings are imported in replicas and by `triptych generate`, so the server itself never imports torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from triptych.engine.base import EngineFactory
from triptych.errors import ConfigError

__all__ = ["ENTRY_POINT_GROUP", "EngineEntry", "engine_entry", "engine_names", "import_engine"]

ENTRY_POINT_GROUP = "triptych.engines"
_PRELOAD = ("triptych.engine.preload", "triptych.engine.worker")


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """Where an engine lives (`module:attribute`) and what the forkserver imports before its replicas fork.

    A `paced` engine shows progress in its heartbeat at least every half second, however long a step is.
    """

    factory: str
    preload: tuple[str, ...]
    paced: bool = False


_BUILT_IN = {
    "diffusers": EngineEntry(
        "triptych.engine.diffusers_engine:DiffusersEngine", (*_PRELOAD, "triptych.engine.preload_diffusers")
    ),
    "simulated": EngineEntry(
        "triptych.engine.simulated:SimulatedEngine", (*_PRELOAD, "triptych.engine.simulated"), paced=True
    ),
}


def engine_names() -> tuple[str, ...]:
    """Every name that `engine_args.engine` may hold, sorted."""
    return tuple(sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}))


def engine_entry(name: str) -> EngineEntry:
    """The engine called `name`; a built-in name wins over a plug-in's. Raises `ConfigError` naming the good ones."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return _plugin(point)
    raise ConfigError(
        "no such engine", where="engine_args.engine", found=name, wanted=f"one of {', '.join(engine_names())}"
    )


def _plugin(point: EntryPoint) -> EngineEntry:
    return EngineEntry(point.value, (*_PRELOAD, point.module))


def import_engine(entry: EngineEntry) -> EngineFactory:
    """Import the engine's module and return its factory. Raises ImportError or AttributeError."""
    module_name, _, attribute = entry.factory.partition(":")
    return cast(EngineFactory, getattr(importlib.import_module(module_name), attribute))
