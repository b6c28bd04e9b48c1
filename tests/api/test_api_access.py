"""API keys: who gets in, who sees and ends which requests, who changes replicas."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from api_fakes import FakeOrchestrator, client_of, make_app

from triptych.api.access import ApiKeys

pytestmark = pytest.mark.anyio

CLIENT, OTHER, ADMIN = "sk-client", "sk-other", "sk-admin"
KEYS = {"api_keys": (CLIENT, OTHER), "admin_api_key": ADMIN}
IMAGES = "/v1/images/generations"


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/ping", "/version", "/"])
async def test_health_and_the_front_page_need_no_key(orchestrator: FakeOrchestrator, path: str) -> None:
    async with client_of(make_app(orchestrator, **KEYS)) as client:
        assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", IMAGES),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/requests"),
        ("DELETE", "/v1/requests/x"),
        ("GET", "/v1/replicas"),
        ("PUT", "/v1/replicas"),
        ("GET", "/v1/videos"),
        ("GET", "/nothing/here"),
        ("OPTIONS", IMAGES),
    ],
)
@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", f"Bearer {CLIENT}x", f"Basic {CLIENT}", CLIENT, "Bearer \xff"]
)
async def test_every_other_route_needs_a_known_key(
    orchestrator: FakeOrchestrator, method: str, path: str, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
    async with client_of(make_app(orchestrator, **KEYS)) as client:
        response = await client.request(method, path, headers=headers)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    error = response.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("invalid_api_key", "authentication_error", None)
    assert CLIENT not in response.text
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("authorization", [f"Bearer {CLIENT}", f"bearer  {OTHER} ", f"BEARER {ADMIN}"])
async def test_each_key_lets_its_holder_generate(orchestrator: FakeOrchestrator, authorization: str) -> None:
    async with client_of(make_app(orchestrator, **KEYS)) as client:
        response = await client.post(IMAGES, json={"prompt": "x"}, headers={"authorization": authorization})
    assert response.status_code == 200


async def test_requests_belong_to_the_hash_of_the_key(orchestrator: FakeOrchestrator) -> None:
    app = make_app(orchestrator, **KEYS)
    for key in (CLIENT, CLIENT, OTHER, ADMIN):
        async with client_of(app, key=key) as client:
            await client.post(IMAGES, json={"prompt": "x"})
    owners = [request.owner for request in orchestrator.submitted]
    assert owners[0] == owners[1]
    assert len(set(owners)) == 3
    for owner in owners:
        assert owner is not None and owner.startswith("key_")
        assert all(key not in owner for key in (CLIENT, OTHER, ADMIN))


async def test_a_caller_meets_only_its_own_requests_and_the_admin_all(orchestrator: FakeOrchestrator) -> None:
    app = make_app(orchestrator, **KEYS)
    for key in (CLIENT, OTHER):
        async with client_of(app, key=key) as client:
            await client.post(IMAGES, json={"prompt": "x"}, headers={"x-request-id": "same"})
    mine, others = (request.id for request in orchestrator.submitted)
    async with client_of(app, key=CLIENT) as client:
        assert [view["id"] for view in (await client.get("/v1/requests")).json()["data"]] == [mine]
        assert (await client.get("/v1/requests/same")).json()["id"] == mine
        for method, body in (("GET", None), ("PATCH", {"priority": 1}), ("DELETE", None)):
            response = await client.request(method, f"/v1/requests/{others}", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")
        assert orchestrator.views[others].status == "running"
        assert (await client.delete("/v1/requests/same")).json()["id"] == mine
    async with client_of(app, key=ADMIN) as client:
        assert [view["id"] for view in (await client.get("/v1/requests")).json()["data"]] == [others]
        assert (await client.delete(f"/v1/requests/{others}")).json()["status"] == "aborted"


@pytest.mark.parametrize(
    ("keys", "key", "peer", "status", "code"),
    [
        (KEYS, ADMIN, "192.168.1.7", 200, None),
        (KEYS, CLIENT, "127.0.0.1", 403, "permission_denied"),
        (KEYS, None, "127.0.0.1", 401, "invalid_api_key"),
        ({"api_keys": (CLIENT,)}, CLIENT, "127.0.0.1", 403, "permission_denied"),
        ({"admin_api_key": ADMIN}, ADMIN, "192.168.1.7", 200, None),
        ({"admin_api_key": ADMIN}, None, "127.0.0.1", 401, "invalid_api_key"),
        ({"admin_api_key": ADMIN}, CLIENT, "127.0.0.1", 401, "invalid_api_key"),
    ],
)
async def test_with_keys_only_the_admin_key_changes_replicas(
    orchestrator: FakeOrchestrator, keys: dict[str, Any], key: str | None, peer: str, status: int, code: str | None
) -> None:
    transport = httpx.ASGITransport(app=make_app(orchestrator, **keys), client=(peer, 40000))
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        for method, path, body in (
            ("POST", "/v1/replicas/0/drain", None),
            ("POST", "/v1/replicas/0/restart", None),
            ("PUT", "/v1/replicas", {"count": 1}),
        ):
            response = await client.request(method, path, json=body)
            assert response.status_code == status
            assert status == 200 or response.json()["error"]["code"] == code
    assert bool(orchestrator.operations) is (status == 200)


@pytest.mark.parametrize("key", [None, "none", ADMIN])
async def test_an_admin_key_alone_closes_nothing_but_the_changes_of_replicas(
    orchestrator: FakeOrchestrator, key: str | None
) -> None:
    async with client_of(make_app(orchestrator, admin_api_key=ADMIN), key=key) as client:
        assert (await client.post(IMAGES, json={"prompt": "x"})).status_code == 200
        assert len((await client.get("/v1/requests")).json()["data"]) == 1


async def test_without_keys_any_authorization_is_ignored_and_requests_belong_to_nobody(
    orchestrator: FakeOrchestrator,
) -> None:
    async with client_of(make_app(orchestrator), key="none") as client:
        assert (await client.post(IMAGES, json={"prompt": "x"})).status_code == 200
    assert orchestrator.submitted[0].owner is None


async def test_the_access_log_names_the_caller_by_its_hash_and_neither_key_nor_prompt_nor_query(
    orchestrator: FakeOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="triptych")
    async with client_of(make_app(orchestrator, **KEYS), key=CLIENT) as client:
        await client.post(f"{IMAGES}?token=s3cret", json={"prompt": "a private thing"})
        await client.get("/livez")
    (record,) = caplog.records
    line = vars(record)
    assert (line["method"], line["path"], line["status"]) == ("POST", IMAGES, 200)
    assert line["caller"] == orchestrator.submitted[0].owner
    assert line["request"] == orchestrator.submitted[0].id
    assert line["seconds"] >= 0
    for secret in (CLIENT, "private", "s3cret"):
        assert secret not in str(line)


async def test_prompts_are_logged_when_asked_for(
    orchestrator: FakeOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="triptych")
    async with client_of(make_app(orchestrator, log_prompts=True)) as client:
        await client.post(IMAGES, json={"prompt": "a private thing"})
    prompts = [vars(record).get("prompt") for record in caplog.records]
    assert prompts == ["'a private thing'", None]


def test_the_name_of_a_key_stays_the_same_and_is_not_its_digest() -> None:
    headers = [(b"authorization", b"Bearer k")]
    first, second = (ApiKeys(["k"], None).caller(headers) for _ in range(2))
    assert first == second
    assert first is not None
    import hashlib

    assert first.name.removeprefix("key_") not in hashlib.sha256(b"k").hexdigest()
