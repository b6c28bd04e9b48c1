"""Settings that are right by themselves and wrong together, or wrong on this machine: told before anything loads.

Each rule is one test and one sentence. What only the loaded model can tell is an `EngineStartError` of the engine.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

from triptych.config.devices import Origin
from triptych.config.lora import lora_file
from triptych.config.tree import EngineArgs
from triptych.errors import ConfigError

__all__ = ["check_combinations"]

_PACKAGES = {"bitsandbytes_4bit": "bitsandbytes", "bitsandbytes_8bit": "bitsandbytes", "torchao": "torchao"}


def check_combinations(args: EngineArgs, *, kind: Literal["cpu", "cuda", "none"], origin: Origin) -> None:
    """Raises `ConfigError` for the first rule that `args` break on devices of `kind`."""
    _check_slots(args, origin=origin)
    _check_compile(args, origin=origin)
    _check_ranks(args, kind=kind, origin=origin)
    if args.offload is not None and kind == "cpu":
        where = origin("engine_args.offload")
        raise ConfigError("replicas run on CPUs here, and weights already are in host memory", where=where)
    if args.quantization is not None:
        _check_quantization(args.quantization.name, kind=kind, where=origin("engine_args.quantization"))
    for name, path in args.lora_modules.items():
        lora_file(path, where=f"{origin('engine_args.lora_modules')}: {name}")


def _check_quantization(name: str, *, kind: Literal["cpu", "cuda", "none"], where: str) -> None:
    package = _PACKAGES.get(name)
    if package == "bitsandbytes" and kind == "cpu":
        wanted = "layerwise_casting, torchao, or none"
        raise ConfigError("needs accelerators, and replicas run on CPUs here", where=where, found=name, wanted=wanted)
    if package is not None and importlib.util.find_spec(package) is None:
        wanted = f"pip install {package}"
        raise ConfigError(f"the package {package} is not installed", where=where, wanted=wanted)


def _check_slots(args: EngineArgs, *, origin: Origin) -> None:
    if args.max_num_seqs == 1:
        return
    if args.cache is not None:
        raise ConfigError(
            f"a step cache keeps the state of one request, and max_num_seqs is {args.max_num_seqs}",
            where=origin("engine_args.cache"),
            found=args.cache.name,
            wanted="max_num_seqs: 1, or no cache",
        )
    if args.offload is not None and args.offload.name == "model":
        raise ConfigError(
            f"requests that take turns need all models at once, and max_num_seqs is {args.max_num_seqs}",
            where=origin("engine_args.offload"),
            found="model",
            wanted="max_num_seqs: 1, or offload: group or sequential",
        )


def _check_compile(args: EngineArgs, *, origin: Origin) -> None:
    if args.compile is None:
        return
    if args.lora_modules:
        raise ConfigError(
            "the model would be compiled anew with every change of LoRA",
            where=origin("engine_args.compile"),
            wanted="compile or lora_modules, not both",
        )
    if args.deterministic and args.compile.mode.startswith("max-autotune"):
        raise ConfigError(
            "replicas would choose their kernels by measured times, and deterministic is true",
            where=origin("engine_args.compile"),
            found=args.compile.mode,
            wanted="mode: default or reduce-overhead",
        )


def _check_ranks(args: EngineArgs, *, kind: Literal["cpu", "cuda", "none"], origin: Origin) -> None:
    parallel = args.parallel_config
    if parallel.devices_per_replica == 1 or kind == "none":
        return
    for name in ("ring_degree", "tensor_parallel_size"):
        if (degree := getattr(parallel, name)) > 1 and kind == "cpu":
            where = f"{origin('engine_args.parallel_config')}.{name}"
            wanted = "cfg_parallel_size, ulysses_degree, or world_size alone"
            raise ConfigError("needs accelerators", where=where, found=degree, wanted=wanted)
    for key in ("cache", "offload"):
        if getattr(args, key) is not None:
            raise ConfigError(
                f"not with {parallel.devices_per_replica} devices per replica",
                where=origin(f"engine_args.{key}"),
                found=getattr(args, key).name,
                wanted=f"one device per replica, or no {key}",
            )
