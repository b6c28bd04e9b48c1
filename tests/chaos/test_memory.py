"""Thousands of requests of every fate leave nothing behind. `MEMORY_REQUESTS` chooses another number of them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.holdings import holdings
from support.light_connection import LightConnection
from support.server_process import ServerProcess, StartServer, wait_until, write_stage_file

REQUESTS = int(os.environ.get("MEMORY_REQUESTS", "2000"))
WARM_UP = 1200  # fills the history of ended requests, which holds a thousand
CLIENTS = 8
REPLICAS = 3
GROWTH_BYTES = 4 << 20

SLOW = "[[slow:60]]"
FATES: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({"prompt": "a red circle"}, 200),
    "several": ({"prompt": "a red circle", "n": 3}, 200),
    "engine error": ({"prompt": "[[error]]"}, 500),
    "bad value": ({"prompt": "a red circle", "size": "0x0"}, 400),
    "late": ({"prompt": SLOW, "timeout": 0.02}, 504),
    "deleted": ({"prompt": SLOW}, 499),
    "gone": ({"prompt": SLOW}, 0),
}
TURNS = ["plain"] * 14 + list(FATES)[1:]


async def client(server: ServerProcess, serials: Iterator[int], ended: Counter[tuple[str, int]]) -> None:
    connection = await LightConnection.open(server.port)
    deleting = await LightConnection.open(server.port)
    for serial in serials:
        fate = TURNS[serial % len(TURNS)]
        fields, _ = FATES[fate]
        connection.send({"seed": serial, "size": "64x64", **fields}, request_id=f"request-{serial}")
        if fate == "gone":
            connection.drop()
            connection = await LightConnection.open(server.port)
            ended[fate, 0] += 1
            continue
        receiving = asyncio.create_task(connection.receive())
        while fate == "deleted" and not receiving.done():  # until it has arrived
            await deleting.request(None, method="DELETE", path=f"/v1/requests/request-{serial}")
        ended[fate, (await receiving).status] += 1
    connection.drop()
    deleting.drop()


def send(server: ServerProcess, serials: range) -> Counter[tuple[str, int]]:
    """All of them from several clients, while replicas are killed; returns how each fate ended."""
    ended: Counter[tuple[str, int]] = Counter()

    async def all_clients() -> None:
        shared = iter(serials)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(client(server, shared, ended))

    asyncio.run(all_clients())
    return ended


def settled(server: ServerProcess) -> bool:
    replicas = server.replicas()
    idle = all(replica["state"] == "ready" and not replica["in_flight"] for replica in replicas)
    return idle and server.client.get("/v1/requests").json()["data"] == []


@pytest.mark.timeout(120 + REQUESTS / 20)
def test_memory_and_all_else_is_flat_over_thousands_of_requests(start_server: StartServer, tmp_path: Path) -> None:
    stage_file = write_stage_file(tmp_path / "stages.yaml", replicas=REPLICAS, seconds=0.0, slots=4)
    observed = tmp_path / "observed"
    server = start_server(
        "--stage-configs-path",
        str(stage_file),
        ready=REPLICAS,
        program=("-m", "support.observed_server"),
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "OBSERVED": str(observed)},
    )
    send(server, range(WARM_UP))
    wait_until(lambda: settled(server), 10, "nothing runs")
    before = holdings(server, observed)

    ended: Counter[tuple[str, int]] = Counter()
    for part in itertools.pairwise([*range(WARM_UP, WARM_UP + REQUESTS, REQUESTS // 4), WARM_UP + REQUESTS]):
        os.kill(server.replicas()[0]["pid"], signal.SIGKILL)
        ended += send(server, range(*part))
        wait_until(lambda: settled(server), 10, "nothing runs and the killed replica is back")
    after = holdings(server, observed)

    assert set(ended) == {(fate, status) for fate, (_, status) in FATES.items()}
    assert ended.total() == REQUESTS
    assert server.replicas()[0]["restarts"] >= 4
    assert not (grown := after.beyond(before, growth_bytes=GROWTH_BYTES)), grown
