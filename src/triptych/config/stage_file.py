"""A stage file on disk becomes a checked `StageFile`, or a `ConfigError` with file, key path, found and wanted.

YAML text, then plain data (`strict_yaml`), then the frozen tree (`tree`), then what no single key can tell: engine and
routing names, presets. Devices and counts are left to `plan`, for flags may still change them.
"""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from triptych.config.fields import Location, Problem, explain, key_path, short
from triptych.config.parameters import validate_defaults
from triptych.config.strict_yaml import load_yaml
from triptych.config.tree import StageConfig, StageFile
from triptych.errors import ConfigError

__all__ = ["BUILTIN_ENGINES", "ENGINE_GROUP", "ROUTING_POLICIES", "read_stage_file"]

BUILTIN_ENGINES = ("diffusers", "simulated")
ENGINE_GROUP = "triptych.engines"
ROUTING_POLICIES = ("round_robin", "strict_round_robin", "least_work")

_IGNORED_KEYS: dict[Location, tuple[str, ...]] = {
    (): ("async_chunk",),
    ("stage",): ("final_output", "final_output_type", "engine_input_source", "async_chunk"),
    ("stage", "runtime"): ("process", "max_batch_size"),
}
_NEW_FORM = """\
the list `stages` with one entry:
  stages:
    - stage_id: 0
      stage_type: diffusion
      runtime: {devices: "0,1", num_replicas: 2}
      engine_args: {model: ORG/NAME}"""


def read_stage_file(path: str | Path) -> StageFile:
    """What the file says, checked as far as flags cannot change it. Raises `ConfigError`."""
    raw = load_yaml(path)
    stages = _stage_list(raw, str(path))
    warnings = _drop_ignored(raw, stages, str(path))
    _check_stage_types(stages, str(path))
    try:
        stage_file = StageFile.model_validate(raw)
    except ValidationError as error:
        raise _config_error(explain(error), str(path)) from error
    _check_stage(stage_file.stages[0], f"{path}: stages[0]")
    stage_file._warnings = warnings
    return stage_file


def _stage_list(raw: Any, path: str) -> list[Any]:
    if not isinstance(raw, dict):
        raise ConfigError(
            f"the file holds a {type(raw).__name__}", where=path, wanted="a mapping with the key `stages`"
        )
    if "stage_args" in raw:
        raise ConfigError("this form is no longer read", where=f"{path}: stage_args", wanted=_NEW_FORM)
    stages = raw.get("stages")
    if "stages" in raw and not isinstance(stages, list):
        raise ConfigError("not a list", where=f"{path}: stages", found=short(stages), wanted="a list with one stage")
    if stages == []:
        raise ConfigError("the list is empty", where=f"{path}: stages", wanted="a list with one stage")
    return stages or []


def _drop_ignored(raw: dict[str, Any], stages: list[Any], path: str) -> tuple[str, ...]:
    warnings: list[str] = []

    def drop(section: object, kind: Location, at: Location) -> None:
        if isinstance(section, dict):
            for key in _IGNORED_KEYS[kind]:
                if key in section:
                    del section[key]
                    warnings.append(f"{path}: {key_path((*at, key))}: the key has no meaning here and is ignored")

    drop(raw, (), ())
    for index, stage in enumerate(stages):
        drop(stage, ("stage",), ("stages", index))
        if isinstance(stage, dict):
            drop(stage.get("runtime"), ("stage", "runtime"), ("stages", index, "runtime"))
    return tuple(warnings)


def _check_stage_types(stages: list[Any], path: str) -> None:
    for index, stage in enumerate(stages):
        found = stage.get("stage_type", "diffusion") if isinstance(stage, dict) else "diffusion"
        if found != "diffusion":
            raise ConfigError(
                f"stages of type {short(found)!r} are not served here",
                where=f"{path}: stages[{index}].stage_type",
                found=short(found),
                wanted="'diffusion'",
            )
    if len(stages) > 1:
        raise ConfigError(
            "several stages are not served yet", where=f"{path}: stages", found=len(stages), wanted="exactly one stage"
        )


def _check_stage(stage: StageConfig, where: str) -> None:
    if stage.stage_id != 0:
        raise ConfigError(
            "stage ids count from 0", where=f"{where}.stage_id", found=stage.stage_id, wanted="0 for the only stage"
        )
    check_name(stage.runtime.routing, ROUTING_POLICIES, "routing policy", where=f"{where}.runtime.routing")
    engine = stage.engine_args.engine
    if engine not in BUILTIN_ENGINES:
        known = (*BUILTIN_ENGINES, *sorted(point.name for point in entry_points(group=ENGINE_GROUP)))
        check_name(engine, known, "engine", where=f"{where}.engine_args.engine")
    validate_defaults(stage.default_sampling_params, where=f"{where}.default_sampling_params")


def check_name(name: str, known: tuple[str, ...], what: str, *, where: str) -> None:
    """Raises `ConfigError` that lists the good names."""
    if name not in known:
        raise ConfigError(f"unknown {what}", where=where, found=name, wanted=f"one of {', '.join(known)}")


# ---- validation errors in plain words


def _config_error(problem: Problem, path: str) -> ConfigError:
    where = f"{path}: {key_path(problem.location)}" if problem.location else path
    message, found, wanted = problem.message, problem.found, problem.wanted
    if problem.kind == "extra_forbidden":
        message, found, wanted = "unknown key", problem.location[-1], _nearest_key(problem.location)
    elif problem.kind != "missing":
        found = short(found)
    if problem.others:
        message += f" (the first of {problem.others + 1} problems)"
    return ConfigError(message, where=where, found=found, wanted=wanted)


def _nearest_key(location: Location) -> str:
    section = _section_at(location[:-1])
    key, known = str(location[-1]), list(section.model_fields)
    homes = {name: home for home, model in _sections(StageFile) for name in model.model_fields}
    if near := difflib.get_close_matches(key, known, n=1):
        return f"`{near[0]}`?"
    if near := difflib.get_close_matches(key, homes, n=1, cutoff=0.8):
        return f"`{'.'.join(filter(None, (homes[near[0]], near[0])))}`?"
    return f"one of {', '.join(known)}"


def _section_at(location: Location) -> type[BaseModel]:
    section: type[BaseModel] = StageFile
    for part in location:
        if isinstance(part, str):
            section = _section_of(section, part) or section
    return section


def _section_of(model: type[BaseModel], field: str) -> type[BaseModel] | None:
    annotation = model.model_fields[field].annotation
    candidates = [annotation, *get_args(annotation)]
    return next((kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _sections(model: type[BaseModel], home: str = "") -> list[tuple[str, type[BaseModel]]]:
    found = [(home, model)]
    for name in model.model_fields:
        if section := _section_of(model, name):
            found += _sections(section, f"{home}.{name}".removeprefix("."))
    return found
