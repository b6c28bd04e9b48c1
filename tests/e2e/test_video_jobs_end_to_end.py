"""Video jobs over the official client against a real server, also one that is killed in the middle."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import av
import openai
import pytest
from PIL import Image

from support.server_process import StartServer, free_port, wait_until, write_stage_file

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")


def decoded(clip: bytes) -> tuple[int, int, int, int]:
    """Frames, rate, width and height."""
    with av.open(io.BytesIO(clip)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate is not None
        shapes = [frame.to_ndarray(format="rgb24").shape for frame in container.decode(stream)]
        return len(shapes), int(stream.average_rate), shapes[0][1], shapes[0][0]


@pytest.fixture
def client_of() -> Iterator[Callable[[int], openai.OpenAI]]:
    made: list[openai.OpenAI] = []

    def make(port: int) -> openai.OpenAI:
        made.append(openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0))
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_the_official_client_makes_lists_fetches_and_deletes_videos_of_a_real_pipeline(
    start_server: StartServer, client_of: Callable[[int], openai.OpenAI], tiny_pipelines: Path, tmp_path: Path
) -> None:
    server = start_server(
        str(tiny_pipelines / "wan"), "--served-model-name", "tiny/wan", "--data-dir", str(tmp_path / "d"), ready=1
    )
    client = client_of(server.port)
    body = {"num_inference_steps": 2, "seed": 4, "fps": 8}
    made = client.videos.create_and_poll(
        model="tiny/wan",  # type: ignore[arg-type]
        prompt="a red circle moves",
        seconds="0.6",  # type: ignore[arg-type]
        size="32x32",  # type: ignore[arg-type]
        extra_body=body,
        poll_interval_ms=50,
    )
    assert (made.status, made.progress, made.error, made.model) == ("completed", 100, None, "tiny/wan")
    assert (made.size, made.seconds, made.prompt) == ("32x32", "0.625", "a red circle moves")
    assert made.completed_at is not None
    assert made.created_at <= made.completed_at
    clip = client.videos.download_content(made.id).content
    assert decoded(clip) == (5, 8, 32, 32)
    thumbnail = client.videos.download_content(made.id, variant="thumbnail").content
    assert Image.open(io.BytesIO(thumbnail)).size == (32, 32)
    again = client.videos.create_and_poll(
        prompt="a red circle moves",
        size="32x32",  # type: ignore[arg-type]
        extra_body=body | {"num_frames": 5},
        poll_interval_ms=50,
    )
    assert client.videos.download_content(again.id).content == clip
    assert [video.id for video in client.videos.list(limit=1)] == [again.id, made.id]
    assert client.videos.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no video"):
        client.videos.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="n must be 1"):
        client.videos.create(prompt="a", extra_body={"n": 2})


def test_after_a_kill_every_job_ends_completed_under_its_own_id(
    start_server: StartServer, client_of: Callable[[int], openai.OpenAI], tmp_path: Path
) -> None:
    stage_file = write_stage_file(tmp_path / "stages.yaml", replicas=1, seconds=0.8, kind="video")
    port = free_port()
    arguments = ("--stage-configs-path", str(stage_file), "--data-dir", str(tmp_path / "data"))
    server = start_server(*arguments, port=port, ready=1)
    client = client_of(port)

    def create(number: int) -> str:
        body = {"num_frames": 3 + number, "fps": 4, "seed": 100 + number}
        return client.videos.create(prompt=f"clip {number}", extra_body=body).id

    def statuses() -> list[str]:
        return [client.videos.retrieve(job_id).status for job_id in ids]

    ids = [create(0)]
    wait_until(lambda: statuses() == ["completed"], 30, "the first job is completed")
    ids += [create(number) for number in range(1, 5)]
    before = ["completed", "in_progress", "queued", "queued", "queued"]
    wait_until(lambda: statuses() == before, 30, "one job runs and three wait")
    server.process.kill()
    server.process.wait()

    start_server(*arguments, port=port)
    wait_until(lambda: is_up(client), 60, "the server answers again")
    assert statuses()[:2] == ["completed", "in_progress"]
    second = start_server(*arguments, port=free_port())
    assert second.process.wait(60) == 2
    assert "another server keeps its jobs there" in second.log.read_text()
    wait_until(lambda: statuses() == ["completed"] * 5, 60, "all jobs are completed")
    assert [video.id for video in client.videos.list(order="asc")] == ids
    for number, job_id in enumerate(ids):
        clip = client.videos.download_content(job_id).content
        assert decoded(clip)[:2] == (3 + number, 4)
        assert clip.endswith(b'{"prompt": "clip %d", "seed": %d}' % (number, 100 + number))


def is_up(client: openai.OpenAI) -> bool:
    try:
        client.videos.list()
    except openai.APIConnectionError:
        return False
    return True


def test_a_drained_server_leaves_its_unfinished_jobs_to_the_next_one_and_does_not_wait_for_a_disk_for_ever(
    start_server: StartServer, client_of: Callable[[int], openai.OpenAI], tmp_path: Path
) -> None:
    stage_file = write_stage_file(tmp_path / "stages.yaml", replicas=1, seconds=1.0, kind="video")
    arguments = ("--stage-configs-path", str(stage_file), "--data-dir", str(tmp_path / "data"))
    server = start_server(*arguments, ready=1)
    client = client_of(server.port)
    ids = [client.videos.create(prompt=f"clip {number}").id for number in range(2)]
    wait_until(lambda: client.videos.retrieve(ids[0]).status == "in_progress", 30, "the first job runs")
    assert server.stop(signal.SIGTERM) == 0
    server = start_server(*arguments, ready=1)
    client = client_of(server.port)
    assert client.videos.retrieve(ids[0]).status == "completed"  # it ran when the drain began
    wait_until(lambda: client.videos.retrieve(ids[1]).status == "completed", 30, "the other one is completed")
    # A pipe that nobody reads stands where the clip goes: the write never ends, the server does.
    stuck = client.videos.create(prompt="stuck").id
    os.mkfifo(tmp_path / "data" / "videos" / f"{stuck}.part")
    wait_until(lambda: client.videos.retrieve(stuck).status == "in_progress", 30, "the job runs")
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not is_up(client), 30, "the port is closed")
    assert server.stop(signal.SIGTERM, timeout_s=5) == 0
    assert "the disk does not take the last clips" in server.log.read_text()
