"""The embedded model behind HTTP: every client sees its own prompt, whoever asks at the same time and whatever dies."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.light_connection import LightConnection
from support.server_process import ServerProcess
from training.shapes.checker import check
from training.shapes.forms import Example, held_out_example

PROMPTS = 64
STEPS = 6  # a third of what the model is served with; single objects mostly come out right
LEAST_RIGHT = 50  # by the checker: in so few steps some are drawn wrong, and nearly all would be if mixed up


def examples() -> list[Example]:
    """Held-out captions of single objects, all different."""
    rng = random.Random("sixty-four")
    found: dict[str, Example] = {}
    while len(found) < PROMPTS:
        example = held_out_example(rng, "single")
        found[example.caption.text] = example
    return list(found.values())


async def picture(port: int, prompt: str, seed: int) -> tuple[bytes, dict[str, Any]]:
    connection = await LightConnection.open(port)
    answer = await connection.request({"prompt": prompt, "seed": seed, "num_inference_steps": STEPS})
    connection.drop()
    assert answer.status == 200, answer.body
    body = answer.json()
    assert body["data"][0]["seed"] == seed
    return base64.b64decode(body["data"][0]["b64_json"]), body["metrics"][0]


async def all_at_once(server: ServerProcess, prompts: list[str]) -> list[tuple[bytes, dict[str, Any]]]:
    """Every prompt in a request of its own; one replica is killed as soon as both work."""
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(picture(server.port, prompt, seed)) for seed, prompt in enumerate(prompts)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        connection = await LightConnection.open(server.port)
        replicas = (await connection.request(None, method="GET", path="/v1/replicas")).json()["data"]
        connection.drop()
        os.kill(replicas[1]["pid"], signal.SIGKILL)
    return [task.result() for task in asked]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_64_prompts_at_once_each_gets_its_own_picture_as_if_it_were_alone_although_a_replica_is_killed(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("triptych/shapes", "--num-replicas", "2", ready=2)
    asked = examples()
    prompts = [example.caption.text for example in asked]
    together = asyncio.run(all_at_once(server, prompts))
    assert {metrics["replica"] for _, metrics in together} == {0, 1}
    assert max(metrics["attempts"] for _, metrics in together) == 2

    right = [
        check(np.asarray(Image.open(io.BytesIO(png)).convert("RGB")), example.demand)["all"]
        for (png, _), example in zip(together, asked, strict=True)
    ]
    assert sum(right) >= LEAST_RIGHT

    async def one_by_one() -> list[bytes]:
        return [(await picture(server.port, prompt, seed))[0] for seed, prompt in enumerate(prompts)]

    alone = asyncio.run(one_by_one())
    assert [png == solo for (png, _), solo in zip(together, alone, strict=True)] == [True] * PROMPTS
    assert len(set(alone)) == PROMPTS
