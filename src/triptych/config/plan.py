"""Settings and stage file become one `ServePlan`: all that `serve` needs to know, checked before anything loads.

Flags are folded into the stage, the model is told apart from its served name, devices are dealt out to replicas.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from triptych.config.availability import unavailable
from triptych.config.combinations import check_combinations
from triptych.config.devices import Assignment, Machine, Origin, assign_devices, check_devices, discover_machine
from triptych.config.model_source import ModelSource, resolve_model
from triptych.config.parameters import SamplingDefaults, validate_defaults
from triptych.config.settings import ServeSettings
from triptych.config.stage_file import read_stage_file
from triptych.config.tls import check_tls
from triptych.config.tree import StageConfig
from triptych.errors import ConfigError
from triptych.messages import ReplicaSpec
from triptych.models import DEFAULT_MODEL

__all__ = ["ServePlan", "build_plan"]

_EMBEDDED_REPLICAS = 2
_UNNAMED = "(no model)"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

# Settings that win over the key of the same name in a section of the stage.
_OVERRIDES = (
    ("runtime", "num_replicas"),
    ("runtime", "devices"),
    ("runtime", "executor"),
    ("runtime", "max_queue_size"),
    ("engine_args", "max_num_seqs"),
    ("engine_args", "lora_modules"),
    ("engine_args", "revision"),
)
# Keys that the simulated engine would not read.
_DIFFUSERS_KEYS = (
    ("runtime", "cpu_threads"),
    ("engine_args", "dtype"),
    ("engine_args", "deterministic"),
    ("engine_args", "warmup"),
    ("engine_args", "max_num_batched_pixels"),
    ("engine_args", "revision"),
    ("engine_args", "compile"),
    ("engine_args", "attention_backend"),
    ("engine_args", "quantization"),
    ("engine_args", "cache"),
    ("engine_args", "offload"),
    ("engine_args", "vae_tiling"),
    ("engine_args", "vae_slicing"),
    ("engine_args", "lora_modules"),
)


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What will be served; each of `replicas` is one engine process.

    `stage` has the flags folded in and what was left out filled in; `settings` says the same. `defaults` are its
    `default_sampling_params`, within the limits. `model` is the name shown to clients, the first of
    `served_model_names`. A hub model is in `replicas` by its id until `fetch_model` has brought it to disk. `warnings`
    are for the log, or for `check` to print.
    """

    settings: ServeSettings
    stage: StageConfig
    defaults: SamplingDefaults
    replicas: tuple[ReplicaSpec, ...]
    assignments: tuple[Assignment, ...]
    served_model_names: tuple[str, ...]
    model: str
    model_source: ModelSource
    warnings: tuple[str, ...] = ()


def build_plan(
    settings: ServeSettings,
    *,
    environ: Mapping[str, str] = os.environ,
    machine: Machine | None = None,
    refuse_unavailable: bool = True,
) -> ServePlan:
    """Check everything that can be checked without loading. Raises `ConfigError`.

    A model left to the command line, or what this version does not build, is an error of its own kind: with
    `refuse_unavailable=False` (for `check`) a warning.
    """
    _check_access(settings)
    stage, warnings = _base_stage(settings)
    stage, overridden = _fold(stage, settings)

    def origin(key: str) -> str:
        field, path = key.rpartition(".")[2], settings.stage_configs_path
        return f"{path}: stages[0].{key}" if path and key not in overridden else settings.named(field)

    _check_engine_keys(stage, origin=origin)
    presets = f"{settings.stage_configs_path}: stages[0].default_sampling_params"
    defaults = validate_defaults(stage.default_sampling_params, where=presets, limits=settings.limits())
    source = _model_source(settings, stage, origin=origin)
    missing = [*_missing_model(source, settings, stage, origin=origin), *unavailable(settings, stage, origin=origin)]
    check_devices(stage, origin=origin)
    if missing and refuse_unavailable:
        raise missing[0]
    refused = (f"{part}; `serve` refuses this" for part in missing)
    machine = _machine_for(settings, machine or discover_machine(environ))
    assignments, notes = assign_devices(stage, machine, origin=origin, environ=environ)
    check_combinations(stage.engine_args, kind=assignments[0].kind, origin=origin)
    stage = _effective(stage, assignments, source)
    # The file says where the weights are; MODEL then says how clients call them.
    names = settings.served_model_names or (settings.model or source.name,)
    return ServePlan(
        settings=settings.model_copy(
            update={key: getattr(getattr(stage, section), key) for section, key in _OVERRIDES}
        ),
        stage=stage,
        defaults=defaults,
        replicas=_replica_specs(settings, stage, assignments, model=source.path or source.name),
        assignments=assignments,
        served_model_names=names,
        model=names[0],
        model_source=source,
        warnings=(*warnings, *machine.warnings, *notes, *refused, *_exposure(settings)),
    )


def _base_stage(settings: ServeSettings) -> tuple[StageConfig, tuple[str, ...]]:
    if settings.stage_configs_path is not None:
        stage_file = read_stage_file(settings.stage_configs_path)
        return stage_file.stages[0], stage_file.warnings
    replicas = _EMBEDDED_REPLICAS if _is_embedded_default(settings) else 1
    stage = StageConfig(stage_id=0, stage_type="diffusion")
    return stage.model_copy(update={"runtime": stage.runtime.model_copy(update={"num_replicas": replicas})}), ()


