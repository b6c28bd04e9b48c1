"""README and user's page, executed: what a reader would type, in order, in an empty folder.

Fenced blocks are read by their info string: `bash` runs to its end and must succeed, `bash server` keeps running until
the next server block, `python` is run as a script, `yaml file=NAME` is written to NAME. `Qwen/Qwen-Image` is a tiny
pipeline in a local folder of that name, ports are free ones.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from support.server_process import free_port, wait_until

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORT = re.compile(r"(?:127\.0\.0\.1:|--port )(\d+)")


@dataclass
class Block:
    language: str
    info: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(m[1], m[2].strip(), m[3]) for m in BLOCK.finditer((ROOT / page).read_text())]


def last_line_of_make_serve(arguments: str = "") -> str:
    """What `make serve` runs after the set-up; the set-up itself is what runs these tests."""
    command = ["make", "--no-print-directory", "-n", "serve", f"SERVE_ARGS={arguments}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()[-1].strip()


class Reader:
    """Somebody who follows a page in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: subprocess.Popen[bytes] | None = None
        self.ports: dict[str, str] = {}
        (folder / ".venv").mkdir()
        (folder / ".venv/bin").symlink_to(Path(sys.executable).parent)
        for name in ("examples", "benchmarks"):
            (folder / name).symlink_to(ROOT / name)
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "NO_PROXY": "127.0.0.1",
        }

    def with_free_ports(self, text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            port = self.ports.setdefault(match[1], str(free_port()))
            return match[0].replace(match[1], port)

        return PORT.sub(replace, text)

    def follow(self, block: Block) -> None:
        if block.language == "yaml" and block.info.startswith("file="):
            (self.folder / block.info.removeprefix("file=")).write_text(block.text)
        elif block.language == "bash" and block.info == "server":
            self.serve(block.text)
        elif block.language == "bash":
            self.run(["bash", "-euo", "pipefail", "-c", self.with_free_ports(block.text)], block.text)
        elif block.language == "python":
            self.run([sys.executable, "-c", self.with_free_ports(block.text)], block.text)
        else:
            pytest.fail(f"a block that nobody runs: {block.language} {block.info}")

    def run(self, command: list[str], shown: str) -> None:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, f"{shown}\n--- stdout\n{done.stdout[-3000:]}\n--- stderr\n{done.stderr[-3000:]}"

    def serve(self, text: str) -> None:
        self.stop_server()
        if text.strip() == "make serve":
            text = last_line_of_make_serve("--port 8000")
        command = self.with_free_ports(text)
        match = PORT.search(command)
        assert match, text
        with (self.folder / "server.log").open("wb") as log:
            self.server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
        key = re.search(r"--api-key (\S+)", text)
        headers = {"authorization": f"Bearer {key[1]}"} if key else {}
        port = int(match[1])
        wait_until(lambda: self.ready(port, headers), 90, f"ready: {text}\n{(self.folder / 'server.log').read_text()}")

    def ready(self, port: int, headers: dict[str, str]) -> bool:
        assert self.server is not None
        if self.server.poll() is not None:
            pytest.fail((self.folder / "server.log").read_text()[-3000:])
        try:
            url = f"http://127.0.0.1:{port}/v1/replicas"
            replicas = httpx.get(url, headers=headers, timeout=5, trust_env=False).json()["data"]
        except httpx.TransportError:
            time.sleep(0.1)
            return False
        return all(replica["state"] == "ready" for replica in replicas)

    def stop_server(self) -> None:
        if self.server is None:
            return
        children = psutil.Process(self.server.pid).children(recursive=True) if self.server.poll() is None else []
        self.server.send_signal(signal.SIGTERM)
        assert self.server.wait(40) == 0
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive
        self.server = None


@pytest.fixture
def reader(tmp_path: Path, tiny_pipelines: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    (tmp_path / "Qwen").mkdir()
    shutil.copytree(tiny_pipelines / "qwen", tmp_path / "Qwen/Qwen-Image")
    yield reader
    if reader.server is not None:
        reader.server.kill()
        reader.server.wait()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", ["README.md", "docs/diffusion_multi_replica.md"])
def test_every_command_of_the_page_works_as_written(reader: Reader, page: str) -> None:
    found = blocks(page)
    assert len(found) > 5
    for block in found:
        reader.follow(block)
    reader.stop_server()


def test_make_serve_ends_with_the_server_and_passes_arguments_on() -> None:
    assert last_line_of_make_serve() == ".venv/bin/triptych serve"
    assert last_line_of_make_serve("--port 8001") == ".venv/bin/triptych serve --port 8001"


@pytest.mark.parametrize("page", ["README.md", "docs/diffusion_multi_replica.md", "docs/architecture.md"])
def test_every_link_of_the_page_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target
