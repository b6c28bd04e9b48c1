"""The OpenAPI document: all routes, what needs a key, what the loaded model takes."""

from __future__ import annotations

from typing import Any

import pytest
from api_fakes import VIDEO_MODEL, FakeOrchestrator, client_of, make_app

pytestmark = pytest.mark.anyio


async def read(orchestrator: FakeOrchestrator, **settings: Any) -> Any:
    async with client_of(make_app(orchestrator, **settings), key="k") as client:
        answer = await client.get("/openapi.json")
    assert answer.status_code == 200
    return answer.json()


async def test_it_names_every_route_with_its_statuses(orchestrator: FakeOrchestrator) -> None:
    paths = (await read(orchestrator))["paths"]
    assert set(paths["/v1/requests/{request_id}"]) == {"get", "patch", "delete"}
    assert set(paths["/v1/replicas"]) == {"get", "put"}
    assert {"/", "/openapi.json", "/livez", "/v1/models/{model_id}", "/results/{name}"} <= set(paths)
    answers = paths["/v1/images/generations"]["post"]["responses"]
    assert {"200", "400", "404", "413", "415", "429", "499", "500", "503", "504"} <= set(answers)
    assert "queue_full" in answers["429"]["description"]
    assert "401" not in answers
    content = paths["/v1/videos/{video_id}/content"]["get"]["responses"]
    assert {"200", "206", "404", "409", "416"} <= set(content)
    assert set(content["206"]["content"]) == {"video/mp4", "multipart/byteranges"}
    for path in ("/v1/images/generations", "/v1/images/edits", "/v1/videos"):
        assert paths[path]["post"]["responses"]["409"]["description"] == "conflict"
    assert "409" not in paths["/v1/chat/completions"]["post"]["responses"]


async def test_with_keys_all_but_the_open_routes_need_one(orchestrator: FakeOrchestrator) -> None:
    paths = (await read(orchestrator, api_keys=("k",)))["paths"]
    without_key = {path for path, operations in paths.items() for one in operations.values() if not one["security"]}
    assert without_key == {"/", "/livez", "/readyz", "/health", "/ping", "/version", "/results/{name}"}
    assert "401" in paths["/v1/models"]["get"]["responses"]


async def test_bodies_hold_what_the_model_takes_within_the_limits_of_the_server() -> None:
    for orchestrator, has, has_not in (
        (FakeOrchestrator(), {"true_cfg_scale", "seed", "output_format"}, {"num_frames", "strength"}),
        (FakeOrchestrator(VIDEO_MODEL), {"num_frames", "fps", "seconds"}, {"true_cfg_scale", "output_format"}),
        (FakeOrchestrator(None), {"num_frames", "strength", "output_format"}, set[str]()),
    ):
        schemas = (await read(orchestrator, max_num_inference_steps=7))["components"]["schemas"]
        properties = schemas["ImagesBody"]["properties"]
        assert has <= set(properties)
        assert not has_not & set(properties)
        assert properties["num_inference_steps"]["anyOf"][0]["maximum"] == 7
        assert properties["quality"] == {"description": "accepted and ignored"}
        assert "prompt" not in schemas["ChatBody"]["properties"]


async def test_it_says_where_clients_reach_the_server(orchestrator: FakeOrchestrator) -> None:
    assert (await read(orchestrator, public_url="https://x.example/p"))["servers"] == [{"url": "https://x.example/p"}]
    assert (await read(orchestrator, root_path="/p"))["servers"] == [{"url": "/p"}]
