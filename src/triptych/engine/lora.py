"""LoRAs that requests choose by name: loaded into the shared models once, switched on for single forwards.

Requests take turns on the same models, so what a forward computes with is settled right before it: the hub calls
`activate` with the state of the unit whose forward is next, whenever that is another than the last one. Units in
different states never share a forward. A scale of 0 is the base model, to the bit.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from triptych.config.lora import lora_file
from triptych.engine.base import EngineStartError
from triptych.engine.failures import one_line
from triptych.errors import ConfigError, ErrorCode, TriptychError
from triptych.messages import Lora

__all__ = ["Loras", "State"]

_log = logging.getLogger(__name__)

State = tuple[str, float] | None
"""Adapter and scale that the models compute with; None: the base model."""


class Loras:
    """The registered LoRAs of one pipeline; `modules` are paths by name. Raises `EngineStartError`."""

    def __init__(self, pipe: Any, modules: Mapping[str, str]) -> None:
        self._adapters: dict[str, str] = {}
        for name, path in modules.items():
            # Names of clients may hold dots and slashes, those of adapters are parts of parameter names.
            self._adapters[name] = _load(pipe, name, path, adapter=f"lora_{len(self._adapters)}")
        models = [model for model in pipe.components.values() if isinstance(model, torch.nn.Module)]
        self._layers: list[Any] = [
            part for model in models for part in model.modules() if isinstance(part, BaseTunerLayer)
        ]
        self.active: Hashable = None
        self.activate(None)  # diffusers leaves what it loaded last switched on

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may ask for."""
        return tuple(self._adapters)

    def state(self, lora: Lora | None) -> State:
        """What the forwards of a unit with this LoRA need. Raises `TriptychError` for a name that is not registered."""
        if lora is None:
            return None
        if lora.name not in self._adapters:
            message = f"lora.name must be one of {', '.join(self.names) or 'none'}, got {lora.name!r}"
            raise TriptychError(ErrorCode.INVALID_VALUE, message, param="lora.name")
        return (self._adapters[lora.name], lora.scale) if lora.scale else None

    def activate(self, state: Hashable) -> None:
        """Bring the models into a state that `state` gave."""
        self.active = state
        adapter, scale = state if isinstance(state, tuple) else (None, None)
        for layer in self._layers:
            # The setters of peft also go through all weights to say which may be trained: eight times as long.
            layer._disable_adapters = adapter is None
            if adapter is not None:
                layer._active_adapter = [adapter]
                layer.set_scale(adapter, scale)


def _load(pipe: Any, name: str, path: str, *, adapter: str) -> str:
    where = f"engine_args.lora_modules: {name}"
    if not hasattr(pipe, "load_lora_weights"):
        raise EngineStartError(f"{where}: diffusers loads no LoRA into {type(pipe).__name__}")
    try:
        file = lora_file(path, where=where)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")  # that is what we are here for
            pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=adapter, local_files_only=True)
    except ConfigError as error:
        raise EngineStartError(str(error)) from error
    except Exception as error:
        raise EngineStartError(f"{where}: {path} cannot be loaded: {one_line(error)}") from error
    parts = [part for part, adapters in pipe.get_list_adapters().items() if adapter in adapters]
    if not parts:
        raise EngineStartError(f"{where}: {path} holds no LoRA weights for {type(pipe).__name__}")
    _log.info("LoRA %s from %s for %s", name, file, ", ".join(parts))
    return adapter
