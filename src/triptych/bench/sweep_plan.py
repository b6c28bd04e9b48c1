"""Everything of a sweep that is decided before the first server starts.

The largest count is planned as `serve` would plan it; its threads per replica, the number of requests and the
concurrency then stay the same for every count, and each count gets the first of its devices.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from triptych.bench.options import SweepOptions
from triptych.config.plan import ServePlan, build_plan
from triptych.config.settings import read_settings
from triptych.config.stage_file import read_stage_file

__all__ = ["SweepPlan", "plan_sweep"]

_ROUNDS_PER_REPLICA = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What stays the same over the counts, and the `serve` arguments of each."""

    counts: tuple[int, ...]
    serve_arguments: tuple[tuple[str, ...], ...]
    cpu_threads: int
    num_prompts: int
    max_concurrency: int
    notes: tuple[str, ...]


def plan_sweep(options: SweepOptions, environ: Mapping[str, str] = os.environ) -> SweepPlan:
    """Check what `serve` would refuse and fix the load. Raises `ConfigError`."""
    counts, most = options.replicas, max(options.replicas)
    largest = _plan_of(options, most, environ)
    threads = largest.replicas[0].cpu_threads
    round_size = math.lcm(*counts)
    prompts = options.num_prompts or math.ceil(_ROUNDS_PER_REPLICA * most / round_size) * round_size
    concurrency = options.max_concurrency or 2 * most
    notes = [
        *largest.warnings,
        f"the same load for every count: {prompts} requests, at most {concurrency} at a time",
        f"{threads} CPU thread(s) per replica at every count (OMP_NUM_THREADS)",
    ]
    if uneven := [count for count in counts if prompts % count]:
        shown = ", ".join(map(str, uneven))
        notes.append(f"{prompts} requests do not divide evenly by {shown}: replicas idle in the last round")
    if concurrency < most:
        notes.append(f"at most {concurrency} requests at a time cannot keep {most} replicas busy")
    base = [options.model] if options.model is not None else []
    base += ["--stage-configs-path", options.stage_configs_path] if options.stage_configs_path is not None else []
    arguments = []
    for count in counts:
        devices = [device for assignment in largest.assignments[:count] for device in assignment.devices]
        arguments.append((*base, "--num-replicas", str(count), "--devices", ",".join(devices)))
    return SweepPlan(
        counts=counts,
        serve_arguments=tuple(arguments),
        cpu_threads=threads,
        num_prompts=prompts,
        max_concurrency=concurrency,
        notes=tuple(notes),
    )


def _plan_of(options: SweepOptions, replicas: int, environ: Mapping[str, str]) -> ServePlan:
    """What `serve` would do for this count, with a longer list of devices cut to what it needs."""
    asked = {
        "model": options.model,
        "stage_configs_path": options.stage_configs_path,
        "num_replicas": replicas,
    }
    settings = read_settings(asked, environ)
    if settings.stage_configs_path is not None:
        stage = read_stage_file(settings.stage_configs_path).stages[0]
        needed = replicas * stage.engine_args.parallel_config.devices_per_replica
        listed = settings.devices or stage.runtime.devices or ()
    else:
        needed, listed = replicas, settings.devices or ()
    if len(listed) > needed:
        settings = settings.model_copy(update={"devices": listed[:needed]})
    return build_plan(settings, environ=environ)
