"""Replicas under test: real processes of the simulated engine on the server's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from replica_fleet import Fleet, StartFleet, remaining_processes, replica_spec

from triptych.messages import ReplicaSpec


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def start_fleet() -> AsyncIterator[StartFleet]:
    """Factory of started fleets; every one is stopped at the end and must leave no process."""
    fleets: list[Fleet] = []

    async def start(*specs: ReplicaSpec, ready: int | None = None, **options: Any) -> Fleet:
        fleet = Fleet(specs or (replica_spec(0), replica_spec(1)), **options)
        fleets.append(fleet)
        await fleet.supervisor.start()
        if ready is not None:
            await fleet.until_ready(ready)
        return fleet

    yield start
    for fleet in fleets:
        await fleet.supervisor.stop(timeout_s=0.5)
    if fleets:
        assert remaining_processes() == []
