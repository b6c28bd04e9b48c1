"""Changing replicas over HTTP: who may, what is taken, what is answered."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from api_fakes import FakeOrchestrator, make_app

pytestmark = pytest.mark.anyio

ROUTES = [
    ("POST", "/v1/replicas/0/drain", None),
    ("POST", "/v1/replicas/0/restart", None),
    ("PUT", "/v1/replicas", {"count": 1}),
]


async def test_drain_and_restart_answer_the_replica_and_put_the_list(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    assert (await client.post("/v1/replicas/0/drain")).json()["id"] == 0
    assert (await client.post("/v1/replicas/0/restart", json={})).json()["state"] == "ready"
    listing = (await client.put("/v1/replicas", json={"count": 1})).json()
    assert (listing["object"], [replica["id"] for replica in listing["data"]]) == ("list", [0])
    assert orchestrator.operations == [("drain", 0), ("restart", 0), ("resize", 1)]


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("peer", "headers", "allowed"),
    [
        ("127.0.0.1", {}, True),
        ("::1", {}, True),
        ("::ffff:127.0.0.1", {}, True),
        ("192.168.1.7", {}, False),
        ("::ffff:192.168.1.7", {}, False),
        ("testclient", {}, False),
        ("127.0.0.1", {"origin": "http://127.0.0.1:8000"}, False),
        ("127.0.0.1", {"origin": "null"}, False),
        ("127.0.0.1", {"x-forwarded-for": "10.0.0.1"}, False),
    ],
)
async def test_only_a_caller_on_this_machine_that_is_no_web_page_changes_replicas(
    orchestrator: FakeOrchestrator,
    method: str,
    path: str,
    body: Any,
    peer: str,
    headers: dict[str, str],
    allowed: bool,
) -> None:
    transport = httpx.ASGITransport(app=make_app(orchestrator), client=(peer, 40000))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.request(method, path, json=body, headers=headers)
        assert (await client.get("/v1/replicas")).status_code == 200
    if allowed:
        assert response.status_code == 200
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
        assert orchestrator.operations == []


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_parameter", "count"),
        ({"count": None}, "missing_parameter", "count"),
        ({"count": "2"}, "invalid_value", "count"),
        ({"count": 1.5}, "invalid_value", "count"),
        ({"count": True}, "invalid_value", "count"),
        ({"count": 1, "force": True}, "unknown_parameter", "force"),
    ],
)
async def test_put_takes_one_whole_number(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, body: dict[str, Any], code: str, param: str
) -> None:
    response = await client.put("/v1/replicas", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert orchestrator.operations == []


async def test_unknown_replicas_are_404_and_unknown_fields_400(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    for name in ("x", "-1", "1.0", "9" * 30, "%C2%B2"):
        response = await client.post(f"/v1/replicas/{name}/drain")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    response = await client.post("/v1/replicas/0/restart", json={"force": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "force")
    assert (await client.get("/v1/replicas/0/restart")).status_code == 405
    assert orchestrator.operations == []
