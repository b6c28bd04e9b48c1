"""Streams of real servers, read by the official client: order, replays, ends."""

from __future__ import annotations

import base64
import io
import os
import signal
from collections import defaultdict
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from support.server_process import ServerProcess, StartServer, wait_until


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def images(client: openai.OpenAI, prompt: str, *, n: int = 1, partial_images: int = 3, **extra: Any) -> Any:
    return client.images.generate(
        prompt=prompt,
        n=n,
        stream=True,
        partial_images=partial_images,
        extra_body={"seed": 7, **extra},
    )


def nothing_runs(server: ServerProcess) -> bool:
    return sum(replica["in_flight"] for replica in server.replicas()) == 0


def test_partial_pictures_of_the_embedded_model_converge_and_the_result_is_that_without_a_stream(
    start_server: StartServer,
) -> None:
    server = start_server("--num-replicas", "1", ready=1)
    with client_of(server) as client:
        prompt = "a red circle above a blue square"
        *partial, final = images(client, prompt)
        assert [event.type for event in partial] == ["image_generation.partial_image"] * 3
        assert [event.partial_image_index for event in partial] == [0, 1, 2]
        assert (final.type, final.size) == ("image_generation.completed", "64x64")
        plain = client.images.generate(model="triptych/shapes", prompt=prompt, extra_body={"seed": 7})
        assert final.b64_json == (plain.data or [])[0].b64_json
    pixels = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(event.b64_json)))).astype(float)
        for event in [*partial, final]
    ]
    far, nearer, near = (np.abs(picture - pixels[-1]).mean() for picture in pixels[:-1])
    assert far > nearer > near
    assert near < 6, "of 255"


def test_streams_of_the_official_client_run_end_and_fail_as_they_should(simulated_server: StartServer) -> None:
    server = simulated_server(replicas=2, seconds=1.0)
    with client_of(server) as client:
        seen: dict[int, list[Any]] = defaultdict(list)
        for event in images(client, "a cat", n=2, size="64x64"):
            seen[event.image_index].append(getattr(event, "partial_image_index", event.type))
        assert seen == {index: [0, 1, 2, "image_generation.completed"] for index in (0, 1)}

        message: Any = [{"role": "user", "content": "a cat"}]
        options: Any = {"include_usage": True}
        chat: Any = {"model": "simulated", "messages": message, "stream": True, "stream_options": options}
        *chunks, usage = client.chat.completions.create(**chat, extra_body={"size": "64x64"})
        assert chunks[0].choices[0].delta.role == "assistant"
        steps = [chunk.progress["step"] for chunk in chunks if getattr(chunk, "progress", None)]
        assert steps == sorted(steps)
        assert len(steps) > 1
        picture, last = chunks[-2:]
        assert picture.choices[0].delta.content[0]["image_url"]["url"].startswith("data:image/png;base64,")
        assert (last.choices[0].finish_reason, usage.usage.total_tokens) == ("stop", 0)

        # A client that leaves: its units stop.
        message[0]["content"] = "[[slow:60]]"
        leaving = client.chat.completions.create(**chat)
        next(iter(leaving))
        assert not nothing_runs(server)
        leaving.close()
        wait_until(lambda: nothing_runs(server), 5, "the units have stopped")

        # Ends that are no results raise in the client.
        running = iter(client.chat.completions.create(**chat, extra_headers={"x-request-id": "mine"}))
        next(running)
        assert server.client.delete("/v1/requests/mine").status_code == 200
        with pytest.raises(openai.APIError, match="aborted") as aborted:
            list(running)
        assert aborted.value.code == "request_aborted"
        with pytest.raises(openai.APIError, match=r"timeout of 0\.5 s") as late:
            list(images(client, "[[slow:60]]", timeout=0.5))
        assert late.value.code == "deadline_exceeded"
        with pytest.raises(openai.BadRequestError):
            images(client, "a cat", partial_images=4)


def test_the_death_of_a_replica_repeats_no_index_and_a_drain_ends_a_stream_with_an_error(
    simulated_server: StartServer,
) -> None:
    server = simulated_server("--shutdown-timeout", "1", replicas=2, seconds=2.0)
    with client_of(server) as client:
        events = iter(images(client, "a cat", size="64x64"))
        seen = [next(events)]
        (busy,) = (replica for replica in server.replicas() if replica["in_flight"])
        os.kill(busy["pid"], signal.SIGKILL)
        seen += events
        assert [event.partial_image_index for event in seen[:-1]] == [0, 1, 2]
        assert seen[-1].type == "image_generation.completed"
        assert seen[-1].metrics["attempts"] == 2
        running = iter(images(client, "[[slow:8]]"))
        next(running)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError) as drained:
            list(running)
        assert drained.value.code == "draining"
    assert server.process.wait(20) == 0
