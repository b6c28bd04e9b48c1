"""A request that nobody waits for stops, and its slot serves the next one."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx

from support.server_process import wait_until

BUSY_S = 60.0


def open_request(port: int, prompt: str, headers: str = "") -> socket.socket:
    body = json.dumps({"prompt": prompt, "size": "64x64"}).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(
        b"POST /v1/images/generations HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
        + headers.encode()
        + f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return connection


def in_flight(server: Any) -> list[int]:
    return [replica["in_flight"] for replica in server.replicas()]


def live(server: Any) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = server.client.get("/v1/requests").json()["data"]
    return data


def test_closing_the_socket_of_a_long_request_frees_its_replica(simulated_server: Callable[..., Any]) -> None:
    server = simulated_server(replicas=2)
    connection = open_request(server.port, f"[[slow:{BUSY_S}]]")
    wait_until(lambda: sum(in_flight(server)) == 1, 5, "the request runs")
    connection.close()
    wait_until(lambda: not live(server) and in_flight(server) == [0, 0], 5, "the request is gone")
    assert [server.image(size="64x64").status_code for _ in range(2)] == [200, 200]


def test_delete_ends_the_request_on_its_replica_and_tells_its_client(simulated_server: Callable[..., Any]) -> None:
    server = simulated_server(replicas=2)
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(
            httpx.post(
                f"http://127.0.0.1:{server.port}/v1/images/generations",
                json={"prompt": f"[[slow:{BUSY_S}]]", "size": "64x64"},
                headers={"x-request-id": "mine/7"},
                timeout=60,
                trust_env=False,
            )
        )

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: sum(in_flight(server)) == 1, 5, "the request runs")
    assert server.client.delete("/v1/requests/mine%2F7").status_code == 200
    thread.join(10)
    assert answers[0].status_code == 499
    assert answers[0].json()["error"]["code"] == "request_aborted"
    assert answers[0].headers["x-should-retry"] == "false"
    wait_until(lambda: not live(server) and in_flight(server) == [0, 0], 5, "the request is gone")
    assert server.image(size="64x64").status_code == 200


def test_a_queued_request_leaves_at_once_when_its_client_goes(simulated_server: Callable[..., Any]) -> None:
    server = simulated_server(replicas=1)
    running = open_request(server.port, f"[[slow:{BUSY_S}]]")
    wait_until(lambda: in_flight(server) == [1], 5, "the first runs")
    queued = open_request(server.port, "waits")
    wait_until(lambda: len(live(server)) == 2, 5, "the second waits")
    queued.close()
    wait_until(lambda: len(live(server)) == 1, 5, "the second is gone")
    assert in_flight(server) == [1]
    running.close()
    wait_until(lambda: in_flight(server) == [0], 5, "the first is gone")


def test_patch_shortens_the_timeout_of_a_running_request(simulated_server: Callable[..., Any]) -> None:
    server = simulated_server(replicas=1)
    connection = open_request(server.port, f"[[slow:{BUSY_S}]]", "x-request-id: late\r\n")
    wait_until(lambda: in_flight(server) == [1], 5, "the request runs")
    assert server.client.patch("/v1/requests/late", json={"timeout": 0.2, "priority": 5}).status_code == 200
    connection.settimeout(10)
    assert b" 504 " in connection.recv(65536).split(b"\r\n")[0]
    connection.close()
    wait_until(lambda: in_flight(server) == [0], 5, "the work has stopped")


def test_the_time_limit_of_the_server_ends_what_runs_and_what_waits(simulated_server: Callable[..., Any]) -> None:
    server = simulated_server("--request-timeout", "1", replicas=1)
    connections = [open_request(server.port, f"[[slow:{BUSY_S}]]") for _ in range(2)]
    for connection in connections:
        connection.settimeout(10)
        status, _, headers = connection.recv(65536).lower().partition(b"\r\n")
        assert b" 504 " in status
        assert b"x-should-retry: false" in headers
        connection.close()
    wait_until(lambda: in_flight(server) == [0], 5, "the work has stopped")
