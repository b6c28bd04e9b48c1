"""`triptych check` and `serve --dry-run` as a user meets them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from triptych.cli import check as check_module
from triptych.cli.main import main
from triptych.config.accelerators import Accelerator
from triptych.config.devices import Machine
from triptych.config.model_source import weight_bytes
from triptych.models import embedded_path

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("triptych.config.plan.discover_machine", lambda _: Machine(accelerators=(), cores=(0, 1, 2, 3)))


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["triptych", *args])
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return end.value.code


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]


def effective_stage(text: str) -> str:
    return text.partition("# effective stage file\n")[2].partition("\n# effective flags")[0]


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_every_example_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], example: str
) -> None:
    monkeypatch.setattr(check_module, "cached_path", lambda source, _: source.path)
    assert run(monkeypatch, "check", str(EXAMPLES / example)) == 0
    assert "Device map" in capsys.readouterr().out


def test_the_eight_device_file_maps_pairs_in_list_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_module, "cached_path", lambda *_: None)
    path = str(EXAMPLES / "diffusion_multi_replica_8_devices.yaml")
    assert run(monkeypatch, "check", path) == 0
    text = capsys.readouterr().out
    assert [row[:2] for row in rows(text)] == [["0", "0,1"], ["1", "2,3"], ["2", "4,5"], ["3", "6,7"]]
    assert "weights: unknown (not on disk)" in text
    assert "not available in this version" not in text


def test_the_effective_stage_file_is_one_that_says_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "check", str(EXAMPLES / "simulated.yaml")) == 0
    first = effective_stage(capsys.readouterr().out)
    assert yaml.safe_load(first)["stages"][0]["runtime"]["devices"] == "0,1"
    copy = tmp_path / "copy.yaml"
    copy.write_text(first)
    assert run(monkeypatch, "check", str(copy)) == 0
    assert effective_stage(capsys.readouterr().out) == first


def test_long_lines_stay_whole_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = [f"slot-{number}-{'x' * 60}" for number in range(4)]
    stage = {"stage_id": 0, "stage_type": "diffusion", "runtime": {"devices": names, "num_replicas": 2}}
    stage["engine_args"] = {"engine": "simulated", "parallel_config": {"world_size": 2}}
    path = tmp_path / f"{'long' * 30}.yaml"
    path.write_text(yaml.safe_dump({"async_chunk": True, "stages": [stage]}))
    assert run(monkeypatch, "check", str(path)) == 0
    text = capsys.readouterr().out
    assert [row[1] for row in rows(text)] == [",".join(names[:2]), ",".join(names[2:])]
    assert f"warning: {path}: async_chunk: the key has no meaning here and is ignored\n" in text


def test_names_that_look_like_markup_are_printed_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(EXAMPLES / "simulated.yaml")
    assert run(monkeypatch, "serve", "[red]x[/red]", "--stage-configs-path", path, "--dry-run") == 0
    assert "Device map of [red]x[/red]" in capsys.readouterr().out


def test_dry_run_shows_flags_and_hides_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIPTYCH_PORT", "8123")
    assert run(monkeypatch, "serve", "--dry-run", "--api-key", "s3cret", "--num-replicas", "1") == 0
    text = capsys.readouterr().out
    assert "--port: 8123" in text
    assert "--api-key: (set)" in text
    assert "s3cret" not in text
    assert len(rows(text)) == 1


def test_memory_that_is_short_is_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(EXAMPLES / "shapes.yaml")
    assert run(monkeypatch, "check", path) == 0
    text = capsys.readouterr().out
    assert "MiB per replica, the same pages for all; available memory" in text
    assert "warning" not in text
    size = weight_bytes(str(embedded_path("triptych/shapes"))) or 0
    # The type on disk is served: one copy in memory, whatever the number of replicas.
    monkeypatch.setattr("triptych.config.devices.available_memory_bytes", lambda: int(size * 1.5))
    assert run(monkeypatch, "check", path) == 0
    assert "warning" not in capsys.readouterr().out
    with monkeypatch.context() as patched:
        patched.setattr(check_module, "weight_dtypes", lambda _: frozenset({"F16"}))
        assert run(monkeypatch, "check", path) == 0
        assert "warning: weights of 2 replica(s) may not fit into memory" in capsys.readouterr().out
    monkeypatch.setattr("triptych.config.devices.available_memory_bytes", lambda: 2**20)
    assert run(monkeypatch, "check", path) == 0
    assert "warning: weights of 2 replica(s) may not fit into memory" in capsys.readouterr().out
    cards = (Accelerator("0", "H200", free_bytes=2**40), Accelerator("1", "H200", free_bytes=2**20))
    monkeypatch.setattr("triptych.config.plan.discover_machine", lambda _: Machine(accelerators=cards, cores=(0,)))
    assert run(monkeypatch, "check", path) == 0
    text = capsys.readouterr().out
    assert "replica 0 1024.00 GiB, replica 1 1.0 MiB" in text
    assert "warning: weights may not fit on the devices of replica 1\n" in text


BAD = {
    "counts": (
        'runtime: {devices: "0,1,2", num_replicas: 2}',
        ("runtime.devices", "found '0,1,2'", "wanted exactly 2"),
    ),
    "duplicates": ('runtime: {devices: "1,1", num_replicas: 2}', ("runtime.devices", "repeats device '1'", "wanted")),
    "unknown key": ("runtime: {replicas: 2}", ("runtime.replicas", "found 'replicas'", "wanted `num_replicas`?")),
    "twice": ("runtime: {num_replicas: 1, num_replicas: 2}", ("num_replicas", "found 'lines 4 and 4'", "wanted")),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", [("check",), ("serve", "--stage-configs-path")])
def test_a_bad_file_exits_with_2_and_says_where_what_and_what_instead(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    command: tuple[str, ...],
) -> None:
    section, expected = BAD[name]
    path = tmp_path / "bad.yaml"
    path.write_text(f"stages:\n  - stage_id: 0\n    stage_type: diffusion\n    {section}\n")
    assert run(monkeypatch, *command, str(path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"Error: {path}: stages[0].")
    assert captured.err.count("\n") == 1
    for part in expected:
        assert part in captured.err
