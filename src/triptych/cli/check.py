"""`triptych check` and `serve --dry-run`: say what a configuration means on this machine, and load nothing.

Prints the device map, weight size against free memory, the effective configuration as YAML, and warnings. What this
version does not build yet is a warning here and an error in `serve`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from triptych.cli.exit_codes import exit_codes
from triptych.cli.serve import serve_settings
from triptych.config.model_source import cached_path, weight_bytes, weight_dtypes
from triptych.config.settings import flag_specs

if TYPE_CHECKING:
    from rich.table import Table

    from triptych.config.plan import ServePlan

__all__ = ["check", "show_plan"]

_YAML_WIDTH = 10_000  # values stay on their line
_SHOWN_IN_STAGE = frozenset(
    {"num_replicas", "devices", "max_num_seqs", "max_queue_size", "executor", "revision", "lora_modules"}
    | {"served_model_names"}
)
# `engine_args.dtype`, and the types on disk that are then served on CPUs as they are.
_SHARED_AS = {"auto": ("F32", "BF16"), "float32": ("F32",), "float16": ("F16",), "bfloat16": ("BF16",)}


def check(
    stage_file: Annotated[str, typer.Argument(metavar="STAGE_FILE", help="The file to check.", show_default=False)],
) -> None:
    """Check a stage file and show the device map, memory and effective configuration; nothing is loaded.

    TRIPTYCH_ variables count as they would for `serve`. Exit code 0 when the file is right, 2 when it is wrong. What is
    right but not available in this version is a warning here; `serve` refuses it.
    """
    with exit_codes():
        from triptych.config.plan import build_plan

        settings = serve_settings({"stage_configs_path": stage_file})
        show_plan(build_plan(settings, refuse_unavailable=False))


def show_plan(plan: ServePlan) -> None:
    """Print a plan for a reader; pipes get whole lines."""
    # These take a while to import, and a wrong configuration is told without them.
    import yaml
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    table = _device_map(plan)
    if not console.is_terminal:
        console.width = max(console.width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    console.print(table)
    weights, notes = _memory(plan)
    console.print(Text(weights))
    for title, section in (("stage file", _stage_section(plan)), ("flags", _flags(plan))):
        text = yaml.safe_dump(section, sort_keys=False, allow_unicode=True, width=_YAML_WIDTH)
        console.print(Text(f"\n# effective {title}\n{text.rstrip()}"))
    console.print()
    for warning in (*plan.warnings, *notes):
        console.print(Text(f"warning: {warning}", style="yellow"))


def _device_map(plan: ServePlan) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"Device map of {plan.model}"), title_justify="left")
    table.add_column("replica", justify="right")
    table.add_column("devices", overflow="fold")
    table.add_column("what they are", overflow="fold")
    for spec, assignment in zip(plan.replicas, plan.assignments, strict=True):
        labels = list(dict.fromkeys(assignment.labels))
        table.add_row(str(spec.replica_id), Text(",".join(assignment.devices)), Text("; ".join(labels)))
    return table


def _memory(plan: ServePlan) -> tuple[str, tuple[str, ...]]:
    """One line on weights against free memory, and a warning when they do not fit."""
    source = plan.model_source
    if source.kind == "none":
        engine = plan.stage.engine_args.engine
        return f"weights: unknown ({source.name})" if engine == "diffusers" else "weights: not looked at", ()
    path = cached_path(source, plan.stage.engine_args.revision)
    if path is None:
        return "weights: unknown (not on disk)", ()
    size = weight_bytes(path)
    if size is None:
        return f"weights: unknown (no weight files under {path})", ()
    free = [(spec.replica_id, plan.assignments[spec.replica_id].free_bytes) for spec in plan.replicas]
    known = [(number, bytes_) for number, bytes_ in free if bytes_ is not None]
    text = f"weights: {_gib(size)} per replica"
    if not known:
        return f"{text}; free memory unknown", ()
    if plan.assignments[0].kind == "cpu":
        shared = _is_shared(plan, path)
        copies = 1 if shared else len(plan.replicas)
        text += ", the same pages for all" if shared else f", {_gib(size * copies)} in all"
        text += f"; available memory {_gib(known[0][1])}"
        short = size * copies > known[0][1]
        return text, (f"weights of {len(plan.replicas)} replica(s) may not fit into memory",) if short else ()
    text += "; free per device: " + ", ".join(f"replica {number} {_gib(bytes_)}" for number, bytes_ in known)
    lacking = [str(number) for number, bytes_ in known if size > bytes_]
    return text, (f"weights may not fit on the devices of replica {', '.join(lacking)}",) if lacking else ()


def _is_shared(plan: ServePlan, path: str) -> bool:
    """Whether the replicas compute on the memory-mapped pages of the files: the type on disk is the type served."""
    on_disk, served = weight_dtypes(path), plan.stage.engine_args.dtype
    return len(on_disk) == 1 and next(iter(on_disk)) in _SHARED_AS[served]


def _gib(size: int) -> str:
    return f"{size / 1024**3:.2f} GiB" if size >= 1024**3 else f"{size / 1024**2:.1f} MiB"


def _stage_section(plan: ServePlan) -> dict[str, Any]:
    """The effective stage in the form of a stage file, which `serve` would read to the same effect."""
    stage = plan.stage.model_dump(mode="json", exclude_none=True)
    stage["runtime"]["devices"] = ",".join(plan.stage.runtime.devices or ())
    arguments, effective = stage["engine_args"], plan.stage.engine_args
    parallel = effective.parallel_config
    arguments["parallel_config"] = {
        "world_size": parallel.devices_per_replica,
        **parallel.model_dump(exclude_unset=True, exclude_none=True),
    }
    if effective.engine != "simulated":
        del arguments["simulated"]
    return {"stages": [stage]}


def _flags(plan: ServePlan) -> dict[str, Any]:
    """Flags that are not keys of the stage as well."""
    shown: dict[str, Any] = {"--served-model-name": list(plan.served_model_names)}
    for spec in flag_specs():
        value = getattr(plan.settings, spec.field)
        if spec.field in _SHOWN_IN_STAGE or spec.is_switch or value in (None, (), {}, ""):
            continue
        shown[spec.option] = "(set)" if spec.flag.secret else list(value) if isinstance(value, tuple) else value
    return shown
