"""Answers that link to their pictures, and what the timing header says."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import openai
import pytest
from api_fakes import PNG, FakeOrchestrator, client_of, make_app

from triptych.api.results import Results
from triptych.errors import ConfigError, ErrorCode, TriptychError
from triptych.orchestrator.events import UnitOutput

pytestmark = pytest.mark.anyio

IMAGES = "/v1/images/generations"


async def test_a_url_leads_to_the_picture_without_a_key(orchestrator: FakeOrchestrator) -> None:
    app = make_app(orchestrator, api_keys=("k",))
    async with client_of(app, key="k") as client:
        answer = await client.post(IMAGES, json={"prompt": "x", "n": 2, "seed": 3, "response_format": "url"})
    first, second = answer.json()["data"]
    assert (set(first), first["seed"], second["seed"]) == ({"url", "seed"}, 3, 4)
    assert first["url"].startswith("http://test/results/")
    assert first["url"] != second["url"]
    openai.types.ImagesResponse.model_validate(answer.json())
    async with client_of(app) as client:
        picture = await client.get(first["url"])
        assert (picture.status_code, picture.headers["content-type"], picture.content) == (200, "image/png", PNG)
        assert 0 < int(picture.headers["cache-control"].rpartition("=")[2]) <= 3600
        assert (await client.head(second["url"])).headers["content-length"] == str(len(PNG))
        for name in ("", "x", first["url"].rpartition("/")[2][:-1], "../v1/models"):
            missing = await client.get(f"/results/{name}")
            assert missing.status_code in (401, 404)
            assert missing.json()["error"]["code"] in ("not_found", "invalid_api_key")


@pytest.mark.parametrize(
    ("settings", "host", "link"),
    [
        ({}, "pictures.lan:8000", "http://pictures.lan:8000/results/"),
        ({"root_path": "/p"}, "pictures.lan", "http://pictures.lan/p/results/"),
        ({"public_url": "https://x.example/p", "root_path": "/p"}, "inner", "https://x.example/p/results/"),
        ({}, "a/b?c#d", "http://test/results/"),
    ],
)
async def test_links_name_the_address_that_clients_see(
    orchestrator: FakeOrchestrator, settings: dict[str, Any], host: str, link: str
) -> None:
    async with client_of(make_app(orchestrator, **settings)) as client:
        body = {"prompt": "x", "response_format": "url"}
        answer = await client.post(IMAGES, json=body, headers={"host": host})
    url = answer.json()["data"][0]["url"]
    assert url.startswith(link)
    assert len(url.removeprefix(link).removesuffix(".png")) == 32


async def test_the_log_does_not_tell_the_name_of_a_result(
    orchestrator: FakeOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="triptych")
    async with client_of(make_app(orchestrator, root_path="/p")) as client:
        answer = await client.post(IMAGES, json={"prompt": "x", "response_format": "url"})
        url = answer.json()["data"][0]["url"]
        assert (await client.get(url)).status_code == 200
    assert [vars(record)["path"] for record in caplog.records] == [IMAGES, "/p/results/..."]
    assert url.rpartition("/")[2] not in caplog.text


def output(size: int) -> UnitOutput:
    return cast(UnitOutput, SimpleNamespace(mime="image/webp", data=b"x" * size))


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def missing(results: Results, name: str) -> bool:
    try:
        await results.read(name)
    except TriptychError as error:
        return error.code is ErrorCode.NOT_FOUND
    return False


async def test_a_result_ends_with_its_time_and_the_oldest_make_room(tmp_path: Path) -> None:
    now = [1000.0]
    results = Results(tmp_path, life_s=10, room_bytes=100, clock=lambda: now[0])
    first = await results.keep(output(60))
    now[0] += 4.0
    assert await results.read(first) == ("image/webp", b"x" * 60, 6.0)
    second = await results.keep(output(40))
    assert (await results.read(first))[2] == 6.0
    third = await results.keep(output(1))
    assert await missing(results, first)
    now[0] += 9.9
    assert (await results.read(second))[2] == pytest.approx(0.1)
    now[0] += 0.1
    for name in (second, third):
        assert await missing(results, name)
    assert (results._held_bytes, files(tmp_path)) == (0, [])


async def test_files_go_as_their_time_ends_though_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.api.results._MIN_SLEEP_S", 0.01)
    results = Results(tmp_path, life_s=0.05)
    expiring = asyncio.create_task(results.expire())
    for _ in range(2):
        await results.keep(output(60))
        async with asyncio.timeout(20):
            while files(tmp_path):  # noqa: ASYNC110 - a folder has no event
                await asyncio.sleep(0.01)
    expiring.cancel()


async def test_the_next_server_serves_what_still_has_time_and_removes_the_rest(tmp_path: Path) -> None:
    now = [1000.0]
    options: Any = {"life_s": 10, "room_bytes": 100, "clock": lambda: now[0]}
    before = Results(tmp_path, **options)
    old = await before.keep(output(60))
    now[0] += 5.0
    kept = await before.keep(output(30))
    (tmp_path / "broken.webp.part").write_bytes(b"x")
    now[0] += 5.0
    after = Results(tmp_path, **options)
    assert await after.read(kept) == ("image/webp", b"x" * 30, 5.0)
    assert await missing(after, old)
    assert files(tmp_path) == [kept]
    await after.keep(output(71))
    assert await missing(after, kept)
    assert await missing(after, "../" + tmp_path.name + "/" + kept)


async def test_a_disk_that_takes_nothing_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "utime", full)
    with pytest.raises(TriptychError, match="No space left") as caught:
        await results.keep(output(10))
    assert (caught.value.code, results._held_bytes, files(tmp_path)) == (ErrorCode.ENGINE_ERROR, 0, [])


async def test_a_file_that_somebody_removed_is_not_found(tmp_path: Path) -> None:
    results = Results(tmp_path)
    name = await results.keep(output(10))
    (tmp_path / name).unlink()
    assert await missing(results, name)


def test_a_folder_that_cannot_be_used_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot keep results") as caught:
        Results(tmp_path / "file" / "results")
    assert caught.value.where == str(tmp_path / "file" / "results")


async def test_server_timing_names_the_longest_phases(orchestrator: FakeOrchestrator) -> None:
    make = orchestrator.make_outputs

    def slower(request: Any) -> list[UnitOutput]:
        first, *others = make(request)
        metrics = type(first.metrics)(0, 2.0, 0.5, 1, 1.0, 1.0, 1)
        return [msgspec.structs.replace(first, metrics=metrics, encode_s=0.0256), *others]

    orchestrator.make_outputs = slower  # type: ignore[method-assign]
    async with client_of(make_app(orchestrator)) as client:
        for path, body in (
            (IMAGES, {"prompt": "x", "n": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}),
        ):
            answer = await client.post(path, json=body)
            assert answer.headers["server-timing"] == "queue;dur=2000.0, inference;dur=1500.0, encode;dur=25.6"
