"""Our server with the simulated engine, for both front benchmarks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from triptych.bench.server import running_server

MODEL = "triptych/simulated"


@asynccontextmanager
async def simulated_server(
    folder: Path, *, replicas: int, seconds_per_request: float, image: str = "noise"
) -> AsyncIterator[int]:
    """Serve `replicas` simulated replicas; yields the port once all are ready."""
    stage_file = folder / f"simulated-{replicas}-{seconds_per_request}.yaml"
    stage_file.write_text(
        f"""\
stages:
  - stage_id: 0
    stage_type: diffusion
    runtime: {{num_replicas: {replicas}}}
    engine_args:
      model: {MODEL}
      engine: simulated
      simulated: {{seconds_per_request: {seconds_per_request}, image: {image}}}
"""
    )
    arguments = ["--stage-configs-path", str(stage_file), "--log-level", "warning"]
    log_path = folder / f"{stage_file.stem}.log"
    async with running_server(arguments, replicas=replicas, log_path=log_path, start_timeout_s=120) as base_url:
        yield int(base_url.rpartition(":")[2])
