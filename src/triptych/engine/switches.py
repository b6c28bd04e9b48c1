"""Turns on what the stage file asks of diffusers, through diffusers' own calls.

Before loading: quantization. On the loaded pipeline: VAE tiling and slicing, attention backend, compilation, step
cache, offload, in this order, and all of it before the hub replaces any forward. What the model, the device or an
installed package cannot do is one `EngineStartError` that names the key.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.quantizers import PipelineQuantizationConfig

from triptych.config.switches import CacheConfig, CompileConfig, OffloadConfig, QuantizationConfig
from triptych.config.tree import EngineArgs
from triptych.engine.base import EngineStartError
from triptych.engine.failures import one_line

__all__ = ["CACHES", "apply_switches", "denoisers", "enable_cache", "offload", "quantization_arguments"]

_DENOISERS = ("transformer", "unet")
CACHES = {
    "first_block_cache": diffusers.FirstBlockCacheConfig,
    "faster_cache": diffusers.FasterCacheConfig,
    "pyramid_attention_broadcast": diffusers.PyramidAttentionBroadcastConfig,
    "mag_cache": diffusers.MagCacheConfig,
    "taylorseer_cache": diffusers.TaylorSeerCacheConfig,
    "text_kv_cache": diffusers.TextKVCacheConfig,
}
_ASK_THE_TIMESTEP = ("faster_cache", "pyramid_attention_broadcast")
_BITS = {"bitsandbytes_4bit": "load_in_4bit", "bitsandbytes_8bit": "load_in_8bit"}


@contextlib.contextmanager
def _key(name: str, found: str) -> Iterator[None]:
    """Whatever diffusers raises becomes one line with the key at fault."""
    try:
        yield
    except EngineStartError:
        raise
    except Exception as error:
        raise EngineStartError(f"engine_args.{name}: {found} cannot be had here: {one_line(error)}") from error


def denoisers(pipe: Any) -> dict[str, Any]:
    """The models that run at each step, by the names of the pipeline."""
    return {
        name: module
        for name, module in pipe.components.items()
        if name.startswith(_DENOISERS) and isinstance(module, torch.nn.Module)
    }


# ---- while loading


def quantization_arguments(args: EngineArgs, folder: Path) -> dict[str, Any]:
    """Arguments of `from_pretrained` that quantize while loading. Raises `EngineStartError`."""
    quantization = args.quantization
    if quantization is None:
        return {}
    index = json.loads((folder / "model_index.json").read_bytes())
    libraries = {name: entry[0] for name, entry in index.items() if isinstance(entry, list) and entry[0] is not None}
    names = quantization.components or tuple(name for name in libraries if name.startswith(_DENOISERS))
    if unknown := [name for name in names if name not in libraries]:
        there = ", ".join(sorted(libraries))
        raise EngineStartError(f"engine_args.quantization: no component {unknown[0]!r} in the model; it has {there}")
    if quantization.name == "layerwise_casting":
        return {}
    with _key("quantization", quantization.name):
        mapping = {name: _quantization_config(quantization, libraries[name]) for name in names}
        return {"quantization_config": PipelineQuantizationConfig(quant_mapping=mapping)}


def _quantization_config(quantization: QuantizationConfig, library: str) -> Any:
    package = transformers if library == "transformers" else diffusers
    if quantization.name == "torchao":
        kind = getattr(importlib.import_module("torchao.quantization"), quantization.options["quant_type"])
        return package.TorchAoConfig(kind())
    return package.BitsAndBytesConfig(**{_BITS[quantization.name]: True}, **quantization.options)


# ---- on the loaded pipeline


def apply_switches(pipe: Any, args: EngineArgs, *, device: torch.device, dtype: torch.dtype) -> None:
    """Turn on everything but the cache and offload. Raises `EngineStartError`."""
    if args.quantization is not None and args.quantization.name == "layerwise_casting":
        _cast_layers(pipe, args.quantization, dtype)
    for key, method in (("vae_tiling", "enable_tiling"), ("vae_slicing", "enable_slicing")):
        if getattr(args, key):
            _enable_on_vae(pipe, key, method)
    if args.attention_backend is not None:
        _set_attention_backend(pipe, args.attention_backend, device=device, dtype=dtype)
    if args.compile is not None:
        _compile(pipe, args.compile)


def _cast_layers(pipe: Any, quantization: QuantizationConfig, dtype: torch.dtype) -> None:
    storage = getattr(torch, quantization.options.get("storage_dtype", "float8_e4m3fn"))
    for name in quantization.components or denoisers(pipe):
        module = getattr(pipe, name)
        with _key("quantization", f"layerwise_casting of {name} ({type(module).__name__})"):
            module.enable_layerwise_casting(storage_dtype=storage, compute_dtype=dtype)


def _enable_on_vae(pipe: Any, key: str, method: str) -> None:
    vae = getattr(pipe, "vae", None)
    if vae is None:
        raise EngineStartError(f"engine_args.{key}: {type(pipe).__name__} has no VAE")
    with _key(key, f"{key} of {type(vae).__name__}"):
        getattr(vae, method)()


def _set_attention_backend(pipe: Any, backend: str, *, device: torch.device, dtype: torch.dtype) -> None:
    # Requirements that diffusers does not look at show when the kernel first runs: better now than with a request.
    with _key("attention_backend", f"{backend!r}"), torch.no_grad():
        query = torch.zeros(1, 8, 2, 64, device=device, dtype=dtype)
        dispatch_attention_fn(query, query, query, backend=AttentionBackendName(backend))
    for name, module in denoisers(pipe).items():
        processors = getattr(module, "attn_processors", {}).values()
        submodules = (getattr(layer, "processor", None) for layer in module.modules())
        if not any(hasattr(processor, "_attention_backend") for processor in (*processors, *submodules)):
            what = f"{name} ({type(module).__name__})"
            raise EngineStartError(f"engine_args.attention_backend: {what} has no attention that a backend could do")
        with _key("attention_backend", f"{backend!r}"):
            module.set_attention_backend(backend)


def _compile(pipe: Any, config: CompileConfig) -> None:
    options: dict[str, Any] = {"fullgraph": config.fullgraph, "dynamic": config.dynamic, "backend": config.backend}
    if config.mode != "default":
        options["mode"] = config.mode
    for name, module in denoisers(pipe).items():
        what = f"scope {config.scope} of {name} ({type(module).__name__})"
        with _key("compile", what):
            if config.scope == "blocks":
                module.compile_repeated_blocks(**options)
            else:
                # Not `module.compile()`: that would trace the hub, which goes into `forward`, too.
                module.forward = torch.compile(module.forward, **options)


def enable_cache(pipe: Any, config: CacheConfig, *, timestep: Callable[[], Any]) -> None:
    """Turn on a step cache; `timestep` gives that of the one request that runs. Raises `EngineStartError`."""
    options = dict(config.options)
    if config.name in _ASK_THE_TIMESTEP:
        options["current_timestep_callback"] = timestep
    for name, module in denoisers(pipe).items():
        what = f"{config.name} of {name} ({type(module).__name__})"
        if not hasattr(module, "enable_cache"):
            raise EngineStartError(f"engine_args.cache: {what}: diffusers has no step caches for this class")
        with _key("cache", what):
            before = _hooks(module)
            module.enable_cache(CACHES[config.name](**options))
        if _hooks(module) == before:
            raise EngineStartError(f"engine_args.cache: {what}: none of its blocks takes this cache with these options")


def _hooks(module: torch.nn.Module) -> int:
    registries = (getattr(part, "_diffusers_hook", None) for part in module.modules())
    return sum(len(registry.hooks) for registry in registries if registry is not None)


def offload(pipe: Any, config: OffloadConfig, *, device: torch.device) -> None:
    """Leave weights in host memory until `device` computes with them. Raises `EngineStartError`."""
    with _key("offload", config.name):
        if config.name == "model":
            pipe.enable_model_cpu_offload(device=device)
            _keep_model_hooks(pipe)
        elif config.name == "sequential":
            pipe.enable_sequential_cpu_offload(device=device)
        else:
            options = {"num_blocks_per_group": 1} | config.options
            pipe.enable_group_offload(onload_device=device, offload_device=torch.device("cpu"), **options)


def _keep_model_hooks(pipe: Any) -> None:
    """After each call a pipeline takes its hooks out of the models and puts new ones in, and that would drop the hub's
    switch with them. Only what it is for is done instead: every model goes back to host memory."""
    hooks, components = tuple(pipe._all_hooks), tuple(pipe.components.values())

    def free() -> None:
        for component in components:
            if hasattr(component, "_reset_stateful_cache"):
                component._reset_stateful_cache()
        for hook in hooks:
            hook.offload()

    object.__setattr__(pipe, "maybe_free_model_hooks", free)
