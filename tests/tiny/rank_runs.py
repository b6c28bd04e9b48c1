"""Draws the same units on one device and on several, and prints how far they are apart.

    python -m tiny.rank_runs JSON

A process of its own, because an engine of several devices forks, which a process with compute threads must not. The
argument lists runs: `{"model", "units", "slots", "engine_args"}`; the answer holds per run `difference` (before pixels
are rounded; they lie in 0..1), `changed` (how far another prompt is, for comparison), how many `processes` followed and
how many `answers` they gave, and which are `left` after it.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tiny.engine_run import EngineRun
from triptych.engine import diffusers_engine
from triptych.engine.parallel import Leader
from triptych.messages import Lora

Drawn = list[np.ndarray[Any, Any]]


def main(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [compare(**run) for run in runs]


def compare(model: str, units: list[dict[str, Any]], slots: int, engine_args: dict[str, Any]) -> dict[str, Any]:
    answers = 0
    answer = Leader._answer

    def counted(self: Leader, follower: Any) -> Any:
        nonlocal answers
        answers += 1
        return answer(self, follower)

    Leader._answer = counted  # type: ignore[method-assign]
    several = EngineRun(Path(model), slots=slots, engine_args=engine_args)
    found = draw(several, units)
    Leader._answer = answer  # type: ignore[method-assign]
    processes = [psutil.Process(pid) for pid in several.engine.processes]
    several.engine.close()
    gone, left = psutil.wait_procs(processes, timeout=10)
    one_device = {name: value for name, value in engine_args.items() if name != "parallel_config"}
    wanted, other = on_one_device(model, json.dumps(units), json.dumps(one_device))
    return {
        "difference": furthest(found, wanted),
        "changed": furthest(other, wanted),
        "answers": answers,
        "processes": len(gone),
        "left": [process.pid for process in left],
    }


@functools.cache
def on_one_device(model: str, units: str, engine_args: str) -> tuple[Drawn, Drawn]:
    """The units, and the same with another prompt, one after the other."""
    run = EngineRun(Path(model), engine_args=json.loads(engine_args))
    wanted: list[dict[str, Any]] = json.loads(units)
    return draw(run, wanted), draw(run, [unit | {"prompt": "something else"} for unit in wanted])


def draw(run: EngineRun, units: list[dict[str, Any]]) -> Drawn:
    """What the pipelines return for the units, as far side by side as there are slots, in the order of their end."""
    drawn: Drawn = []
    to_pixels = diffusers_engine.to_pixels

    def kept(result: Any) -> Any:
        value = result.images if hasattr(result, "images") else result.frames
        drawn.append(np.asarray(value, dtype=float))
        return to_pixels(result)

    diffusers_engine.to_pixels = kept  # type: ignore[assignment]
    try:
        loras = [Lora(**unit["lora"]) if "lora" in unit else None for unit in units]
        run.bytes_of(*(run.unit(number, **(unit | {"lora": loras[number]})) for number, unit in enumerate(units)))
    finally:
        diffusers_engine.to_pixels = to_pixels
    return drawn


def furthest(one: Drawn, other: Drawn) -> float:
    return max(float(abs(a - b).max()) for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(json.loads(sys.argv[1]))))
