"""The `triptych` program with a window into it, and starts that can be made to fail; `python -m` runs it.

At SIGUSR2 the server writes what it holds to the file `$OBSERVED`. A replica that starts looks for a file in the folder
`$START_FAULTS` named like its id, removes it and does what it says: `refuse` (the model cannot be loaded), `die`.
Importing this module, which the forkserver does too, is what plants the faults; nothing else differs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import signal
import sys
from pathlib import Path

from triptych.engine import registry
from triptych.engine.base import Emit, EngineStartError
from triptych.engine.simulated import SimulatedEngine
from triptych.messages import ModelInfo, ReplicaSpec


class FaultyStartEngine(SimulatedEngine):
    def __init__(self, spec: ReplicaSpec, emit: Emit) -> None:
        super().__init__(spec, emit)
        self._fault = Path(os.environ.get("START_FAULTS", "/nonexistent")) / str(spec.replica_id)

    def load(self) -> ModelInfo:
        if self._fault.exists():
            fault = self._fault.read_text()
            self._fault.unlink()
            if fault == "die":
                os._exit(9)
            raise EngineStartError("a start that was made to fail")
        return super().load()


_plain = registry._BUILT_IN["simulated"]
_module = "support.observed_server"
registry._BUILT_IN["simulated"] = dataclasses.replace(
    _plain, factory=f"{_module}:FaultyStartEngine", preload=(*_plain.preload, _module)
)


def write_observation(*_: object) -> None:
    gc.collect()
    running = asyncio.current_task()  # the signal came in the middle of it; who is left behind waits for something
    pending = [thing for thing in gc.get_objects() if isinstance(thing, asyncio.Task) and not thing.done()]
    tasks = [str(getattr(task.get_coro(), "__qualname__", task)) for task in pending if task is not running]
    path = Path(os.environ["OBSERVED"])
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"tasks": tasks, "objects": len(gc.get_objects())}))
    part.rename(path)


if __name__ == "__main__":
    from triptych.cli.main import main

    signal.signal(signal.SIGUSR2, write_observation)
    sys.argv[0] = "triptych"
    main()
