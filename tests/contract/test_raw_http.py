"""The contract in plain HTTP, for what no client library shows: statuses, headers, envelopes, odd requests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from contract_target import Target

IMAGES = "/v1/images/generations"
JSON = {"content-type": "application/json"}


@pytest.fixture
def http(target: Target) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {target.key}"}
    with httpx.Client(base_url=target.url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


def refused(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/ping", "/version"])
def test_health_answers_without_a_key(target: Target, path: str) -> None:
    response = httpx.get(f"{target.url}{path}", trust_env=False)
    assert response.status_code == 200
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", IMAGES, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
        ("GET", "/v1/requests/none", 404, "request_not_found"),
        ("DELETE", "/v1/requests/none", 404, "request_not_found"),
        ("GET", "/results/none", 404, "not_found"),
    ],
)
def test_what_is_not_there_is_an_envelope(http: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    refused(http.request(method, path), status, code)


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"", JSON, 400, "invalid_json"),
        (b"{", JSON, 400, "invalid_json"),
        (b"[]", JSON, 400, "invalid_json"),
        (b'{"prompt": "\xff"}', JSON, 400, "invalid_json"),
        (b"[" * 100_000, JSON, 400, "invalid_json"),
        (b'{"prompt": "x"}', {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (b'{"prompt": "x"}', {**JSON, "content-encoding": "gzip"}, 415, "unsupported_media_type"),
        (b"{}", JSON, 400, "missing_parameter"),
        (b'{"prompt": "x", "seed": 1.5}', JSON, 400, "invalid_value"),
        (b'{"prompt": "x", "seed": 9223372036854775807, "n": 2}', JSON, 400, "invalid_value"),
        (b'{"prompt": "x", "timeout": 1e99}', JSON, 400, "invalid_value"),
        (b'{"prompt": "x", "n": 1, "extra_body": {"n": 1}}', JSON, 400, "invalid_value"),
        (b'{"prompt": "x", "extra_args": {"generator": 1}}', JSON, 400, "unsupported_parameter"),
    ],
)
def test_bodies_that_are_refused(
    http: httpx.Client, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    refused(http.post(IMAGES, content=content, headers=headers), status, code)


@pytest.mark.parametrize(("given", "shown"), [("mine-1", "mine-1"), ("a b", "a b"), ("x" * 129, None), ("\xe9", None)])
def test_a_sane_request_id_is_echoed_and_another_replaced(http: httpx.Client, given: str, shown: str | None) -> None:
    response = http.get("/v1/models", headers={"x-request-id": given.encode("latin-1")})
    if shown is None:
        assert response.headers["x-request-id"].startswith("req_")
    else:
        assert response.headers["x-request-id"] == shown


def test_a_model_id_with_a_slash_is_found_in_either_spelling(http: httpx.Client) -> None:
    name = http.get("/v1/models").json()["data"][0]["id"]
    assert http.get(f"/v1/models/{quote(name, safe='')}").json()["id"] == name
    assert http.get(f"/v1/models/{name}").json()["id"] == name


def test_nulls_are_defaults_and_the_answer_names_what_was_ignored(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "x", "size": None, "seed": None, "n": None, "quality": "hd", "lora": None}
    answer = http.post(IMAGES, json=body).json()
    assert answer["ignored_parameters"] == ["quality"]
    (metrics,) = answer["metrics"]
    assert {"replica", "queue_s", "inference_s", "steps", "batch_size_mean", "peak_memory_mb", "attempts"} <= set(
        metrics
    )


def test_a_finished_request_is_found_by_the_clients_id(http: httpx.Client) -> None:
    sent = http.post(IMAGES, json={"prompt": "x"}, headers={"x-request-id": "contract/raw 1"})
    assert sent.status_code == 200
    view = http.get(f"/v1/requests/{quote('contract/raw 1', safe='')}").json()
    assert (view["status"], view["units"][0]["state"]) == ("completed", "completed")
    refused(http.patch(f"/v1/requests/{view['id']}", json={"priority": 1}), 409, "conflict")


def test_replicas_are_listed_and_not_changed_by_a_client(http: httpx.Client, target: Target) -> None:
    listing = http.get("/v1/replicas").json()
    assert {"id", "state", "pid", "devices", "slots", "in_flight", "completed", "restarts"} <= set(listing["data"][0])
    if target.key != "none":
        refused(http.put("/v1/replicas", json={"count": 1}), 403, "permission_denied")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /livez HTTP/1.1\r\nhost: x\r\n" + b"a: " + b"b" * 70_000 + b"\r\n\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
        (b"POST /v1/images/generations HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
    ],
)
def test_what_is_no_request_gets_an_envelope_all_the_same(target: Target, head: bytes, status: int) -> None:
    address = urlsplit(target.url)
    if address.scheme != "http":
        pytest.skip("needs a plain connection")
    with socket.create_connection((address.hostname or "", address.port or 80), timeout=20) as connection:
        connection.sendall(head)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b'{"error":{' in answer
    assert b"x-request-id: req_" in answer
