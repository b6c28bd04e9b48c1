"""The data folder: whose it is, where it is, and that only one server has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.errors import ConfigError
from triptych.jobs.folder import data_folder, default_folder


def test_the_default_is_the_users_own_and_another_for_each_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert default_folder(8000, {}) == Path("/home/ada/.local/share/triptych/port-8000")
    assert default_folder(8001, {"XDG_DATA_HOME": "/data"}) == Path("/data/triptych/port-8001")
    assert default_folder(8000, {"XDG_DATA_HOME": "not/absolute"}).is_relative_to("/home/ada")


def test_a_folder_is_made_for_its_owner_only_and_may_be_had_again(tmp_path: Path) -> None:
    asked = str(tmp_path / "a" / "b")
    for _ in range(2):
        with data_folder(asked, port=1, where="--data-dir") as folder:
            assert folder == tmp_path / "a" / "b"
            assert folder.stat().st_mode & 0o077 == 0


def test_a_second_server_is_kept_out_and_told_why(tmp_path: Path) -> None:
    with (
        data_folder(str(tmp_path), port=1, where="--data-dir"),
        pytest.raises(ConfigError, match="--data-dir: another server keeps its jobs there") as caught,
        data_folder(str(tmp_path), port=2, where="--data-dir"),
    ):
        pass
    assert str(tmp_path) in str(caught.value)


def test_the_lock_goes_with_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import sys, time; from triptych.jobs.folder import data_folder\n"
        "with data_folder(sys.argv[1], port=1, where='x'): print('locked', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ConfigError), data_folder(str(tmp_path), port=1, where="x"):
            pass
        os.kill(holder.pid, signal.SIGKILL)
    with data_folder(str(tmp_path), port=1, where="x"):
        pass


def test_a_named_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="--data-dir: cannot keep files there: Not a directory"),
        data_folder(str(tmp_path / "file" / "x"), port=1, where="--data-dir"),
    ):
        pass


def test_without_a_usable_folder_of_the_user_a_temporary_one_serves_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    environ = {"XDG_DATA_HOME": str(tmp_path / "file")}
    with data_folder(None, port=1, where="--data-dir", environ=environ) as folder:
        assert folder.is_dir()
    assert not folder.exists()
    assert "video jobs will end with this server" in caplog.text
