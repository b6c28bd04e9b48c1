"""The cases of the official client with its older versions, and those of LiteLLM; `make clients` installs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from contract_target import Target

_HERE = Path(__file__).parent
_FOLDERS = _HERE.parents[1] / "build/clients"
_CLIENTS = sorted(path.stem for path in (_HERE / "clients").glob("*.txt"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("client", _CLIENTS)
def test_the_cases_of_this_client_hold(
    target: Target, video_target: Target, litellm_target: Target, client: str
) -> None:
    folder = _FOLDERS / client
    if not (folder / ".installed").exists():
        pytest.skip(f"{client} is not installed: make clients")
    name = client.partition("-")[0]
    cases = sorted(_HERE.glob("litellm_cases.py" if name == "litellm" else "test_openai_client*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(_HERE), "--confcutdir", str(_HERE), *map(str, cases)]
    env = {
        **os.environ,
        "PYTHONPATH": str(folder),  # it comes before .venv, which has the rest of what the client needs
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TRIPTYCH_CONTRACT_CLIENT": client,
        "TRIPTYCH_CONTRACT_URL": target.url,
        "TRIPTYCH_CONTRACT_VIDEO_URL": video_target.url,
        "TRIPTYCH_CONTRACT_LITELLM_URL": litellm_target.url,
        "TRIPTYCH_CONTRACT_KEY": target.key,
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert " passed" in done.stdout
