"""What `triptych serve` makes of its flags; the server itself is replaced."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from triptych.cli.main import main
from triptych.cli.serve import bind
from triptych.config.devices import Machine
from triptych.config.plan import ServePlan
from triptych.config.settings import ServeSettings, flag_specs, read_settings
from triptych.errors import ConfigError


class FakeServer:
    """Stands for `triptych.cli.server`; keeps the plan, answers with an exit code."""

    def __init__(self) -> None:
        self.plans: list[ServePlan] = []
        self.exit_code = 0

    def run_server(self, plan: ServePlan, listener: socket.socket) -> int:
        self.plans.append(plan)
        assert listener.getsockname()[0] == "127.0.0.1"
        return self.exit_code


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer()
    monkeypatch.setitem(sys.modules, "triptych.cli.server", fake)  # type: ignore[arg-type]
    logging_module = SimpleNamespace(configure_logging=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "triptych.telemetry.logging", logging_module)  # type: ignore[arg-type]
    monkeypatch.setattr("triptych.config.plan.discover_machine", lambda _: Machine(accelerators=(), cores=(0, 1)))
    monkeypatch.setattr("triptych.cli.serve.bind", lambda _: bind(ServeSettings(port=0)))
    return fake


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["triptych", *args])
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_serve_without_anything_runs_the_embedded_model(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> None:
    assert run(monkeypatch, "serve") == 0
    (plan,) = server.plans
    assert (plan.model, len(plan.replicas), plan.settings.port) == ("triptych/shapes", 2, 8000)


def test_the_reference_command_line_is_read_as_written(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, tmp_path: object
) -> None:
    path = f"{tmp_path}/diffusion_multi_replica.yaml"
    with open(path, "w") as file:  # noqa: PTH123
        file.write("stages: [{stage_id: 0, stage_type: diffusion, runtime: {num_replicas: 4, devices: '0,1,2,3'}}]\n")
    assert run(monkeypatch, "serve", "Qwen/Qwen-Image", "--omni", "--port", "8099", "--stage-configs-path", path) == 0
    (plan,) = server.plans
    assert (plan.model, plan.settings.port, plan.settings.omni) == ("Qwen/Qwen-Image", 8099, True)
    assert [spec.devices for spec in plan.replicas] == [("0",), ("1",), ("2",), ("3",)]


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> None:
    monkeypatch.setenv("TRIPTYCH_PORT", "9000")
    monkeypatch.setenv("TRIPTYCH_SERVED_MODEL_NAME", "from,environment")
    monkeypatch.setenv("TRIPTYCH_MAX_BODY_SIZE", "1MiB")
    args = ("--served-model-name", "a", "--served-model-name", "b", "--log-format", "json")
    assert run(monkeypatch, "serve", *args) == 0
    (plan,) = server.plans
    assert (plan.settings.port, plan.settings.max_body_size, plan.settings.log_format) == (9000, 2**20, "json")
    assert plan.served_model_names == ("a", "b")


def test_the_exit_code_is_the_servers(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> None:
    server.exit_code = 1
    assert run(monkeypatch, "serve") == 1


def test_an_address_that_cannot_be_bound_is_told_before_the_server_is_imported(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("triptych.cli.serve.bind", bind)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(monkeypatch, "serve", "--port", str(port)) == 2
        assert capsys.readouterr().err.startswith("Error: --host/--port: cannot listen: Address already in use")
        with pytest.raises(ConfigError, match=rf"^--host/TRIPTYCH_PORT: .*found '127\.0\.0\.1:{port}'"):
            bind(read_settings({}, {"TRIPTYCH_PORT": str(port)}))
    with pytest.raises(ConfigError, match="cannot listen"):
        bind(ServeSettings(host="no.such.host.invalid"))
    assert server.plans == []


def test_signal_handlers_are_as_before_afterwards(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert run(monkeypatch, "serve") == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_server_is_imported_is_an_orderly_stop(number: signal.Signals) -> None:
    program = (
        "import sys, time\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'triptych.cli.server':\n"
        "            print('importing', flush=True)\n"
        "            time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "from triptych.cli.main import main\n"
        "main()\n"
    )
    args = [sys.executable, "-c", program, "serve", "--port", "0"]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        assert process.communicate(timeout=30) == ("", "")
        assert process.returncode == 0


def test_warnings_are_logged_before_the_server_runs(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert run(monkeypatch, "serve", "--host", "0.0.0.0") == 0
    assert "no API key is set" in caplog.text


def test_help_shows_every_flag(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "serve", "--help") == 0
    text = capsys.readouterr().out
    assert [spec.option for spec in flag_specs() if spec.option not in text] == []
    assert "Default: 64MiB." in text
