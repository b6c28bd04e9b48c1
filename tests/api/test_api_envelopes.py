"""Every failure leaves as an OpenAI error envelope with the right status and headers, and every answer has an id."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import msgspec
import pytest
from api_fakes import FakeOrchestrator, client_of, make_app

from triptych.errors import CODES, ErrorCode, TriptychError
from triptych.orchestrator.events import Readiness

pytestmark = pytest.mark.anyio

IMAGES = "/v1/images/generations"


def check(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), response.text
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == CODES[ErrorCode(code)].type
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    message: str = error["message"]
    return message


@pytest.mark.parametrize("code", list(ErrorCode))
@pytest.mark.parametrize("path", [IMAGES, "/v1/chat/completions"])
async def test_every_code_has_its_status_and_retry_headers(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, code: ErrorCode, path: str
) -> None:
    orchestrator.submit_error = TriptychError(code, "because", retry_after_s=1.2)
    body = {"prompt": "x"} if path == IMAGES else {"messages": [{"role": "user", "content": "x"}]}
    response = await client.post(path, json=body)
    assert check(response, CODES[code].status, code.value) == "because"
    assert response.headers["retry-after"] == "2"
    expected = {True: "true", False: "false", None: None}[CODES[code].should_retry]
    assert response.headers.get("x-should-retry") == expected


async def test_an_error_may_override_whether_a_repeat_helps(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    orchestrator.submit_error = TriptychError(ErrorCode.ENGINE_ERROR, "x", should_retry=True)
    response = await client.post(IMAGES, json={"prompt": "x"})
    assert response.headers["x-should-retry"] == "true"
    assert "retry-after" not in response.headers


async def test_an_unexpected_exception_is_a_500_and_stands_in_the_log(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    orchestrator.submit_error = ZeroDivisionError("secret detail")
    with caplog.at_level(logging.ERROR):
        response = await client.post(IMAGES, json={"prompt": "x"}, headers={"x-request-id": "mine"})
    message = check(response, 500, "engine_error")
    assert "secret" not in message
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["x-request-id"] == "mine"
    assert "ZeroDivisionError: secret detail" in caplog.text


@pytest.mark.parametrize(
    ("code", "level"),
    [
        ("engine_error", logging.WARNING),
        ("no_replica", logging.WARNING),
        ("request_aborted", logging.INFO),
        ("deadline_exceeded", logging.INFO),
        ("queue_full", None),
        ("invalid_value", None),
    ],
)
@pytest.mark.parametrize("accepted", [False, True])
async def test_a_failure_that_is_not_the_clients_is_one_log_line_with_id_code_and_replica(
    client: httpx.AsyncClient,
    orchestrator: FakeOrchestrator,
    caplog: pytest.LogCaptureFixture,
    code: str,
    level: int | None,
    accepted: bool,
) -> None:
    error = TriptychError(ErrorCode(code), "because")
    if accepted:
        orchestrator.end_error = error
    else:
        orchestrator.submit_error = error
    with caplog.at_level(logging.DEBUG, logger="triptych"):
        response = await client.post(IMAGES, json={"prompt": "secret"})
    assert (await client.post(IMAGES, json={"prompt": ""})).status_code == 400
    records = [record for record in caplog.records if record.name.startswith("triptych.api")]
    assert [record.levelno for record in records] == ([] if level is None else [level])
    for record in records:
        fields = vars(record)
        assert (fields["request"], fields["code"]) == (response.headers["x-request-id"], code)
        assert fields["status"] == response.status_code
        assert fields.get("replicas") == ([1] if accepted else None)
        assert ("seconds" in fields) == accepted
        assert "secret" not in record.getMessage()


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"", {"content-type": "application/json"}, 400, "invalid_json"),
        (b"{", {"content-type": "application/json"}, 400, "invalid_json"),
        (b"[]", {"content-type": "application/json"}, 400, "invalid_json"),
        (b"null", {"content-type": "application/json"}, 400, "invalid_json"),
        (b'"x"', {"content-type": "application/json"}, 400, "invalid_json"),
        (b"3", {"content-type": "application/json"}, 400, "invalid_json"),
        (b'{"prompt":NaN}', {"content-type": "application/json"}, 400, "invalid_json"),
        (b'{"guidance_scale":1e999}', {"content-type": "application/json"}, 400, "invalid_json"),
        (b'{"prompt":"\\ud800"}', {"content-type": "application/json"}, 400, "invalid_json"),
        (b'{"prompt":"\xff"}', {"content-type": "application/json"}, 400, "invalid_json"),
        (b'{"a":' + b"[" * 200_000, {"content-type": "application/json"}, 400, "invalid_json"),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", {"content-type": "application/json"}, 400, "invalid_json"),
        (b"prompt=x", {"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        (b'{"prompt":"x"}', {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (b'{"prompt":"x"}', {}, 415, "unsupported_media_type"),
        (
            b'{"prompt":"x"}',
            {"content-type": "application/json", "content-encoding": "gzip"},
            415,
            "unsupported_media_type",
        ),
    ],
)
@pytest.mark.parametrize("path", [IMAGES, "/v1/chat/completions"])
async def test_a_body_that_is_no_json_object_is_refused(
    client: httpx.AsyncClient, path: str, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    check(await client.post(path, content=content, headers=headers), status, code)


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8"])
async def test_json_content_types_are_taken_and_the_last_of_duplicate_keys_wins(
    client: httpx.AsyncClient, content_type: str
) -> None:
    content = b'{"prompt":"x","seed":1,"seed":2}'
    response = await client.post(IMAGES, content=content, headers={"content-type": content_type})
    assert response.json()["data"][0]["seed"] == 2


async def test_deep_but_readable_nesting_in_a_parameter_is_a_plain_400(client: httpx.AsyncClient) -> None:
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    check(await client.post(IMAGES, json={"prompt": "x", "seed": deep}), 400, "invalid_value", "seed")


async def test_a_small_text_that_would_become_large_values_is_413(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json"}
    for item in (b"[]", b"{}", b"0"):
        content = b'{"prompt":"x","extra_args":[%b]}' % b",".join([item] * 250_000)
        message = check(await client.post(IMAGES, content=content, headers=headers), 413, "payload_too_large")
        assert "at most 250000 commas and opening brackets" in message
    url = "data:image/png;base64," + "A" * 1_000_000
    content = msgspec.json.encode({"prompt": "x", "seed": [url]})
    check(await client.post(IMAGES, content=content, headers=headers), 400, "invalid_value", "seed")


async def test_commands_are_bodies_of_a_few_fields(client: httpx.AsyncClient) -> None:
    body = {f"field{number}": 1 for number in range(10_000)}
    for method, path in (("PATCH", "/v1/requests/x"), ("PUT", "/v1/replicas"), ("POST", "/v1/replicas/0/drain")):
        check(await client.request(method, path, json=body), 413, "payload_too_large")


async def test_a_body_over_the_limit_is_413_with_and_without_content_length(orchestrator: FakeOrchestrator) -> None:
    async def chunks() -> Any:
        for _ in range(3):
            yield b" " * 600

    headers = {"content-type": "application/json"}
    async with client_of(make_app(orchestrator, max_body_size=1024)) as client:
        for content in (b" " * 1025, chunks()):
            response = await client.post(IMAGES, content=content, headers=headers)
            message = check(response, 413, "payload_too_large")
            assert "1024" in message
        body = b'{"prompt":"x"}'
        fits = await client.post(IMAGES, content=body + b" " * (1024 - len(body)), headers=headers)
        assert fits.status_code == 200


async def test_unknown_paths_are_404_and_wrong_methods_405_with_allow(client: httpx.AsyncClient) -> None:
    check(await client.get("/v1/nothing"), 404, "not_found")
    check(await client.get("/v1/models/"), 404, "model_not_found", "model")
    wrong = await client.get(IMAGES)
    check(wrong, 405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    check(await client.post("/v1/requests/x"), 405, "method_not_allowed")
    check(await client.request("TRACE", "/livez"), 405, "method_not_allowed")


async def test_options_and_head_are_answered_sanely(client: httpx.AsyncClient) -> None:
    options = await client.options(IMAGES)
    assert (options.status_code, options.headers["allow"]) == (204, "POST")
    head = await client.head("/health")
    assert head.status_code == 200
    check(await client.options("/nothing"), 404, "not_found")


@pytest.mark.parametrize("sane", ["abc", "a/b?c=d", "~" * 128, "with space"])
async def test_a_sane_client_id_is_echoed(client: httpx.AsyncClient, orchestrator: FakeOrchestrator, sane: str) -> None:
    response = await client.post(IMAGES, json={"prompt": "x"}, headers={"x-request-id": sane})
    assert response.headers["x-request-id"] == sane
    request = orchestrator.submitted[0]
    assert request.client_request_id == sane
    assert request.id.startswith("req_")


@pytest.mark.parametrize("bad", [b"", b"x" * 129, b"\xc3\xa4", b"a\x01b", b"  "])
async def test_an_odd_client_id_is_replaced_by_the_internal_one(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, bad: bytes
) -> None:
    response = await client.post(IMAGES, json={"prompt": "x"}, headers={b"x-request-id": bad})
    request = orchestrator.submitted[0]
    assert response.headers["x-request-id"] == request.id
    assert request.client_request_id is None


async def test_before_the_first_replica_is_ready_requests_get_503_with_a_wait(orchestrator: FakeOrchestrator) -> None:
    orchestrator.model, orchestrator.ready = None, Readiness(ready=False, reason="not_ready")
    async with client_of(make_app(orchestrator)) as client:
        response = await client.post(IMAGES, json={"prompt": "x"})
        check(response, 503, "not_ready")
        assert int(response.headers["retry-after"]) >= 1
        check(await client.post(IMAGES, json={"prompt": ""}), 400, "invalid_value", "prompt")
        check(await client.post(IMAGES, json={"prompt": "x", "n": 0}), 400, "invalid_value", "n")
        orchestrator.ready = Readiness(ready=False, reason="draining")
        check(await client.post(IMAGES, json={"prompt": "x"}), 503, "draining")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/videos/characters"),
        ("POST", "/v1/videos/edits"),
        ("POST", "/v1/videos/extensions"),
        ("POST", "/v1/videos/video_1/remix"),
        ("GET", "/metrics"),
    ],
)
async def test_routes_that_are_not_built_say_so(client: httpx.AsyncClient, method: str, path: str) -> None:
    assert "not available in this version" in check(await client.request(method, path), 400, "not_available")
