"""The server against its own OpenAPI document: whatever is sent, no 5xx and no answer that is not documented.

schemathesis makes the requests, several for every documented field, the same in every run. `TRIPTYCH_FUZZ_EXAMPLES` is
how many random ones there are besides for each operation, and `TRIPTYCH_FUZZ_LEAST` how many must come together; see
`make fuzz`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from contract_target import Target

_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
# A request may set itself a timeout so short that nothing can end within it: 504 is then the right answer.
_SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["1xx", "2xx", "3xx", "4xx", "504"]

# Spoiling forms with several files at random ends in an error of schemathesis' own ("Unsupported type: 'Binary'").
[[operations]]
include-path = "/v1/images/edits"
phases.fuzzing.generation.mode = "positive"
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_request_gets_an_answer_that_is_not_documented(target: Target, tmp_path: Path) -> None:
    assert _cases(target, tmp_path) >= int(os.environ.get("TRIPTYCH_FUZZ_LEAST", "1000"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nor_does_one_for_videos_where_the_model_makes_them(video_target: Target, tmp_path: Path) -> None:
    assert _cases(video_target, tmp_path, "--include-path-regex", "^/v1/videos") >= 100


def _cases(target: Target, folder: Path, *options: str) -> int:
    """How many requests were sent; fails the test when one of them gets a wrong answer."""
    examples = int(os.environ.get("TRIPTYCH_FUZZ_EXAMPLES", "0"))
    settings = folder / "schemathesis.toml"
    settings.write_text(_SETTINGS)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings)]
    command += ["run", f"{target.url}/openapi.json", "--no-color", *options]
    command += ["--header", f"Authorization: Bearer {target.key}", "--warnings", "off"]
    command += ["--checks", ",".join(_CHECKS), "--continue-on-failure"]
    random = ["--phases", "examples,coverage,fuzzing", "--max-examples", str(examples)]
    command += random if examples else ["--phases", "examples,coverage"]
    command += ["--generation-database", "none", "--output-sanitize", "false", "--suppress-health-check", "all"]
    timeout_s = 1200 + 10 * examples
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s)
    print(done.stdout)
    assert done.returncode == 0
    cases = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert cases is not None
    assert cases[1] == cases[2]
    return int(cases[1])
