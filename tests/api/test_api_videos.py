"""The video routes: shapes, refusals, pages, files; jobs are real, their requests end when the test says so."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from api_fakes import IMAGE_MODEL, NAMES, VIDEO_MODEL, FakeOrchestrator, client_of, make_app
from PIL import Image

from triptych.errors import ErrorCode, TriptychError
from triptych.jobs.store import JobStore
from triptych.jobs.video_jobs import VideoJobs
from triptych.media.images import encode_png
from triptych.media.video import encode_mp4
from triptych.messages import GenerationRequest, ModelInfo
from triptych.orchestrator.stream import EventStream

pytestmark = pytest.mark.anyio
WAIT_S = 20
CLIP = encode_mp4(np.full((5, 32, 48, 3), 200, dtype=np.uint8), fps=8)


class ClipOrchestrator(FakeOrchestrator):
    """Its streams are real ones, and stay open until `finish` or an abort."""

    def __init__(self, model: ModelInfo | None = VIDEO_MODEL) -> None:
        super().__init__(model)
        self.open: dict[str, EventStream] = {}

    def submit(self, request: GenerationRequest, **_: Any) -> Any:
        super().submit(request)
        stream = self.open[request.id] = EventStream(request.id, self.abort)
        return stream

    def abort(self, request_id: str, **_: Any) -> None:
        self.open.pop(request_id).end(TriptychError(ErrorCode.REQUEST_ABORTED, "the request was aborted"))

    async def serving(self) -> ModelInfo:
        assert self.model is not None
        return self.model

    def finish(self, clip: bytes = CLIP) -> None:
        """End the oldest request."""
        request_id = next(iter(self.open))
        stream = self.open.pop(request_id)
        self.payload = clip
        (output,) = self.make_outputs(next(r for r in self.submitted if r.id == request_id))
        stream.push(output)
        stream.end(None)


class Server:
    """The app with its jobs."""

    def __init__(self, orchestrator: ClipOrchestrator, jobs: VideoJobs, client: httpx.AsyncClient) -> None:
        self.orchestrator, self.jobs, self.client = orchestrator, jobs, client

    async def create(self, **fields: Any) -> dict[str, Any]:
        answer = await self.client.post("/v1/videos", json={"prompt": "a red circle moves"} | fields)
        assert answer.status_code == 200, answer.text
        job: dict[str, Any] = answer.json()
        return job

    async def ended(self, job_id: str) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            while not self.jobs.find(job_id).has_ended:  # noqa: ASYNC110 - the end is on disk first
                await asyncio.sleep(0.002)
        job: dict[str, Any] = (await self.client.get(f"/v1/videos/{job_id}")).json()
        return job

    async def completed(self, **fields: Any) -> str:
        job_id: str = (await self.create(**fields))["id"]
        self.orchestrator.finish()
        await self.ended(job_id)
        return job_id


Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    running: list[tuple[Server, asyncio.Task[None]]] = []

    async def begin(model: ModelInfo | None = VIDEO_MODEL, *, key: str | None = None, **settings: Any) -> Server:
        orchestrator = ClipOrchestrator(model)
        folder = tmp_path / str(len(running))
        folder.mkdir()
        jobs = VideoJobs(JobStore(folder), orchestrator, model=NAMES[0], keep_s=3600, max_bytes=10**6)
        client = client_of(make_app(orchestrator, jobs=jobs, **settings), key=key)
        server = Server(orchestrator, jobs, client)
        running.append((server, asyncio.create_task(jobs.run())))
        await asyncio.sleep(0)
        return server

    yield begin
    for server, task in running:
        server.jobs.close()
        for request_id in list(server.orchestrator.open):
            server.orchestrator.abort(request_id)
        await task
        await server.client.aclose()


def error_of(answer: httpx.Response) -> tuple[int, str, str | None, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"], error["message"]


async def test_a_job_has_the_official_shape_from_its_making_to_its_end(start: Start) -> None:
    server = await start()
    form = {"prompt": "a red circle moves", "seconds": "2", "size": "48x32", "model": "alias", "seed": "0"}
    answer = await server.client.post("/v1/videos", files=[(name, (None, value)) for name, value in form.items()])
    assert answer.status_code == 200, answer.text
    made = answer.json()
    created_at, expires_at = made.pop("created_at"), made.pop("expires_at")
    job_id, request_id = made.pop("id"), made.pop("request_id")
    assert made == {
        "object": "video",
        "model": "Qwen/Qwen-Image",
        "status": "queued",
        "progress": 0,
        "completed_at": None,
        "error": None,
        "prompt": "a red circle moves",
        "remixed_from_video_id": None,
        "seconds": "2.0625",
        "size": "48x32",
        "num_frames": 33,
        "fps": 16,
        "seed": 0,
        "metrics": [],
        "ignored_parameters": [],
    }
    assert (type(created_at), expires_at) == (int, None)
    assert request_id == server.orchestrator.submitted[0].id
    server.orchestrator.finish()
    shown = await server.ended(job_id)
    assert shown["status"] == "completed"
    assert (shown["progress"], shown["error"], len(shown["metrics"])) == (100, None, 1)
    assert shown["expires_at"] - shown["completed_at"] == 3600


async def test_a_failed_job_says_why(start: Start) -> None:
    server = await start()
    job = await server.create()
    server.orchestrator.abort(job["request_id"])
    shown = await server.ended(job["id"])
    assert shown["status"] == "failed"
    assert shown["error"] == {
        "code": "request_aborted",
        "message": "the request was aborted",
        "param": None,
        "type": "request_aborted",
    }
    answer = await server.client.get(f"/v1/videos/{job['id']}/content")
    assert error_of(answer)[:2] == (409, "conflict")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"prompt": None}, 400, "missing_parameter", "prompt"),
        ({"model": "sora-2"}, 404, "model_not_found", "model"),
        ({"n": 2}, 400, "invalid_value", "n"),
        ({"num_outputs_per_prompt": 2}, 400, "invalid_value", "n"),
        ({"seconds": "x"}, 400, "invalid_value", "seconds"),
        ({"seconds": "400"}, 400, "invalid_value", "seconds"),
        ({"seconds": -1}, 400, "invalid_value", "seconds"),
        ({"num_frames": 12}, 400, "invalid_value", "num_frames"),
        ({"num_frames": 261}, 400, "invalid_value", "num_frames"),
        ({"fps": 121}, 400, "invalid_value", "fps"),
        ({"size": "720x1281"}, 400, "invalid_value", "size"),
        ({"output_format": "png"}, 400, "unsupported_parameter", "output_format"),
        ({"input_reference": {"image_url": "data:,x"}}, 400, "unsupported_parameter", "input_reference"),
        ({"promt": "x"}, 400, "unknown_parameter", "promt"),
    ],
)
async def test_what_cannot_be_made_is_refused_at_once_and_makes_no_job(
    start: Start, fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    server = await start()
    answer = await server.client.post("/v1/videos", json={"prompt": "a red circle"} | fields)
    assert error_of(answer)[:3] == (status, code, param)
    assert (await server.client.get("/v1/videos")).json()["data"] == []


async def test_each_kind_of_model_has_its_routes_and_the_others_say_so(start: Start) -> None:
    pictures = await start(IMAGE_MODEL)
    status, code, param, message = error_of(await pictures.client.post("/v1/videos", json={"prompt": "a"}))
    assert (status, code, param) == (400, "invalid_value", "model")
    assert "makes pictures" in message
    clips = await start(VIDEO_MODEL)
    status, code, param, message = error_of(await clips.client.post("/v1/images/generations", json={"prompt": "a"}))
    assert (status, code, param) == (400, "invalid_value", "model")
    assert "makes videos; POST /v1/videos" in message


async def test_before_the_model_is_loaded_jobs_are_listed_and_none_is_made(start: Start) -> None:
    server = await start(None)
    assert error_of(await server.client.post("/v1/videos", json={"prompt": "a"}))[:2] == (503, "not_ready")
    assert (await server.client.get("/v1/videos")).json() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/videos/video_1/remix"),
        ("POST", "/v1/videos/edits"),
        ("POST", "/v1/videos/extensions"),
        ("POST", "/v1/videos/characters"),
    ],
)
async def test_the_routes_for_changing_videos_are_not_available(start: Start, method: str, path: str) -> None:
    server = await start()
    status, code, _, message = error_of(await server.client.request(method, path))
    assert (status, code) == (400, "not_available")
    assert "not available in this version" in message


async def test_pages(start: Start) -> None:
    server = await start()
    ids = [(await server.create())["id"] for _ in range(3)]
    first = (await server.client.get("/v1/videos", params={"limit": 2})).json()
    assert [job["id"] for job in first["data"]] == [ids[2], ids[1]]
    assert (first["first_id"], first["last_id"], first["has_more"]) == (ids[2], ids[1], True)
    rest = (await server.client.get("/v1/videos", params={"limit": 2, "after": ids[1]})).json()
    assert ([job["id"] for job in rest["data"]], rest["has_more"]) == ([ids[0]], False)
    oldest = (await server.client.get("/v1/videos", params={"order": "asc", "limit": 1})).json()
    assert [job["id"] for job in oldest["data"]] == [ids[0]]


@pytest.mark.parametrize(
    ("name", "value"), [("limit", "0"), ("limit", "101"), ("limit", "two"), ("order", "up"), ("after", "x")]
)
async def test_a_bad_page_is_refused_by_name(start: Start, name: str, value: str) -> None:
    server = await start()
    answer = await server.client.get("/v1/videos", params={name: value})
    assert error_of(answer)[:3] == (400, "invalid_value", name)


async def test_delete_stops_a_running_job_and_leaves_nothing(start: Start) -> None:
    server = await start()
    job = await server.create()
    answer = await server.client.delete(f"/v1/videos/{job['id']}")
    assert answer.json() == {"id": job["id"], "object": "video.deleted", "deleted": True}
    assert server.orchestrator.open == {}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
        answer = await server.client.request(method, f"/v1/videos/{job['id']}{path}")
        assert error_of(answer)[:2] == (404, "video_not_found")


@pytest.mark.parametrize(
    ("header", "status", "expected"),
    [
        (None, 200, CLIP),
        ("bytes=0-99", 206, CLIP[:100]),
        ("bytes=-10", 206, CLIP[-10:]),
        ("bytes=100-", 206, CLIP[100:]),
        ("bytes=9-3", 200, CLIP),
        ("lines=1-2", 200, CLIP),
        ("bytes=x", 200, CLIP),
        ("bytes=²-", 200, CLIP),  # a digit to str.isdigit and none to int
        (f"bytes=0-{'9' * 5000}", 200, CLIP),
        ("bytes=999999-", 416, None),
        ("bytes=-0", 416, None),
    ],
)
async def test_content_is_the_file_or_the_asked_part_of_it(
    start: Start, header: str | None, status: int, expected: bytes | None
) -> None:
    server = await start()
    job_id = await server.completed()
    headers = {} if header is None else {b"range": header.encode("latin-1")}
    answer = await server.client.get(f"/v1/videos/{job_id}/content", headers=headers)
    assert answer.status_code == status
    if expected is None:
        assert error_of(answer)[1] == "range_not_satisfiable"
    else:
        assert answer.headers["content-type"] == "video/mp4"
        assert answer.content == expected


async def test_the_thumbnail_is_the_first_frame(start: Start) -> None:
    server = await start()
    job_id = await server.completed()
    answer = await server.client.get(f"/v1/videos/{job_id}/content", params={"variant": "thumbnail"})
    assert answer.headers["content-type"] == "image/webp"
    picture = np.asarray(Image.open(io.BytesIO(answer.content)))
    assert picture.shape == (32, 48, 3)
    assert abs(int(picture.mean()) - 200) < 5
    for variant, code in (("spritesheet", "not_available"), ("sound", "invalid_value")):
        answer = await server.client.get(f"/v1/videos/{job_id}/content", params={"variant": variant})
        assert error_of(answer)[:3] == (400, code, "variant")


async def test_a_disk_that_does_not_answer_takes_no_thread_that_others_need(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start()
    job_id = await server.completed()
    answering, asked = threading.Event(), threading.Semaphore(0)

    def hang(path: Path) -> Any:
        asked.release()
        answering.wait(20)
        raise FileNotFoundError

    monkeypatch.setattr("triptych.api.video_files.first_frame", hang)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    url = f"/v1/videos/{job_id}/content?variant=thumbnail"
    answer = asyncio.create_task(server.client.get(url))
    try:
        async with asyncio.timeout(10):
            while not asked.acquire(blocking=False):  # noqa: ASYNC110 - a thread tells no event
                await asyncio.sleep(0.01)
            await asyncio.to_thread(asked.release)
    finally:
        answering.set()
    assert error_of(await answer)[0] == 404


@pytest.mark.parametrize("variant", ["video", "thumbnail"])
async def test_a_file_that_somebody_removed_is_not_found(start: Start, variant: str) -> None:
    server = await start()
    job_id = await server.completed()
    server.jobs.path_of(server.jobs.find(job_id)).unlink()
    answer = await server.client.get(f"/v1/videos/{job_id}/content", params={"variant": variant})
    assert error_of(answer)[:2] == (404, "not_found")


async def test_a_model_that_takes_pictures_gets_the_reference(start: Start) -> None:
    model = msgspec.structs.replace(VIDEO_MODEL, image=VIDEO_MODEL)
    server = await start(model)
    png = encode_png(np.zeros((4, 6, 3), dtype=np.uint8))
    answer = await server.client.post(
        "/v1/videos", data={"prompt": "a"}, files={"input_reference": ("a.png", png, "application/octet-stream")}
    )
    assert answer.status_code == 200, answer.text
    (media,) = server.orchestrator.submitted[0].inputs
    assert (media.kind, media.width, media.height) == ("image", 6, 4)
    assert server.orchestrator.submitted[0].frames == (bytes(72),)
    for reference, code in (
        ({"file_id": "file-1"}, "not_available"),
        ({"image_url": "data:image/png;base64,AAAA"}, "invalid_image"),
        (7, "invalid_value"),
        ([], "invalid_value"),
    ):
        answer = await server.client.post("/v1/videos", json={"prompt": "a", "input_reference": reference})
        assert error_of(answer)[:3] == (400, code, "input_reference")


async def test_with_keys_a_caller_sees_and_deletes_only_its_own(start: Start) -> None:
    server = await start(key="one", api_keys=("one", "two"), admin_api_key="boss")
    job = await server.create()

    async def seen_by(key: str) -> tuple[int, int, int]:
        headers = {"authorization": f"Bearer {key}"}
        listed = (await server.client.get("/v1/videos", headers=headers)).json()["data"]
        got = await server.client.get(f"/v1/videos/{job['id']}", headers=headers)
        gone = await server.client.delete(f"/v1/videos/{job['id']}", headers=headers)
        return len(listed), got.status_code, gone.status_code

    assert await seen_by("two") == (0, 404, 404)
    assert await seen_by("boss") == (1, 200, 200)


async def test_a_key_names_one_job_as_long_as_that_is_kept(start: Start) -> None:
    server = await start()

    async def post(key: str, prompt: str = "a") -> httpx.Response:
        return await server.client.post(
            "/v1/videos", files={"prompt": (None, prompt)}, headers={"idempotency-key": key}
        )

    answers = [await answer for answer in [asyncio.create_task(post("k")) for _ in range(3)]]
    (job_id,) = {answer.json()["id"] for answer in answers}
    assert len(server.orchestrator.submitted) == 1
    server.orchestrator.finish()
    await server.ended(job_id)
    again = (await post("k")).json()
    assert (again["id"], again["status"]) == (job_id, "completed")
    assert error_of(await post("k", "b"))[:3] == (409, "conflict", "idempotency-key")
    await server.client.delete(f"/v1/videos/{job_id}")
    assert (await post("k", "b")).json()["id"] != job_id
