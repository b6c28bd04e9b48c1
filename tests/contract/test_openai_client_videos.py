"""The official `openai` client, unchanged, against a server that makes videos; older clients have no videos."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from contract_target import Target

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")


@pytest.fixture
def videos(video_target: Target) -> Iterator[Any]:
    url = f"{video_target.url}/v1"
    with openai.OpenAI(base_url=url, api_key=video_target.key, max_retries=0, timeout=60) as client:
        if not hasattr(client, "videos"):
            pytest.skip(f"openai {openai.__version__} knows no videos")
        yield client.videos


def test_a_video_is_made_found_listed_downloaded_and_deleted(videos: Any) -> None:
    made = videos.create_and_poll(
        prompt="a red circle moves", size="64x64", seconds="1", extra_body={"seed": 4}, poll_interval_ms=50
    )
    assert (made.status, made.progress, made.error, made.size) == ("completed", 100, None, "64x64")
    assert videos.retrieve(made.id).id == made.id
    assert videos.download_content(made.id).content[4:8] == b"ftyp"
    assert videos.download_content(made.id, variant="thumbnail").content[8:12] == b"WEBP"
    other = videos.create_and_poll(prompt="another", size="64x64", poll_interval_ms=50)
    listed = [video.id for video in videos.list(limit=1)]  # two pages at least: the client asks for the next itself
    assert listed.index(other.id) < listed.index(made.id)
    assert videos.delete(made.id).deleted is True
    with pytest.raises(openai.NotFoundError) as caught:
        videos.retrieve(made.id)
    assert caught.value.code == "video_not_found"
    videos.delete(other.id)


def test_what_the_caller_can_mend_is_a_bad_request_error(videos: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        videos.create(prompt="x", size="100000x100000")
    assert (caught.value.code, caught.value.param) == ("invalid_value", "size")
