"""The command as a whole: exit codes, help, and what is not imported for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from triptych import __version__
from triptych.cli.main import main

HEAVY = (
    "torch",
    "diffusers",
    "transformers",
    "starlette",
    "uvicorn",
    "matplotlib",
    "aiohttp",
    "huggingface_hub",
    "numpy",
)


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["triptych", *args])
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_help_lists_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("serve", "generate", "check", "bench"))


def test_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"triptych {__version__}\n"


def test_an_unknown_command_and_a_missing_argument_exit_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "chekc") == 2
    assert "check" in capsys.readouterr().err
    assert run(monkeypatch, "check") == 2
    assert run(monkeypatch, "serve", "--no-such-flag") == 2


def test_a_configuration_error_is_one_message_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "serve", "--port", "http") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "Error: --port: not a good value; found 'http'; wanted an integer\n"


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("triptych.config.plan.build_plan", interrupted)
    assert run(monkeypatch, "check", "stage.yaml") == 130


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("--help",), 0),
        (("serve", "--help"), 0),
        (("check", "bad.yaml"), 2),
        (("serve", "--stage-configs-path", "bad.yaml"), 2),
        (("serve", "Qwen/Qwen-Image", "--ray-address", "auto"), 2),
        (("check", "--help"), 0),
        (("generate", "--help"), 0),
        (("generate", "x", "--seed", "-1"), 2),
        (("generate", "x", "--num-inference-steps", "5000"), 2),
        (("generate", "x", "--extra-args", "{"), 2),
        (("generate", "x", "-o", "a.gif"), 2),
        (("generate", "x", "--model", "./none"), 2),
        (("bench", "--help"), 0),
        (("bench", "serve", "--port", "0"), 2),
        (("bench", "serve", "--num-prompts", "0"), 2),
        (("bench", "sweep", "--replicas", "0"), 2),
    ],
)
def test_help_and_configuration_errors_import_no_model_library_and_no_server(
    tmp_path: Path, args: tuple[str, ...], code: int
) -> None:
    (tmp_path / "bad.yaml").write_text("stages: [{stage_id: 0, stage_type: diffusion, runtime: {num_replica: 2}}]\n")
    program = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr))\n"
        "from triptych.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *args], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    *message, imported = done.stderr.splitlines()
    assert imported == ""
    assert (len(message) == 1 and message[0].startswith("Error: ")) if code else message == []


def test_the_help_of_serve_does_not_read_what_a_plan_needs() -> None:
    program = (
        "import atexit, sys\n"
        "names = ('triptych.config.plan', 'yaml')\n"
        "atexit.register(lambda: print(*[name in sys.modules for name in names], file=sys.stderr))\n"
        "from triptych.cli.main import main\n"
        "main()\n"
    )
    for command in ("serve", "check", "generate"):
        args = [sys.executable, "-c", program, command, "--help"]
        done = subprocess.run(args, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "False False\n")


def test_python_m_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "triptych", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"triptych {__version__}\n")
