"""The cases of the official client in the environments of its older versions; `make clients` makes these."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from contract_target import Target

_HERE = Path(__file__).parent
_ENVIRONMENTS = _HERE.parents[1] / "build/clients"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("version", (_HERE / "client_versions.txt").read_text().split())
def test_the_cases_of_the_client_hold_for_this_version(target: Target, video_target: Target, version: str) -> None:
    python = _ENVIRONMENTS / version / "bin/python"
    if not (_ENVIRONMENTS / version / ".installed").exists():
        pytest.skip(f"openai {version} is not installed: make clients")
    command = [str(python), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(_HERE), "--confcutdir", str(_HERE), *map(str, _HERE.glob("test_openai_client*.py"))]
    env = {**os.environ, "TRIPTYCH_CONTRACT_URL": target.url, "TRIPTYCH_CONTRACT_KEY": target.key}
    env["TRIPTYCH_CONTRACT_VIDEO_URL"] = video_target.url
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert " passed" in done.stdout