def _is_embedded_default(settings: ServeSettings) -> bool:
    return settings.stage_configs_path is None and settings.model in (None, DEFAULT_MODEL)


def _machine_for(settings: ServeSettings, machine: Machine) -> Machine:
    """The embedded model has two replicas unless told otherwise: beside a single accelerator it runs on CPU slots."""
    chosen = settings.num_replicas is not None or settings.devices is not None
    if chosen or not _is_embedded_default(settings) or not 0 < len(machine.accelerators) < _EMBEDDED_REPLICAS:
        return machine
    note = f"{_EMBEDDED_REPLICAS} replicas run on CPU slots: one device is visible, and --num-replicas 1 would use it"
    return replace(machine, accelerators=(), warnings=(*machine.warnings, note))


def _fold(stage: StageConfig, settings: ServeSettings) -> tuple[StageConfig, set[str]]:
    """The stage with settings in place of its keys, and which keys these are."""
    updates: dict[str, dict[str, Any]] = {"runtime": {}, "engine_args": {}}
    overridden: set[str] = set()
    for section, key in _OVERRIDES:
        value = getattr(settings, key)
        if value not in (None, {}):
            updates[section][key] = value
            overridden.add(f"{section}.{key}")
    return (
        stage.model_copy(
            update={
                "runtime": stage.runtime.model_copy(update=updates["runtime"]),
                "engine_args": stage.engine_args.model_copy(update=updates["engine_args"]),
            }
        ),
        overridden,
    )


def _check_engine_keys(stage: StageConfig, *, origin: Origin) -> None:
    """Nothing is accepted without effect. Raises `ConfigError`."""
    if stage.engine_args.engine != "simulated":
        return
    for section, key in _DIFFUSERS_KEYS:
        part = getattr(stage, section)
        if (found := getattr(part, key)) != type(part).model_fields[key].default:
            shown = found.model_dump(exclude_defaults=True) if isinstance(found, BaseModel) else found
            raise ConfigError("read by engine diffusers only", where=origin(f"{section}.{key}"), found=shown)


def _effective(stage: StageConfig, assignments: tuple[Assignment, ...], source: ModelSource) -> StageConfig:
    """The stage with what was left out filled in."""
    devices = tuple(device for assignment in assignments for device in assignment.devices)
    model = None if source.name == _UNNAMED else source.name
    runtime: dict[str, Any] = {"devices": devices}
    if stage.engine_args.engine != "simulated":
        runtime["cpu_threads"] = assignments[0].cpu_threads
    return stage.model_copy(
        update={
            "runtime": stage.runtime.model_copy(update=runtime),
            "engine_args": stage.engine_args.model_copy(update={"model": model}),
        }
    )


def _model_source(settings: ServeSettings, stage: StageConfig, *, origin: Origin) -> ModelSource:
    """Where the weights are: the stage file says it, else MODEL."""
    engine = stage.engine_args.engine
    name = stage.engine_args.model or settings.model
    if engine != "diffusers":
        # Other engines read no weights, or know better than we do what their model names mean.
        return ModelSource("none", name or engine)
    if name is None and settings.stage_configs_path is not None:
        return ModelSource("none", _UNNAMED)
    where = origin("engine_args.model") if stage.engine_args.model else settings.named("model")
    source = resolve_model(name or DEFAULT_MODEL, where=where)
    if stage.engine_args.revision is not None and source.kind != "hub":
        raise ConfigError(
            "revision needs a Hugging Face model",
            where=origin("engine_args.revision"),
            found=stage.engine_args.revision,
            wanted="a Hugging Face id ORG/NAME as the model, or no revision",
        )
    return source


def _missing_model(
    source: ModelSource, settings: ServeSettings, stage: StageConfig, *, origin: Origin
) -> tuple[ConfigError, ...]:
    if source.kind == "none" and source.name == _UNNAMED:
        wanted = f"a model there, or {settings.named('model')} on the command line"
        return (ConfigError("no model is named", where=origin("engine_args.model"), wanted=wanted),)
    return ()


def _replica_specs(
    settings: ServeSettings, stage: StageConfig, assignments: tuple[Assignment, ...], *, model: str
) -> tuple[ReplicaSpec, ...]:
    engine_args = stage.engine_args.model_dump(mode="json", exclude_unset=True)
    return tuple(
        ReplicaSpec(
            replica_id=number,
            stage_id=stage.stage_id,
            engine=stage.engine_args.engine,
            model=model,
            device_kind=assignment.kind,
            devices=assignment.devices,
            visible_devices=assignment.visible_devices,
            cpu_threads=assignment.cpu_threads,
            cpu_affinity=assignment.cpu_affinity,
            max_num_seqs=stage.engine_args.max_num_seqs,
            engine_args=engine_args,
            log_level=settings.log_level,
            log_format=settings.log_format,
        )
        for number, assignment in enumerate(assignments)
    )


def _check_access(settings: ServeSettings) -> None:
    """Raises `ConfigError`."""
    check_tls(settings)
    if settings.admin_api_key is not None and settings.admin_api_key in settings.api_keys:
        message = f"is also a {settings.named('api_keys')}, so every client could change replicas"
        raise ConfigError(message, where=settings.named("admin_api_key"), wanted="a key of its own")


def _exposure(settings: ServeSettings) -> tuple[str, ...]:
    if settings.host in _LOOPBACK or settings.api_keys:
        return ()
    where, port = settings.named("host"), settings.port
    return (f"{where} {settings.host}: no API key is set, so whoever reaches port {port} can use the server",)
