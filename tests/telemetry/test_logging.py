"""What a log line looks like."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from triptych.telemetry.logging import RAW_LOGGER, JsonFormatter, TextFormatter, configure_logging


@pytest.fixture(autouse=True)
def restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def record(message: str, *, error: bool = False, **extra: object) -> logging.LogRecord:
    exc_info = None
    if error:
        try:
            raise ValueError("broken")
        except ValueError:
            exc_info = sys.exc_info()
    made = logging.getLogger("triptych.x").makeRecord("triptych.x", logging.INFO, "f", 1, message, (), exc_info)
    vars(made).update(extra)
    made.created = 0.25
    return made


def test_a_text_line_names_time_level_replica_logger_and_fields() -> None:
    line = TextFormatter("1").format(record("state changed", trigger="died", reason='exit "1" now', empty=""))
    assert line == (
        "1970-01-01T00:00:00.250Z INFO [replica 1] triptych.x: state changed "
        'trigger=died reason="exit \\"1\\" now" empty=""'
    )


def test_a_message_with_line_breaks_stays_one_line() -> None:
    assert "\n" not in TextFormatter().format(record("a\r\nb"))


def test_what_a_client_sent_reaches_no_terminal_as_a_control_sequence() -> None:
    assert TextFormatter().format(record("x", path="/\x1b[2J\u202e")).endswith('path="/\\u001b[2J\\u202e"')


def test_every_line_of_a_traceback_carries_the_replica() -> None:
    lines = TextFormatter("3").format(record("failed", error=True)).splitlines()
    assert len(lines) > 3
    assert all("[replica 3] triptych.x: " in line for line in lines)


def test_json_is_one_object_per_line_with_everything_in_it() -> None:
    line = JsonFormatter("2").format(record("a\nb", error=True, pid=7, odd=object))
    assert "\n" not in line
    entry = json.loads(line)
    assert (entry["message"], entry["replica"], entry["pid"], entry["level"]) == ("a\nb", "2", 7, "info")
    assert "ValueError: broken" in entry["exception"]
    assert "replica" not in json.loads(JsonFormatter().format(record("x")))


def test_configure_logging_writes_to_stderr_at_its_level_and_replaces_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("info", "text")
    configure_logging("warning", "json", replica="0")
    logging.getLogger("triptych.y").info("quiet")
    logging.getLogger("triptych.y").warning("loud %d", 1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [json.loads(line)["message"] for line in captured.err.splitlines()] == ["loud 1"]


@pytest.mark.parametrize(("level", "format"), [("loud", "text"), ("info", "xml")])
def test_unknown_names_are_refused(level: str, format: str) -> None:
    with pytest.raises(ValueError, match=r"loud|xml"):
        configure_logging(level, format)


def test_a_background_log_does_not_block_when_nobody_reads_and_says_how_much_it_dropped() -> None:
    script = """
import logging
from triptych.telemetry.logging import configure_logging
configure_logging("info", "text", background=True)
for number in range(12_000):
    logging.info("line %d %s", number, "x" * 100)
logging.getLogger().handlers[0]._dropped and print("dropped", flush=True)
print("alive", flush=True)
input()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout and process.stderr
    assert process.stdout.readline() == "dropped\n"
    assert process.stdout.readline() == "alive\n"
    seen: list[str] = []
    reader = threading.Thread(target=seen.extend, args=(process.stderr,))
    reader.start()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait(20) == 0
    reader.join(20)
    process.stdout.close()
    process.stderr.close()
    assert "line 0 " in seen[0]
    assert any("log lines were dropped" in line for line in seen)


def test_a_background_log_that_nobody_ever_reads_does_not_hold_up_the_exit() -> None:
    script = """
import logging
from triptych.telemetry.logging import configure_logging
configure_logging("info", "text", background=True)
for number in range(2_000):
    logging.info("line %d %s", number, "x" * 100)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    assert process.wait(20) == 0
    assert process.stderr
    process.stderr.close()


@pytest.mark.parametrize("format", ["text", "json"])
def test_what_another_process_has_formatted_is_written_as_it_is(
    format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("error", format)
    logging.getLogger(RAW_LOGGER).warning("%s", "first {line}\n  second")
    assert capsys.readouterr().err == "first {line}\n  second\n"
