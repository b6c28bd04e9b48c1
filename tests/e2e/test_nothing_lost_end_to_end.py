"""Under load: killed, stopped, hung, drained and restarted replicas, and not one request lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from support.client_load import ClientLoad
from support.light_connection import LightConnection
from support.server_process import ServerProcess, wait_until

BACK_S = 15.0  # an idle machine needs well under two seconds

Simulated = Callable[..., ServerProcess]


def pid_of(server: ServerProcess, replica_id: int) -> int | None:
    pid: int | None = server.replicas()[replica_id]["pid"]
    return pid


def health(server: ServerProcess) -> dict[str, Any]:
    response = server.client.get("/health")
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def hit(server: ServerProcess, replica_id: int, number: signal.Signals) -> bool:
    """Signal a replica and see it replaced; the server is healthy all the time. Whether it was seen degraded."""
    before = pid_of(server, replica_id)
    assert before is not None
    os.kill(before, number)
    degraded = False

    def replaced() -> bool:
        nonlocal degraded
        degraded = degraded or health(server).get("degraded") == [replica_id]
        replica = server.replicas()[replica_id]
        return bool(replica["state"] == "ready" and replica["pid"] != before)

    wait_until(replaced, BACK_S, f"replica {replica_id} is back after {number.name}")
    assert not psutil.pid_exists(before) or psutil.Process(before).status() == psutil.STATUS_ZOMBIE
    return degraded


def test_kills_and_a_stop_under_the_load_of_twelve_clients_fail_nobody(simulated_server: Simulated) -> None:
    server = simulated_server(replicas=4, seconds=0.2)
    with ClientLoad(server, clients=12) as load:
        degraded = []
        for replica_id in range(3):
            degraded.append(hit(server, replica_id, signal.SIGKILL))
            time.sleep(1.0)
        hit(server, 3, signal.SIGSTOP)
    assert load.failed == {}
    assert any(degraded)  # some may be back sooner than anybody looks
    assert load.answers["ok"] > 50
    assert load.attempts[2] >= 3
    assert server.ready_replicas() == 4
    assert health(server) == {"status": "ok"}
    assert "stopped by a signal" in server.replicas()[3]["last_error"]


def test_when_the_only_replica_is_killed_its_clients_wait_and_succeed(simulated_server: Simulated) -> None:
    server = simulated_server(replicas=1, seconds=0.1)
    with ClientLoad(server, clients=4) as load:
        for _ in range(2):
            before = pid_of(server, 0)
            assert before is not None
            os.kill(before, signal.SIGKILL)
            wait_until(lambda before=before: pid_of(server, 0) not in (None, before), BACK_S, "another process")
            server.wait_ready(1)
            load.more(5)
    assert load.failed == {}
    assert load.attempts.keys() > {1}  # 2, or 3 for a unit that the first kill had hit already


def test_without_the_forkserver_a_killed_replica_comes_back(simulated_server: Simulated) -> None:
    server = simulated_server(replicas=2, seconds=0.1)
    forkserver = server.forkserver()
    assert forkserver is not None
    with ClientLoad(server, clients=4) as load:
        forkserver.kill()
        for replica_id in (0, 1):
            hit(server, replica_id, signal.SIGKILL)
    assert load.failed == {}


@pytest.mark.anyio
async def test_of_300_requests_at_once_those_beyond_the_queue_are_refused_with_a_time_to_come_back(
    simulated_server: Simulated,
) -> None:
    server = simulated_server("--max-queue-size", "16", replicas=2, seconds=0.5)
    assert server.image(size="64x64").status_code == 200  # how long one takes is known from here on
    connections = [await LightConnection.open(server.port) for _ in range(300)]
    for seed, connection in enumerate(connections):
        connection.send({"prompt": "a picture", "seed": seed, "size": "64x64"})
    answers = [await connection.receive() for connection in connections]
    for connection in connections:
        connection.drop()
    refused = [answer for answer in answers if answer.status != 200]
    assert {(answer.status, answer.error_code) for answer in refused} == {(429, "queue_full")}
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
    assert len({answer.headers["retry-after"] for answer in refused}) > 10  # not all at the same moment
    assert 18 <= len(answers) - len(refused) < 100  # what runs and waits, and what came when some were done


def test_a_rolling_restart_under_load_fails_nobody(simulated_server: Simulated) -> None:
    server = simulated_server(replicas=3, seconds=0.1)
    before = [replica["pid"] for replica in server.replicas()]
    with ClientLoad(server, clients=8) as load:
        for replica_id in range(3):
            answer = server.client.post(f"/v1/replicas/{replica_id}/restart")
            assert (answer.status_code, answer.json()["state"]) == (200, "draining")
            wait_until(lambda: server.ready_replicas() == 3, BACK_S, f"replica {replica_id} is back")
            load.more(5)
    assert load.failed == {}
    assert load.attempts.keys() == {1}
    assert not {replica["pid"] for replica in server.replicas()} & set(before)
    assert [replica["restarts"] for replica in server.replicas()] == [1, 1, 1]


def test_all_replicas_restarted_at_once_make_clients_wait_but_fail_nobody(simulated_server: Simulated) -> None:
    server = simulated_server(replicas=2, seconds=0.1)
    with ClientLoad(server, clients=4) as load:
        for replica_id in range(2):
            server.client.post(f"/v1/replicas/{replica_id}/restart")
        wait_until(lambda: [r["restarts"] for r in server.replicas()] == [1, 1], BACK_S, "both are started anew")
        server.wait_ready(2)
        load.more(5)
    assert load.failed == {}


def test_replicas_are_drained_counted_and_refused_over_http(simulated_server: Simulated) -> None:
    server = simulated_server(replicas=3, seconds=0.1)
    with ClientLoad(server, clients=4) as load:
        listing = server.client.put("/v1/replicas", json={"count": 1}).json()
        assert [replica["state"] for replica in listing["data"]] == ["ready", "draining", "draining"]
        wait_until(lambda: pid_of(server, 1) is None and pid_of(server, 2) is None, BACK_S, "two have left")
        assert health(server) == {"status": "ok"}
        server.client.put("/v1/replicas", json={"count": 3})
        server.wait_ready(3)
        assert server.client.post("/v1/replicas/1/drain").json()["state"] == "draining"
        wait_until(lambda: pid_of(server, 1) is None, BACK_S, "one has left")
        assert health(server)["degraded"] == [1]
        server.client.post("/v1/replicas/1/restart")
        server.wait_ready(3)
    assert load.failed == {}
    too_many = server.client.put("/v1/replicas", json={"count": 4})
    assert (too_many.status_code, too_many.json()["error"]["code"]) == (400, "invalid_value")
    assert "1 to 3" in too_many.json()["error"]["message"]
    unknown = server.client.post("/v1/replicas/3/restart")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


def test_a_request_that_hangs_every_replica_fails_alone(simulated_server: Simulated) -> None:
    server = simulated_server(replicas=2, seconds=0.1)
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(server.image("[[hang]]", size="64x64")))
    with ClientLoad(server, clients=3) as load:
        thread.start()
        thread.join(40)
    assert [answer.status_code for answer in answers] == [500]
    assert answers[0].json()["error"]["code"] == "poison_request"
    assert answers[0].headers["x-should-retry"] == "false"
    assert load.failed == {}
    server.wait_ready(2)
    assert sum(replica["restarts"] for replica in server.replicas()) == 2
    assert "in _end" in server.log.read_text()  # the stacks of the hung process


def test_sigterm_to_the_group_under_load_answers_everybody_and_leaves_nothing(simulated_server: Simulated) -> None:
    server = simulated_server(replicas=2, seconds=0.5)
    children = server.descendants()
    with ClientLoad(server, clients=8) as load:
        os.killpg(server.process.pid, signal.SIGTERM)
        assert server.process.wait(20) == 0
    # A connection that the kernel had taken and the server had not yet, when the port closed, is cut: once per client.
    cut = {"ReadError", "RemoteProtocolError"}
    assert set(load.failed) <= {"draining", "connection refused", *cut}
    assert load.failed.get("draining", 0) >= 4
    assert sum(load.failed.get(name, 0) for name in cut) <= 8
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    with pytest.raises(httpx.ConnectError):
        server.client.get("/livez")
