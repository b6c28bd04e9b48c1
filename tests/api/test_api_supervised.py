"""The whole chain behind one port: uvicorn, app, orchestrator, supervisor and replica processes that simulate."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from api_fakes import make_app

from triptych.api.protocol import HttpProtocol
from triptych.messages import ReplicaSpec
from triptych.orchestrator.orchestrator import Orchestrator
from triptych.replicas.process import ProcessExecutor
from triptych.replicas.supervisor import Supervisor

pytestmark = pytest.mark.anyio

IMAGES = "/v1/images/generations"
WAIT_S = 60


@asynccontextmanager
async def serving(
    *, replicas: int, slots: int = 1, no_replica_timeout_s: float = 30.0
) -> AsyncIterator[httpx.AsyncClient]:
    orchestrator = Orchestrator(max_queue_size=4, no_replica_timeout_s=no_replica_timeout_s)
    specs = [
        ReplicaSpec(
            replica_id=replica,
            stage_id=0,
            engine="simulated",
            model="triptych/simulated",
            device_kind="none",
            devices=(str(replica),),
            cpu_threads=1,
            max_num_seqs=slots,
            engine_args={"simulated": {"seconds_per_request": 0.0}},
        )
        for replica in range(replicas)
    ]
    supervisor = Supervisor(specs, ProcessExecutor("simulated"), listener=orchestrator, max_parallel_loads=4)
    orchestrator.attach(supervisor)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(make_app(orchestrator), http=HttpProtocol, log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    deadlines = asyncio.create_task(orchestrator.run())
    base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=base_url, timeout=WAIT_S, trust_env=False) as client:
            early = await client.post(IMAGES, json={"prompt": "x"})
            assert early.json()["error"]["code"] == "not_ready"
            await supervisor.start()
            await until(client, lambda data: [replica["state"] for replica in data] == ["ready"] * replicas)
            yield client
    finally:
        server.should_exit = True
        await asyncio.wait_for(http, WAIT_S)
        deadlines.cancel()
        await supervisor.stop(timeout_s=5)
        listener.close()


async def until(
    client: httpx.AsyncClient, condition: Callable[[list[dict[str, Any]]], bool], *, path: str = "/v1/replicas"
) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if condition((await client.get(path)).json()["data"]):
                return
            await asyncio.sleep(0.02)  # over HTTP there is nothing to wait on


async def until_in_flight(client: httpx.AsyncClient, count: int) -> None:
    await until(client, lambda data: sum(replica["in_flight"] for replica in data) == count)


async def until_live(client: httpx.AsyncClient, count: int) -> None:
    await until(client, lambda data: len(data) == count, path="/v1/requests")


async def test_requests_run_spread_fail_and_end_behind_one_port() -> None:
    async with serving(replicas=2) as client:
        assert (await client.get("/readyz")).json() == {"status": "ok"}

        answer = (await client.post(IMAGES, json={"prompt": "a cat", "n": 4, "seed": 3, "size": "32x32"})).json()
        assert [image["seed"] for image in answer["data"]] == [3, 4, 5, 6]
        assert all(base64.b64decode(image["b64_json"]).startswith(b"\x89PNG") for image in answer["data"])
        assert {metrics["replica"] for metrics in answer["metrics"]} == {0, 1}

        failed = await client.post(IMAGES, json={"prompt": "[[oom]]", "size": "32x32"})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "out_of_memory")

        wide = {"prompt": "x", "size": "65536x64", "output_format": "webp"}
        refused = (await client.post(IMAGES, json=wide)).json()["error"]
        assert refused["code"] == "invalid_value"
        assert [replica["restarts"] for replica in (await client.get("/v1/replicas")).json()["data"]] == [0, 0]

        slow = {"prompt": "[[slow:60]]", "size": "32x32"}
        waiting = asyncio.create_task(client.post(IMAGES, json=slow, headers={"x-request-id": "mine"}))
        await until_in_flight(client, 1)
        changed = await client.patch("/v1/requests/mine", json={"priority": 3})
        assert changed.json()["priority"] == 3
        (unit,) = changed.json()["units"]
        assert (unit["index"], unit["state"]) == (0, "running")
        deleted = await client.delete("/v1/requests/mine")
        assert (deleted.status_code, deleted.json()["status"]) == (200, "aborted")
        assert (await waiting).status_code == 499
        assert (await client.delete("/v1/requests/mine")).status_code == 409
        await until_in_flight(client, 0)

        with pytest.raises(httpx.ReadTimeout):
            await client.post(IMAGES, json=slow, timeout=0.5)
        await until_in_flight(client, 0)
        assert (await client.get("/v1/requests")).json()["data"] == []

        late = await client.post(IMAGES, json=slow | {"timeout": 0.2})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")

        many = [asyncio.create_task(client.post(IMAGES, json=slow | {"n": 6}))]
        await until_in_flight(client, 2)
        full = await client.post(IMAGES, json=slow)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(full.headers["retry-after"]) <= 60
        many[0].cancel()
        await until_in_flight(client, 0)
        assert (await client.post(IMAGES, json={"prompt": "x", "size": "32x32"})).status_code == 200


async def test_without_a_replica_posts_wait_for_a_bounded_time_and_are_told_when_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, slow = {"prompt": "x", "size": "32x32"}, {"prompt": "[[slow:60]]", "size": "32x32"}
    async with serving(replicas=1, no_replica_timeout_s=0.3) as client:
        asked = [asyncio.create_task(client.post(IMAGES, json=slow))]
        await until_in_flight(client, 1)
        asked += [asyncio.create_task(client.post(IMAGES, json=body)) for body in (plain, plain | {"stream": True})]
        await until_live(client, 3)
        monkeypatch.setattr("triptych.replicas.restart.FIRST_DELAY_S", 60.0)
        os.kill((await client.get("/v1/replicas")).json()["data"][0]["pid"], signal.SIGKILL)
        answers = await asyncio.gather(*asked)
        assert (await client.get("/health")).json()["error"]["code"] == "no_replica"
        answers.append(await client.post(IMAGES, json=plain))
        assert [(a.status_code, a.json()["error"]["code"]) for a in answers] == [(503, "no_replica")] * 4
        assert {answer.headers["retry-after"] for answer in answers} == {"5"}
        assert not any("x-should-retry" in answer.headers for answer in answers)
        await until_live(client, 0)

        assert (await client.post("/v1/replicas/0/restart")).status_code == 200
        await until(client, lambda data: data[0]["state"] == "ready")
        assert (await client.post(IMAGES, json=plain)).status_code == 200


async def test_one_request_after_another_that_crashes_replicas_takes_none_of_them_out_of_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("triptych.replicas.restart.FIRST_DELAY_S", 60.0)
    monkeypatch.setattr("triptych.replicas.restart.CRASH_LOOP_DEATHS", 2)
    async with serving(replicas=2) as client:
        for _ in range(3):
            crashed = await client.post(IMAGES, json={"prompt": "[[crash]]", "size": "32x32"})
            assert (crashed.status_code, crashed.json()["error"]["code"]) == (500, "poison_request")
        await until(client, lambda data: [replica["state"] for replica in data] == ["ready", "ready"])
        assert (await client.post(IMAGES, json={"prompt": "x", "size": "32x32"})).status_code == 200


async def test_a_request_that_crashes_replicas_fails_after_two_deaths_and_its_batch_neighbours_succeed() -> None:
    async with serving(replicas=1, slots=3) as client:
        prompts = ["[[slow:0.5]] one", "[[slow:0.5]] another"]
        neighbours = [
            asyncio.create_task(client.post(IMAGES, json={"prompt": prompt, "size": "32x32"})) for prompt in prompts
        ]
        await until_in_flight(client, 2)
        crashed = await client.post(IMAGES, json={"prompt": "[[crash]]", "size": "32x32"})
        assert (crashed.status_code, crashed.json()["error"]["code"]) == (500, "poison_request")
        assert crashed.headers["x-should-retry"] == "false"
        answers = [await neighbour for neighbour in neighbours]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert [answer.json()["metrics"][0]["attempts"] for answer in answers] == [2, 2]
        await until(client, lambda data: data[0]["state"] == "ready")
        assert (await client.get("/v1/replicas")).json()["data"][0]["restarts"] == 2
