"""A server with keys behind TLS, as operators would run it: real files, real sockets, the official client."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from support.server_process import ServerProcess, free_port, wait_until, write_stage_file


@pytest.fixture
def tls(tmp_path: Path) -> Path:
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key.pem -out cert.pem -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *command.split(), *names], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def test_the_official_client_over_https_with_a_key(
    start_server: Callable[..., ServerProcess], tmp_path: Path, tls: Path
) -> None:
    stages = write_stage_file(tmp_path / "stages.yaml", replicas=1, seconds=0.0)
    files = ["--ssl-certfile", str(tls / "cert.pem"), "--ssl-keyfile", str(tls / "key.pem")]
    env = {"TRIPTYCH_API_KEY": "sk-one,sk-two", "TRIPTYCH_ADMIN_API_KEY": "sk-admin"}
    server = start_server("--stage-configs-path", str(stages), *files, env=env)
    base = f"https://127.0.0.1:{server.port}"
    trust = ssl.create_default_context(cafile=tls / "cert.pem")
    with httpx.Client(base_url=base, verify=trust, trust_env=False) as http:
        wait_until(lambda: answers(http), 60, "ready over https")
        with openai.OpenAI(base_url=f"{base}/v1", api_key="sk-two", http_client=httpx.Client(verify=trust)) as client:
            image = client.images.generate(prompt="a red circle", size="64x64")
        assert image.data
        with (
            openai.OpenAI(base_url=f"{base}/v1", api_key="none", http_client=httpx.Client(verify=trust)) as client,
            pytest.raises(openai.AuthenticationError, match="API key is needed"),
        ):
            client.models.list()
        admin = {"authorization": "Bearer sk-admin"}
        assert http.post("/v1/replicas/0/restart", headers=admin).status_code == 200
        # An early refusal to a client that is still sending, through TLS as well.
        refused = http.post("/v1/images/generations", content=b"x" * 4_000_000)
        assert refused.status_code == 401
    assert server.stop() == 0
    log = server.log.read_text()
    assert f"{base} takes requests" in log
    assert "path=/v1/images/generations status=200" in log
    assert "sk-" not in log
    assert "red circle" not in log


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("flag", ["--ssl-keyfile", "--ssl-certfile"])
def test_a_bad_tls_file_is_found_before_anything_starts(tmp_path: Path, tls: Path, flag: str) -> None:
    files = {"--ssl-certfile": "cert.pem", "--ssl-keyfile": "key.pem"} | {flag: "missing.pem"}
    arguments = [part for name, file in files.items() for part in (name, str(tls / file))]
    command = [sys.executable, "-m", "triptych", "serve", "--port", str(free_port()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"{flag}: cannot be read" in done.stderr
