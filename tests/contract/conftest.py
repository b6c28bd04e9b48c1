"""The servers that the contract is tested against: any, by address, else ones with the simulated engine.

`TRIPTYCH_CONTRACT_URL=http://host:8000` names a server that makes pictures, `TRIPTYCH_CONTRACT_VIDEO_URL` one that
makes videos, `TRIPTYCH_CONTRACT_LITELLM_URL` one of pictures with `--chat-image-format images`, `TRIPTYCH_CONTRACT_KEY`
their key where they have one. Nothing but pytest and the client is imported here unless a server has to be started:
these tests also run with other clients. A server ends with the module that asked for it, since other tests look for
processes that were left behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from contract_target import Target

_SIDE = 256


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with _target("TRIPTYCH_CONTRACT_URL", tmp_path_factory.mktemp("images"), kind="image") as target:
        yield target


@pytest.fixture(scope="module")
def video_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with _target("TRIPTYCH_CONTRACT_VIDEO_URL", tmp_path_factory.mktemp("videos"), kind="video") as target:
        yield target


@pytest.fixture(scope="module")
def litellm_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    flags = ("--chat-image-format", "images")
    with _target("TRIPTYCH_CONTRACT_LITELLM_URL", tmp_path_factory.mktemp("litellm"), *flags, kind="image") as target:
        yield target


@contextmanager
def _target(variable: str, folder: Path, *flags: str, kind: Literal["image", "video"]) -> Iterator[Target]:
    if url := os.environ.get(variable):
        yield Target(url.rstrip("/"), os.environ.get("TRIPTYCH_CONTRACT_KEY", "none"))
        return
    from support.server_process import end, launch, wait_until, write_stage_file

    stages = write_stage_file(folder / "stages.yaml", replicas=2, seconds=0.0, kind=kind)
    with stages.open("a") as file:
        file.write(f"    default_sampling_params: {{width: {_SIDE}, height: {_SIDE}}}\n")
    keys = ["--api-key", "sk-contract", "--admin-api-key", "sk-contract-admin"]
    limits = ["--max-pixels", str(_SIDE * _SIDE), "--max-num-inference-steps", "50", "--max-num-frames", "32"]
    places = ["--stage-configs-path", str(stages), "--data-dir", str(folder / "data")]
    server = launch(folder / "server.log", *places, *keys, *limits, *flags)
    server.client.headers["authorization"] = "Bearer sk-contract"
    try:
        wait_until(lambda: server.ready_replicas() == 2, 90, "two ready replicas")
        yield Target(f"http://127.0.0.1:{server.port}", "sk-contract")
    finally:
        end(server)
