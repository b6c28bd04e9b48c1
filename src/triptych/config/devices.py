"""What the machine offers, and which replica gets what of it.

`discover_machine` looks without importing torch. `assign_devices` cuts a stage's list of logical ids into contiguous
chunks, one per replica: accelerators are named as the visible-devices variable wants them, CPU slots get threads and
cores.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from triptych.config.accelerators import Accelerator, discover_accelerators
from triptych.config.tree import StageConfig
from triptych.errors import ConfigError

__all__ = ["Assignment", "Machine", "Origin", "assign_devices", "check_devices", "discover_machine"]

Origin = Callable[[str], str]
"""Where a key of the stage was set: `runtime.devices` gives `FILE: stages[0].runtime.devices`, or `--devices`."""

_ID = re.compile(r"0|[1-9][0-9]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Machine:
    """Accelerators in logical order, the cores this process may use, and what is worth a warning."""

    accelerators: tuple[Accelerator, ...]
    cores: tuple[int, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """Devices of one replica; `labels` tell a reader what they are."""

    kind: Literal["cpu", "cuda", "none"]
    devices: tuple[str, ...]
    labels: tuple[str, ...]
    visible_devices: tuple[str, ...] = ()
    cpu_threads: int = 1
    cpu_affinity: tuple[int, ...] = ()
    free_bytes: int | None = None


def discover_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """Look at this machine. Raises `ConfigError` when the visible-devices variable names what is not there."""
    accelerators, warnings = discover_accelerators(environ)
    return Machine(accelerators=accelerators, cores=tuple(sorted(os.sched_getaffinity(0))), warnings=warnings)


def check_devices(stage: StageConfig, *, origin: Origin) -> None:
    """Names and number of the devices a stage lists. Raises `ConfigError`."""
    devices, where = stage.runtime.devices, origin("runtime.devices")
    if devices is None:
        return
    if stage.engine_args.engine != "simulated":
        for position, name in enumerate(devices, start=1):
            if not _ID.fullmatch(name):
                raise ConfigError(
                    f"device entry {position} of {len(devices)} is not a device id",
                    where=where,
                    found=name,
                    wanted="non-negative integers",
                )
    replicas = stage.runtime.num_replicas
    size = stage.engine_args.parallel_config.devices_per_replica
    if len(devices) != replicas * size:
        counted = origin("runtime.num_replicas")
        note = "" if counted.endswith("runtime.num_replicas") else f" (from {counted})"
        raise ConfigError(
            f"{replicas} replica(s){note} x {size} device(s) each = {replicas * size}, but {len(devices)} are listed",
            where=where,
            found=",".join(devices),
            wanted=f"exactly {replicas * size} ids",
        )


def assign_devices(
    stage: StageConfig, machine: Machine, *, origin: Origin, environ: Mapping[str, str] = os.environ
) -> tuple[tuple[Assignment, ...], tuple[str, ...]]:
    """One assignment per replica, and warnings; the stage has passed `check_devices`. Raises `ConfigError`."""
    size = stage.engine_args.parallel_config.devices_per_replica
    count = stage.runtime.num_replicas * size
    devices = stage.runtime.devices or tuple(str(index) for index in range(count))
    chunks = [devices[start : start + size] for start in range(0, count, size)]
    if stage.engine_args.engine == "simulated":
        return tuple(Assignment("none", chunk, ("simulated",) * size) for chunk in chunks), ()
    threads, warnings = _cpu_threads(stage, machine, slots=count, origin=origin, environ=environ)
    if not machine.accelerators:
        return tuple(_cpu_slots(chunks, machine, threads)), warnings
    seen = len(machine.accelerators)
    replicas = stage.runtime.num_replicas
    if stage.runtime.devices is None and count > seen:
        raise ConfigError(
            f"{replicas} replica(s) x {size} device(s) each = {count}, but {seen} device(s) are visible",
            where=origin("runtime.num_replicas"),
            found=replicas,
            wanted=f"at most {seen // size}",
        )
    for name in devices:
        if int(name) >= seen:
            variable = environ.get("CUDA_VISIBLE_DEVICES")
            note = f" (ids index CUDA_VISIBLE_DEVICES={variable})" if variable else ""
            raise ConfigError(
                f"device {name} is out of range: {seen} device(s) are visible{note}",
                where=origin("runtime.devices"),
                found=name,
                wanted=f"ids 0..{seen - 1}",
            )
    return tuple(_accelerators(chunk, machine, threads) for chunk in chunks), warnings


def _accelerators(chunk: tuple[str, ...], machine: Machine, threads: int) -> Assignment:
    cards = [machine.accelerators[int(name)] for name in chunk]
    known = [card.free_bytes for card in cards if card.free_bytes is not None]
    return Assignment(
        kind="cuda",
        devices=chunk,
        labels=tuple(card.label for card in cards),
        visible_devices=tuple(card.visible_name for card in cards),
        cpu_threads=threads,
        free_bytes=min(known, default=None),
    )


def _cpu_slots(chunks: list[tuple[str, ...]], machine: Machine, threads: int) -> list[Assignment]:
    slots = sum(len(chunk) for chunk in chunks)
    # Cores of their own keep slots apart; where threads outnumber them, the kernel shares better than a mask does.
    per_slot = len(machine.cores) // slots
    own = per_slot >= threads
    free = available_memory_bytes()
    assigned = []
    for number, chunk in enumerate(chunks):
        first = number * len(chunk) * per_slot
        cores = machine.cores[first : first + len(chunk) * per_slot] if own else ()
        label = f"CPU, {threads} thread(s), " + (f"core(s) {_ranges(cores)}" if own else "shared cores")
        assigned.append(
            Assignment(
                kind="cpu",
                devices=chunk,
                labels=(label,) * len(chunk),
                cpu_threads=threads,
                cpu_affinity=cores,
                free_bytes=free,
            )
        )
    return assigned


def _cpu_threads(
    stage: StageConfig, machine: Machine, *, slots: int, origin: Origin, environ: Mapping[str, str]
) -> tuple[int, tuple[str, ...]]:
    asked = stage.runtime.cpu_threads
    text = environ.get("OMP_NUM_THREADS", "").strip()
    if not text:
        return asked or max(1, len(machine.cores) // slots), ()
    # OpenMP allows one number per nesting level; the first is the outer one.
    match = re.fullmatch(r"([1-9][0-9]{0,3})(?:\s*,\s*[0-9]+)*", text, re.ASCII)
    if match is None:
        raise ConfigError("not a number of threads", where="OMP_NUM_THREADS", found=text, wanted="a positive integer")
    threads = int(match[1])
    if asked not in (None, threads):
        return threads, (f"{origin('runtime.cpu_threads')}: {asked} gives way to OMP_NUM_THREADS={threads}",)
    return threads, ()


def available_memory_bytes() -> int | None:
    """Memory that new processes can take without swapping; None where /proc does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _ranges(cores: tuple[int, ...]) -> str:
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts)
