"""Fixtures that several test folders share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server_process import ServerProcess, StartServer, end, launch, write_stage_file

# As in replicas: compute threads that wait do not spin. torch reads it when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def data_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Servers that tests start keep their jobs here, not in the home of whoever runs the tests."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder))
        yield folder


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Factory of server processes; all of them are stopped at the end of the test."""
    running: list[ServerProcess] = []

    def start(*args: str, ready: int = 0, **options: Any) -> ServerProcess:
        server = launch(tmp_path / f"server-{len(running)}.log", *args, **options)
        running.append(server)
        if ready:
            server.wait_ready(ready)
        return server

    yield start
    for server in running:
        end(server)


@pytest.fixture
def simulated_server(start_server: StartServer, tmp_path: Path) -> Callable[..., ServerProcess]:
    """Factory of ready servers with the simulated engine."""

    def start(*args: str, replicas: int = 2, seconds: float = 0.0, slots: int = 1) -> ServerProcess:
        stage_file = write_stage_file(tmp_path / "stages.yaml", replicas=replicas, seconds=seconds, slots=slots)
        return start_server("--stage-configs-path", str(stage_file), *args, ready=replicas)

    return start


@pytest.fixture(scope="session")
def tiny_pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a tiny random diffusers pipeline per supported family: `qwen`, `sd15`, `wan` and so on."""
    folder = tmp_path_factory.mktemp("pipelines")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's deprecations
        from tiny.pipelines import FAMILIES, build

        for family in FAMILIES:
            build(family, folder)
    return folder
