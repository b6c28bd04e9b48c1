"""Requests, replicas, models and health: what operators and other tools read and do."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import httpx
import pytest
from api_fakes import NAMES, FakeOrchestrator, client_of, make_app

from triptych import __version__
from triptych.orchestrator.events import Readiness

pytestmark = pytest.mark.anyio

IMAGES = "/v1/images/generations"


async def submit(client: httpx.AsyncClient, orchestrator: FakeOrchestrator, client_id: str) -> str:
    await client.post(IMAGES, json={"prompt": "x", "seed": 1}, headers={"x-request-id": client_id})
    return orchestrator.submitted[-1].id


async def test_a_request_is_shown_with_its_units_by_either_id(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    internal = await submit(client, orchestrator, "job/7 ?#%")
    for name in (internal, quote("job/7 ?#%", safe=""), quote("job/7 ?#%")):
        view = (await client.get(f"/v1/requests/{name}")).json()
        assert (view["id"], view["client_request_id"], view["status"]) == (internal, "job/7 ?#%", "running")
    assert view["units"] == [
        {"index": 0, "state": "running", "replica": 1, "step": 2, "steps": 20, "queue_position": None, "eta_s": 0.5}
    ]
    assert "owner" not in view
    listing = (await client.get("/v1/requests")).json()
    assert (listing["object"], [item["id"] for item in listing["data"]]) == ("list", [internal])


async def test_an_unknown_request_is_404_and_an_ambiguous_one_409(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    for method in ("GET", "DELETE"):
        response = await client.request(method, "/v1/requests/none")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")
    await submit(client, orchestrator, "same")
    await submit(client, orchestrator, "same")
    response = await client.delete("/v1/requests/same")
    assert (response.status_code, response.headers["x-should-retry"]) == (409, "false")


async def test_patch_changes_priority_and_timeout(client: httpx.AsyncClient, orchestrator: FakeOrchestrator) -> None:
    internal = await submit(client, orchestrator, "job")
    view = (await client.patch("/v1/requests/job", json={"priority": -5, "timeout": 30})).json()
    assert (view["id"], view["priority"], view["timeout_s"]) == (internal, -5, 30)
    view = (await client.patch("/v1/requests/job", json={"priority": 0, "timeout": None})).json()
    assert (view["priority"], view["timeout_s"]) == (0, 30)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_parameter", "priority"),
        ({"priority": 101}, "invalid_value", "priority"),
        ({"priority": True}, "invalid_value", "priority"),
        ({"timeout": 0}, "invalid_value", "timeout"),
        ({"timeout": 601}, "invalid_value", "timeout"),
        ({"timeout": "3"}, "invalid_value", "timeout"),
        ({"prioritty": 1}, "unknown_parameter", "prioritty"),
        ({"seed": 1}, "unknown_parameter", "seed"),
    ],
)
async def test_patch_takes_nothing_else(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, body: dict[str, object], code: str, param: str
) -> None:
    await submit(client, orchestrator, "job")
    response = await client.patch("/v1/requests/job", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)


async def test_patch_of_a_finished_request_is_a_conflict(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    await submit(client, orchestrator, "job")
    assert (await client.delete("/v1/requests/job")).status_code == 200
    assert (await client.patch("/v1/requests/job", json={"priority": 1})).status_code == 409


async def test_delete_answers_the_aborted_view(client: httpx.AsyncClient, orchestrator: FakeOrchestrator) -> None:
    await submit(client, orchestrator, "job")
    response = await client.delete("/v1/requests/job")
    assert (response.status_code, response.json()["status"]) == (200, "aborted")
    assert (await client.get("/v1/requests")).json()["data"] == []


async def test_a_request_ended_by_delete_answers_499(client: httpx.AsyncClient, orchestrator: FakeOrchestrator) -> None:
    orchestrator.hold = asyncio.Event()
    waiting = asyncio.create_task(client.post(IMAGES, json={"prompt": "x"}))
    await asyncio.wait_for(orchestrator.arrived.wait(), 10)
    orchestrator.streams[0].close()
    response = await waiting
    assert (response.status_code, response.json()["error"]["code"]) == (499, "request_aborted")
    assert response.headers["x-should-retry"] == "false"


async def test_replicas_have_the_shape_of_the_contract(client: httpx.AsyncClient) -> None:
    listing = (await client.get("/v1/replicas")).json()
    assert listing["object"] == "list"
    assert listing["data"] == [
        {
            "id": 0,
            "stage_id": 0,
            "state": "ready",
            "pid": 1234,
            "pids": [1234],
            "devices": ["0"],
            "slots": 1,
            "in_flight": 0,
            "completed": 12,
            "restarts": 0,
            "last_error": None,
            "estimate_error": None,
        }
    ]


async def test_models_are_listed_and_found_with_a_slash_in_either_spelling(client: httpx.AsyncClient) -> None:
    listing = (await client.get("/v1/models")).json()
    assert [model["id"] for model in listing["data"]] == list(NAMES)
    for path in ("Qwen/Qwen-Image", "Qwen%2FQwen-Image", "alias"):
        model = (await client.get(f"/v1/models/{path}")).json()
        assert (model["object"], model["owned_by"]) == ("model", "triptych")
    response = await client.get("/v1/models/Qwen/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/readyz", "/health", "/ping"])
async def test_readiness_is_503_until_ready_and_names_what_is_degraded(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, path: str
) -> None:
    assert (await client.get(path)).json() == {"status": "ok"}
    orchestrator.ready = Readiness(ready=True, degraded=(1,))
    response = await client.get(path)
    assert (response.status_code, response.json()) == (200, {"status": "degraded", "degraded": [1]})
    for reason in ("not_ready", "draining", "no_replica"):
        orchestrator.ready = Readiness(ready=False, reason=reason)
        response = await client.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (503, reason)
        assert "retry-after" in response.headers
    assert orchestrator.submitted == []


async def test_liveness_version_and_the_front_page_answer_before_any_replica(orchestrator: FakeOrchestrator) -> None:
    orchestrator.model, orchestrator.ready = None, Readiness(ready=False, reason="not_ready")
    async with client_of(make_app(orchestrator)) as client:
        assert (await client.get("/livez")).json() == {"status": "ok"}
        assert (await client.get("/version")).json() == {"version": __version__}
        page = (await client.get("/")).json()
        assert "not available in this version" in page["page"]
        assert page["models"] == list(NAMES)
