"""Several requests in one replica, through the real port."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image


def pictures(answer: Any) -> list[Any]:
    assert answer.status_code == 200, answer.text
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(one["b64_json"])))) for one in answer.json()["data"]]


def test_outputs_of_a_request_share_forwards_and_equal_those_made_one_by_one(start_server: Callable[..., Any]) -> None:
    server = start_server("--num-replicas", "1", "--max-num-seqs", "4", ready=1)
    assert [replica["slots"] for replica in server.replicas()] == [4]
    together = server.image("a red circle above a blue square", n=4, seed=7, num_inference_steps=6)
    assert all(metrics["batch_size_mean"] > 1.5 for metrics in together.json()["metrics"])
    for number, shared in enumerate(pictures(together)):
        single = server.image("a red circle above a blue square", seed=7 + number, num_inference_steps=6)
        assert single.json()["metrics"][0]["batch_size_mean"] == 1
        np.testing.assert_allclose(shared.astype(int), pictures(single)[0].astype(int), atol=2)
