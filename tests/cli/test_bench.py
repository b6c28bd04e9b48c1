"""The benchmark's command line: its flags, and what it says when they are wrong."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from triptych.bench.options import LoadOptions, TargetOptions
from triptych.cli import bench
from triptych.cli.bench import bench_app

SCRIPT = Path(__file__).parents[2] / "benchmarks/diffusion/diffusion_benchmark_serving.py"
DEFAULTS = {
    "base_url": None,
    "host": "localhost",
    "port": 8091,
    "model": "default",
    "backend": "triptych",
    "task": "t2i",
    "dataset": "random",
    "dataset_path": None,
    "num_prompts": 10,
    "request_rate": math.inf,
    "max_concurrency": None,
    "warmup_requests": None,
    "warmup_num_inference_steps": 2,
    "width": None,
    "height": None,
    "num_frames": None,
    "fps": None,
    "num_inference_steps": 50,
    "seed": None,
    "random_request_config": None,
    "random_request_seed": 42,
    "enable_negative_prompt": False,
    "slo": False,
    "slo_scale": 3.0,
    "output_file": None,
    "save_dir": None,
    "disable_tqdm": False,
}
CHOICES = {
    "backend": ["triptych", "vllm-omni", "openai", "v1/videos"],
    "task": ["t2i", "t2v", "i2i", "i2v", "ti2i", "ti2v"],
    "dataset": ["random", "trace", "prompts", "vbench"],
}


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(bench_app, args)
    return result.exit_code, result.output


def test_flags_and_defaults_are_those_of_the_contract() -> None:
    fields = LoadOptions.model_fields | TargetOptions.model_fields
    assert {name: field.default for name, field in fields.items()} == DEFAULTS
    assert inspect.signature(bench.serve).parameters.keys() == DEFAULTS.keys()


def test_a_sweep_takes_the_flags_of_the_load_but_for_the_server_and_the_folder_of_pictures() -> None:
    own = {"replicas", "stage_configs_path", "output_dir", "start_timeout"}
    missing = {"base_url", "host", "port", "output_file", "save_dir"}
    assert inspect.signature(bench.sweep).parameters.keys() == (DEFAULTS.keys() | own) - missing


@pytest.mark.parametrize(("name", "wanted"), CHOICES.items())
def test_choices_are_those_of_the_contract(name: str, wanted: list[str]) -> None:
    code, output = run("serve", f"--{name}", "other")
    *most, last = [repr(value) for value in wanted]
    assert code == 2
    assert output == f"Error: --{name}: not a good value; found 'other'; wanted {', '.join(most)} or {last}\n"


def test_the_script_prints_the_same_help_as_the_command() -> None:
    environment = {**os.environ, "COLUMNS": "120", "TERM": "dumb"}
    script = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, env=environment, check=True, timeout=60
    )
    code = "from triptych.cli.bench import bench_app; bench_app(['serve', '--help'], prog_name='triptych bench')"
    command = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True, timeout=60
    )
    assert "Usage: triptych bench serve" in script.stdout
    assert script.stdout == command.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--num-prompts", "0"], ["--num-prompts", "0", "at least 1"]),
        (["--port", "99999"], ["--port", "99999", "at most 65535"]),
        (["--num-prompts", "many"], ["--num-prompts", "'many'", "an integer"]),
        (["--request-rate", "0"], ["--request-rate", "'0'", "more than 0"]),
        (["--request-rate", "fast"], ["--request-rate", "'fast'", "a number"]),
        (["--request-rate", "nan"], ["--request-rate", "nan"]),
        (["--max-concurrency", "0"], ["--max-concurrency", "at least 1"]),
        (["--warmup-requests", "-1"], ["--warmup-requests", "-1", "at least 0"]),
        (["--width", "512"], ["--width", "512", "--height"]),
        (["--seed", "-5"], ["--seed", "-5", "at least 0"]),
        (["--slo-scale", "0"], ["--slo-scale", "'0'", "more than 0"]),
        (["--slo-scale", "inf"], ["--slo-scale", "'inf'", "finite"]),
        (["--backend", "grpc"], ["--backend", "grpc", "vllm-omni"]),
        (["--backend", "openai", "--task", "t2v"], ["--backend", "t2v", "v1/videos"]),
        (["--backend", "v1/videos"], ["--backend", "t2i", "t2v"]),
        (["--base-url", "localhost:8000"], ["--base-url", "localhost:8000", "http://"]),
        (["--dataset", "trace"], ["--dataset-path", "a file"]),
        (["--dataset", "vbench"], ["--dataset-path", "not available in this version"]),
        (["--dataset", "prompts", "--dataset-path", "/nowhere"], ["--dataset-path", "/nowhere"]),
        (["--random-request-config", "{"], ["--random-request-config", "JSON list"]),
        (["--random-request-config", '[{"hight":1}]'], ["--random-request-config", "hight", "height"]),
        (["--random-request-config", '[{"height":"x"}]'], ["--random-request-config", "height"]),
        (["--random-request-config", '[{"weight":0}]'], ["--random-request-config", "weight"]),
        (
            ["--random-request-config", '[{}, {"height":0}]'],
            ["--random-request-config", "entry 2 of 2", "height", ">= 1"],
        ),
        (["--random-request-config", '[{"num_inference_steps":-1}]'], ["entry 1 of 1", "num_inference_steps", ">= 1"]),
        (["--random-request-config", '[{"num_frames":0}, {}]'], ["entry 1 of 2", "num_frames", ">= 1"]),
        (["--slo", "--warmup-requests", "0"], ["--slo", "--warmup-requests 0"]),
        (["--output-file", "/proc/nowhere/x.json"], ["--output-file", "/proc/nowhere"]),
        (["--output-file", "/sys/x.json"], ["--output-file", "/sys/x.json"]),
        (["--output-file", "/tmp"], ["--output-file", "'/tmp'", "Is a directory"]),
        (["--save-dir", "/sys"], ["--save-dir", "'/sys'"]),
    ],
)
def test_a_bad_flag_is_exit_2_and_names_flag_value_and_what_was_wanted(args: list[str], words: list[str]) -> None:
    code, output = run("serve", *args)
    assert code == 2, output
    flat = " ".join(output.replace("│", " ").split())
    for word in words:
        assert word in flat


def test_a_server_that_is_not_there_is_one_line_and_exit_1() -> None:
    code, output = run("serve", "--base-url", "http://127.0.0.1:9", "--disable-tqdm")
    assert code == 1
    (line,) = output.strip().splitlines()
    assert "no server answers at http://127.0.0.1:9" in line


def test_looking_whether_the_report_can_be_written_leaves_no_file_and_keeps_an_old_one(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("old")
    for path in (new, old):
        assert run("serve", "--base-url", "http://127.0.0.1:9", "--output-file", str(path))[0] == 1
    assert not new.exists()
    assert old.read_text() == "old"


@pytest.mark.parametrize("counts", ["", "0", "1,1", "a", "1;2", "1,-2"])
def test_bad_replica_counts_of_a_sweep_are_exit_2(counts: str) -> None:
    code, output = run("sweep", "--replicas", counts)
    assert code == 2
    assert "--replicas" in output
    assert "1,2,3,4" in output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["./no-such-model"], ["MODEL", "./no-such-model", "a local diffusers directory"]),
        (["--stage-configs-path", "/nowhere.yaml"], ["/nowhere.yaml"]),
        (["--start-timeout", "soon"], ["--start-timeout", "'soon'", "a number"]),
        (["--max-concurrency", "0"], ["--max-concurrency", "at least 1"]),
        (["--width", "wide"], ["--width", "'wide'", "an integer"]),
        (["--output-dir", "/sys"], ["--output-dir", "'/sys'"]),
    ],
)
def test_what_a_server_would_refuse_ends_a_sweep_before_one_is_started(args: list[str], words: list[str]) -> None:
    code, output = run("sweep", *args)
    assert code == 2, output
    (line,) = output.strip().splitlines()
    for word in words:
        assert word in line


def test_threads_that_are_no_number_end_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "abc")
    code, output = run("sweep")
    assert (code, output) == (
        2,
        "Error: OMP_NUM_THREADS: not a number of threads; found 'abc'; wanted a positive integer\n",
    )


@pytest.mark.parametrize(
    "args",
    [
        ("serve", "--num-prompts", "many"),
        ("serve", "--dataset", "prompts", "--dataset-path", "/nowhere"),
        ("serve", "--output-file", "/"),
        ("sweep", "--replicas", "1,1"),
        ("sweep", "./no-such-model"),
        ("sweep", "--fps", "0"),
    ],
)
def test_a_bad_flag_is_told_before_anything_heavy_is_imported(args: tuple[str, ...]) -> None:
    program = (
        "import atexit, sys\n"
        "heavy = ('aiohttp', 'numpy', 'matplotlib', 'torch')\n"
        "atexit.register(lambda: print(*[name for name in heavy if name in sys.modules], file=sys.stderr))\n"
        "from triptych.cli.main import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, "bench", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    message, imported = done.stderr.splitlines()
    assert message.startswith("Error: ")
    assert imported == ""
