"""The server against its own OpenAPI document: whatever is sent, no 5xx and no answer that is not documented.

schemathesis makes the requests, several for every documented field. `TRIPTYCH_FUZZ_EXAMPLES` is how many random ones
there are per operation; `make fuzz` asks for more.
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
_LEAST_CASES = 1000
# A request may set itself a timeout so short that nothing can end within it: 504 is then the right answer.
_SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["1xx", "2xx", "3xx", "4xx", "504"]
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_request_gets_an_answer_that_is_not_documented(target: Target, tmp_path: Path) -> None:
    examples = os.environ.get("TRIPTYCH_FUZZ_EXAMPLES", "2")
    settings = tmp_path / "schemathesis.toml"
    settings.write_text(_SETTINGS)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings)]
    command += ["run", f"{target.url}/openapi.json", "--no-color"]
    command += ["--header", f"Authorization: Bearer {target.key}", "--max-examples", examples, "--warnings", "off"]
    command += ["--checks", ",".join(_CHECKS), "--phases", "examples,coverage,fuzzing", "--continue-on-failure"]
    command += ["--generation-database", "none", "--output-sanitize", "false", "--suppress-health-check", "all"]
    timeout_s = 1200 + 10 * int(examples)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=timeout_s)
    print(done.stdout)
    assert done.returncode == 0
    cases = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert cases is not None
    assert cases[1] == cases[2]
    assert int(cases[1]) >= _LEAST_CASES
