"""Input pictures over HTTP: as a form or as JSON, in edits and in chats, from the official client and by hand."""

from __future__ import annotations

import asyncio
import base64
import io
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from api_fakes import EDIT_MODEL, PNG, VIDEO_MODEL, FakeOrchestrator, client_of, make_app
from PIL import Image

from support.live_app import serve
from triptych.api.media import MAX_INPUT_PICTURES
from triptych.messages import MediaInput

pytestmark = pytest.mark.anyio

PATH = "/v1/images/edits"


def png(width: int = 32, height: int = 48, colour: Any = (255, 0, 0), mode: str = "RGB") -> bytes:
    target = io.BytesIO()
    Image.new(mode, (width, height), colour).save(target, "PNG")
    return target.getvalue()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


RED = bytes((255, 0, 0)) * (32 * 48)


@pytest.fixture
def orchestrator() -> FakeOrchestrator:
    return FakeOrchestrator(EDIT_MODEL)


async def refused(client: httpx.AsyncClient, **request: Any) -> dict[str, Any]:
    response = await client.post(PATH, **request)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_a_form_with_one_picture_is_edited(client: httpx.AsyncClient, orchestrator: FakeOrchestrator) -> None:
    form = {"prompt": "null", "seed": "0", "strength": "0.5", "n": "2", "output_format": "jpeg", "size": "auto"}
    response = await client.post(PATH, data=form, files={"image": ("a.bin", png(), "application/octet-stream")})
    assert response.status_code == 200, response.text
    body = response.json()
    assert [base64.b64decode(item["b64_json"]) for item in body["data"]] == [PNG, PNG]
    assert (body["size"], body["output_format"], body["ignored_parameters"]) == ("32x48", "jpeg", [])
    (request,) = orchestrator.submitted
    assert (request.params.prompt, request.params.seed, request.params.strength, request.n) == ("null", 0, 0.5, 2)
    assert (request.params.width, request.params.height) == (32, 48)
    assert request.inputs == (MediaInput("image", "RGB", 32, 48, 0),)
    assert request.frames == (RED,)


@pytest.mark.parametrize(
    ("kind", "headers"), [("json", {}), ("form", {}), ("chat", {}), ("json", {"idempotency-key": "k"})]
)
async def test_what_was_sent_is_not_kept_while_the_request_waits(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, kind: str, headers: dict[str, str]
) -> None:
    data = png() + bytes(4 << 20)
    part = {"type": "image_url", "image_url": {"url": url_of(data)}}
    path, body = {
        "json": (PATH, {"json": {"prompt": "x", "image": url_of(data)}}),
        "form": (PATH, {"data": {"prompt": "x"}, "files": {"image": ("a.png", data)}}),
        "chat": (
            "/v1/chat/completions",
            {"json": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}},
        ),
    }[kind]
    request = client.build_request("POST", path, headers=headers, **body)
    request.read()
    orchestrator.hold = asyncio.Event()
    tracemalloc.start()
    try:
        answer = asyncio.create_task(client.send(request))
        await orchestrator.arrived.wait()
        async with asyncio.timeout(10):  # a thread may let go of it a moment later
            while tracemalloc.get_traced_memory()[0] > 1 << 20:  # noqa: ASYNC110 - memory has no event
                await asyncio.sleep(0.01)
        assert tracemalloc.get_traced_memory()[1] > 4 << 20
    finally:
        tracemalloc.stop()
    orchestrator.hold.set()
    assert (await answer).status_code == 200


@pytest.mark.parametrize("name", ["stream", "partial_images"])
async def test_nesting_without_end_in_a_form_is_the_clients_error(client: httpx.AsyncClient, name: str) -> None:
    error = await refused(client, data={"prompt": "x", name: "[" * 100_000}, files={"image": ("a", png())})
    assert (error["code"], error["param"]) == ("invalid_value", name)


async def test_pictures_keep_their_order_and_the_mask_comes_last(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator
) -> None:
    files = [
        ("mask", ("m.png", png(colour=(0, 0, 0, 0), mode="RGBA"))),
        ("image[]", ("a.png", png())),
        ("image[]", ("b.png", png(16, 16, (0, 0, 255)))),
    ]
    response = await client.post(PATH, data={"prompt": "x"}, files=files)
    assert response.status_code == 200, response.text
    (request,) = orchestrator.submitted
    kinds = [(media.kind, media.mode, media.width, media.height, media.frame) for media in request.inputs]
    assert kinds == [("image", "RGB", 32, 48, 0), ("image", "RGB", 16, 16, 1), ("mask", "L", 32, 48, 2)]
    assert request.frames == (RED, bytes((0, 0, 255)) * 256, b"\xff" * (32 * 48))


@pytest.mark.parametrize(
    "pictures",
    [
        {"image": url_of(png())},
        {"image": [url_of(png())]},
        {"image": base64.b64encode(png()).decode()},
        {"images": [{"image_url": url_of(png())}]},
        {"image": {"image_url": {"url": url_of(png())}}},
    ],
)
async def test_json_carries_pictures_as_data_urls(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, pictures: dict[str, Any]
) -> None:
    mask = {"mask": {"image_url": url_of(png(mode="L", colour=255))}}
    response = await client.post(PATH, json={"prompt": "x", "seed": 3, "markup": "?"} | pictures | mask)
    assert response.status_code == 200, response.text
    assert response.json()["ignored_parameters"] == ["markup"]
    assert orchestrator.submitted[0].frames == (RED, b"\xff" * (32 * 48))


