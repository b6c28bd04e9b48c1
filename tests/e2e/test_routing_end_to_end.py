"""Requests through the real port to real replica processes."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image


def replica_of(answer: Any) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["metrics"][0]["replica"])


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_requests_one_after_another_visit_the_replicas_in_turn(
    simulated_server: Callable[..., Any], replicas: int
) -> None:
    server = simulated_server(replicas=replicas)
    visited = [replica_of(server.image(size="64x64")) for _ in range(2 * replicas)]
    assert visited == list(range(replicas)) * 2


def test_strict_round_robin_can_be_chosen_and_visits_the_replicas_in_turn(
    start_server: Callable[..., Any], tmp_path: Any
) -> None:
    stage_file = tmp_path / "strict.yaml"
    stage_file.write_text(
        "stages:\n  - stage_id: 0\n    stage_type: diffusion\n"
        "    runtime: {num_replicas: 2, routing: strict_round_robin}\n"
        "    engine_args: {engine: simulated, simulated: {seconds_per_request: 0}}\n"
    )
    server = start_server("--stage-configs-path", str(stage_file), ready=2)
    assert [replica_of(server.image(size="64x64")) for _ in range(4)] == [0, 1, 0, 1]


def test_every_answer_shows_its_own_prompt_and_seed_under_concurrent_load(
    simulated_server: Callable[..., Any],
) -> None:
    server = simulated_server(replicas=2, seconds=0.02)

    def ask(index: int) -> None:
        answer = server.image(f"prompt {index}", seed=index, size="64x64")
        assert answer.status_code == 200, answer.text
        picture = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
        assert json.loads(picture.text["triptych"]) == {"prompt": f"prompt {index}", "seed": index}  # type: ignore[attr-defined]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(64)))
    assert sum(replica["completed"] for replica in server.replicas()) == 64
    assert all(replica["completed"] for replica in server.replicas())


def test_n_outputs_are_n_units_with_consecutive_seeds_on_several_replicas(
    simulated_server: Callable[..., Any],
) -> None:
    server = simulated_server(replicas=2, seconds=0.3)
    answer = server.image(n=2, seed=41, size="64x64").json()
    assert [image["seed"] for image in answer["data"]] == [41, 42]
    assert sorted(metric["replica"] for metric in answer["metrics"]) == [0, 1]
