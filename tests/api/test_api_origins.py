"""What browsers and proxies need: CORS for the origins that were named, and a path prefix."""

from __future__ import annotations

import httpx
import pytest
from api_fakes import FakeOrchestrator, client_of, make_app

pytestmark = pytest.mark.anyio

PAGE = "https://page.example"
IMAGES = "/v1/images/generations"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}


def cors_headers(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control")}


async def test_without_origins_no_answer_allows_a_page_to_read_it(client: httpx.AsyncClient) -> None:
    for response in (
        await client.options(IMAGES, headers={"origin": PAGE, **PREFLIGHT}),
        await client.post(IMAGES, json={"prompt": "x"}, headers={"origin": PAGE}),
    ):
        assert cors_headers(response) == {}


async def test_a_named_origin_gets_preflight_answer_and_error_without_a_key(orchestrator: FakeOrchestrator) -> None:
    app = make_app(orchestrator, allowed_origins=(PAGE,), api_keys=("k",))
    async with client_of(app) as client:
        preflight = await client.options(IMAGES, headers={"origin": PAGE, **PREFLIGHT})
        assert preflight.status_code == 200
        allowed = cors_headers(preflight)
        assert allowed["access-control-allow-origin"] == PAGE
        assert "POST" in allowed["access-control-allow-methods"]
        assert "authorization" in allowed["access-control-allow-headers"]
        assert preflight.headers["x-request-id"]
        refused = await client.post(IMAGES, json={"prompt": "x"}, headers={"origin": PAGE})
        assert (refused.status_code, cors_headers(refused)["access-control-allow-origin"]) == (401, PAGE)
    async with client_of(app, key="k") as client:
        answer = await client.post(IMAGES, json={"prompt": "x"}, headers={"origin": PAGE})
        assert (answer.status_code, cors_headers(answer)["access-control-allow-origin"]) == (200, PAGE)
        assert "x-request-id" in cors_headers(answer)["access-control-expose-headers"]


async def test_another_origin_is_refused_with_an_envelope(orchestrator: FakeOrchestrator) -> None:
    async with client_of(make_app(orchestrator, allowed_origins=(PAGE,))) as client:
        preflight = await client.options(IMAGES, headers={"origin": "https://evil.example", **PREFLIGHT})
        assert (preflight.status_code, preflight.json()["error"]["code"]) == (400, "invalid_value")
        assert "access-control-allow-origin" not in preflight.headers
        answer = await client.post(IMAGES, json={"prompt": "x"}, headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers


async def test_a_star_allows_every_origin(orchestrator: FakeOrchestrator) -> None:
    async with client_of(make_app(orchestrator, allowed_origins=("*",))) as client:
        answer = await client.post(IMAGES, json={"prompt": "x"}, headers={"origin": "https://any.example"})
        assert cors_headers(answer)["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("prefix", ["", "/pictures"])
async def test_a_proxy_may_strip_its_prefix_or_leave_it(orchestrator: FakeOrchestrator, prefix: str) -> None:
    async with client_of(make_app(orchestrator, root_path="/pictures", api_keys=("k",))) as client:
        assert (await client.get(f"{prefix}/health")).status_code == 200
        assert (await client.get(f"{prefix}/v1/models")).status_code == 401
        models = await client.get(f"{prefix}/v1/models", headers={"authorization": "Bearer k"})
        assert models.status_code == 200
        unknown = await client.get("/other/v1/models", headers={"authorization": "Bearer k"})
        assert unknown.status_code == 404