@pytest.mark.parametrize("kind", ["image_url", "input_image"])
async def test_a_chat_hands_over_the_pictures_of_its_last_user_message(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, kind: str
) -> None:
    url: Any = {"url": url_of(png())} if kind == "image_url" else url_of(png())
    content = [{"type": "text", "text": "as an oil painting"}, {"type": kind, "image_url": url}]
    old = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,broken"}}]}
    messages = [old, {"role": "assistant", "content": "ok"}, {"role": "user", "content": content}]
    response = await client.post("/v1/chat/completions", json={"messages": messages, "strength": 0.5})
    assert response.status_code == 200, response.text
    (request,) = orchestrator.submitted
    assert (request.params.prompt, request.frames) == ("as an oil painting", (RED,))
    assert (request.params.width, request.params.height) == (32, 48)


async def test_a_chat_blames_messages_for_a_picture_it_cannot_take(client: httpx.AsyncClient) -> None:
    content = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}]
    response = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    assert response.status_code == 400
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == ("invalid_image", "messages")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({}, "missing_parameter", "image"),
        ({"image": []}, "missing_parameter", "image"),
        ({"image": 3}, "invalid_value", "image"),
        ({"image": [None]}, "invalid_value", "image[0]"),
        ({"image": {"file_id": "file-1"}}, "not_available", "image"),
        ({"image": [url_of(png()), "data:;base64,AAAA"]}, "invalid_image", "image[1]"),
        ({"image": "http://example.com/a.png"}, "invalid_image", "image"),
        ({"image": "file:///etc/passwd"}, "invalid_image", "image"),
        ({"image": url_of(png())[:-40]}, "invalid_image", "image"),
        ({"image": [url_of(png())] * (MAX_INPUT_PICTURES + 1)}, "invalid_value", "image"),
        ({"image": url_of(png()), "images": [url_of(png())]}, "invalid_value", "images"),
        ({"image": url_of(png()), "mask": url_of(png(16, 16))}, "invalid_value", "mask"),
        ({"image": url_of(png()), "mask": [url_of(png())]}, "invalid_value", "mask"),
        ({"image": url_of(png()), "strength": 0.01}, "invalid_value", "strength"),
        ({"image": url_of(png()), "size": "33x32"}, "invalid_value", "size"),
        ({"image": url_of(png()), "imag": 1}, "unknown_parameter", "imag"),
    ],
)
async def test_what_is_wrong_with_an_edit_is_named(
    client: httpx.AsyncClient, orchestrator: FakeOrchestrator, fields: dict[str, Any], code: str, param: str
) -> None:
    error = await refused(client, json={"prompt": "x"} | fields)
    assert (error["code"], error["param"]) == (code, param)
    assert not orchestrator.submitted


async def test_forms_are_checked_as_json_is(client: httpx.AsyncClient) -> None:
    files = {"image": ("a.png", png())}
    for data, code, param in (
        ({"prompt": "x", "n": "many"}, "invalid_value", "n"),
        ({"prompt": "x", "seed": "-1"}, "invalid_value", "seed"),
        ({"prompt": "x", "extra_args[latents]": "1"}, "unsupported_parameter", "extra_args.latents"),
        ({}, "missing_parameter", "prompt"),
    ):
        error = await refused(client, data=data, files=files)
        assert (error["code"], error["param"]) == (code, param)
    error = await refused(client, data={"prompt": "x"}, files={"image": ("a.png", b"no picture")})
    assert (error["code"], error["param"]) == ("invalid_image", "image")


async def test_a_model_without_pictures_says_so(orchestrator: FakeOrchestrator) -> None:
    for model, message in ((None, "takes no input pictures"), (VIDEO_MODEL, "makes videos")):
        orchestrator = FakeOrchestrator() if model is None else FakeOrchestrator(model)
        async with client_of(make_app(orchestrator)) as client:
            error = await refused(client, json={"prompt": "x", "image": url_of(png())})
        assert message in error["message"]


async def test_decoding_leaves_the_event_loop_free(client: httpx.AsyncClient) -> None:
    large = url_of(png(2000, 2000))
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    response = await client.post(PATH, json={"prompt": "x", "image": [large] * 2, "size": "32x32"})
    counting.cancel()
    assert response.status_code == 200, response.text
    assert turns > 100


@pytest.fixture
def official(orchestrator: FakeOrchestrator) -> Iterator[openai.OpenAI]:
    with serve(make_app(orchestrator)) as base_url, openai.OpenAI(base_url=base_url, api_key="none") as client:
        yield client


def test_the_official_client_edits_one_picture_several_and_a_masked_one(
    official: openai.OpenAI, orchestrator: FakeOrchestrator
) -> None:
    extra = {"seed": 7, "strength": 0.5, "extra_args": {"max_sequence_length": 64}}
    answer = official.images.edit(
        image=io.BytesIO(png()), prompt="x", model="alias", n=2, size="64x64", quality="high", extra_body=extra
    )
    assert answer.data is not None
    assert [base64.b64decode(image.b64_json or "") for image in answer.data] == [PNG, PNG]
    official.images.edit(image=[png(), io.BytesIO(png(16, 16))], prompt="x", stream=False)
    official.images.edit(image=png(), mask=png(mode="RGBA", colour=(0, 0, 0, 0)), prompt="x", size="auto")
    one, several, masked = orchestrator.submitted
    assert (one.params.seed, one.params.strength, one.params.width, one.n) == (7, 0.5, 64, 2)
    assert one.params.extra_args == {"max_sequence_length": 64}
    assert [media.kind for media in several.inputs] == ["image", "image"]
    assert [media.kind for media in masked.inputs] == ["image", "mask"]
    with official.images.edit(image=png(), prompt="x", stream=True) as events:
        assert [event.type for event in events][-1] == "image_edit.completed"
    with pytest.raises(openai.BadRequestError) as caught:
        official.images.edit(image=b"no picture", prompt="x")
    assert (caught.value.code, caught.value.param) == ("invalid_image", "image")
