"""The front benchmarks' own parts: the light client, the comparison, the bare app."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

FRONT = Path(__file__).parents[2] / "benchmarks/front"
PNG_TEXT = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(90_000)).decode()
TEMPLATE = {
    "id": "x",
    "choices": [
        {
            "message": {
                "role": "assistant",
                "content": [
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG_TEXT}"}, "seed": 1}
                ],
            }
        }
    ],
    "metrics": [{"replica": 0}],
}


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FRONT))
    import front_cost

    yield front_cost
    for name in ("front_cost", "light_client", "simulated"):
        sys.modules.pop(name, None)


def test_the_bare_app_answers_the_same_body_and_the_light_client_reads_all_of_it(front: Any, tmp_path: Path) -> None:
    message = front.chat_message(width=64, height=64, model="m")
    with front.bare_server(tmp_path, {"64x64": TEMPLATE}) as port:
        connection = front.Connection(port)
        for _ in range(3):
            elapsed_s, body = connection.request(message)
            assert elapsed_s > 0
            assert json.loads(bytes(body)) == TEMPLATE
        first, second = front.paired_blocks(connection, connection, message, pairs=3, block=2)
        connection.close()
    assert first.shape == second.shape == (3, 2)


def test_an_answer_that_is_not_200_stops_the_light_client(front: Any, fake_server: Any) -> None:
    from aiohttp import web

    fake_server.behave = lambda number, body: web.Response(status=503, text="no")
    connection = front.Connection(int(fake_server.base_url.rpartition(":")[2]))
    with pytest.raises(ConnectionError, match="503"):
        connection.request(front.chat_message(width=64, height=64, model="m"))
    connection.close()


def test_the_ratio_of_medians_comes_with_an_interval_around_it(front: Any) -> None:
    rng = np.random.default_rng(0)
    bare = rng.normal(2e-3, 1e-4, size=(20, 10))
    ours = rng.normal(1e-3, 1e-4, size=(20, 10))
    found = front.ratio_of_medians(ours, bare)
    assert found["ratio"] == pytest.approx(0.5, abs=0.02)
    assert found["ratio_low"] < found["ratio"] < found["ratio_high"]
    assert found["bare_p50_ms"] == pytest.approx(2.0, abs=0.05)
