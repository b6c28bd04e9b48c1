"""`triptych generate`, in this process: simulated engine for the command, embedded model for the picture."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from triptych.cli.generate import generate
from triptych.config.accelerators import Accelerator
from triptych.config.devices import Machine
from triptych.config.plan import ServePlan
from triptych.engine.base import EngineStartError
from triptych.engine.worker import pin_devices
from triptych.messages import ReplicaSpec

pytestmark = pytest.mark.filterwarnings("ignore")

STAGE_FILE = """
stages:
  - stage_id: 0
    stage_type: diffusion
    runtime: {{devices: "0,1", num_replicas: 2}}
    engine_args: {{engine: simulated, simulated: {{seconds_per_request: {seconds}}}}}
    default_sampling_params: {{width: 48, height: 32, num_inference_steps: 7}}
"""


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def stage_file(tmp_path: Path) -> str:
    path = tmp_path / "stages.yaml"
    path.write_text(STAGE_FILE.format(seconds=0.05))
    return str(path)


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(generate)
    return CliRunner().invoke(app, list(arguments))


def said(result: Result) -> str:
    """The one line of an error."""
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    return lines[0]


def size_of(path: str) -> tuple[str | None, tuple[int, int]]:
    with Image.open(path) as image:
        return image.format, image.size


def test_the_embedded_model_draws_the_same_picture_for_the_same_seed(tmp_path: Path) -> None:
    result = run("a red circle", "-o", "one.png", "--seed", "7")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("one.png: 64x64, 20 steps, seed 7, ")
    pixels = np.asarray(Image.open("one.png")).astype(int)
    assert pixels[32, 32, 0] > 180 > 90 > pixels[32, 32, 1]
    run("a red circle", "-o", "two.png", "--seed", "6", "-n", "2", "--guidance-scale", "3", "--size", "64x64")
    assert Path("two-1.png").read_bytes() == Path("one.png").read_bytes()
    assert Path("two-0.png").read_bytes() != Path("one.png").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "two-0.png", "two-1.png"]


def test_ctrl_c_stops_within_a_step_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triptych.cli.generation import Generation

    emit, steps = Generation._emit, []

    def interrupted(self: Any, message: Any, frames: Any) -> None:
        if type(message).__name__ == "Progress":
            steps.append(message.step)
            if message.step >= 1 and len(steps) < 1000:
                os.kill(os.getpid(), signal.SIGINT)
        emit(self, message, frames)

    monkeypatch.setattr(Generation, "_emit", interrupted)
    before = signal.getsignal(signal.SIGINT)
    result = run("a red circle", "-o", "one.png", "--num-inference-steps", "1000")
    assert result.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert steps[-1] < 100
    assert list(tmp_path.iterdir()) == []


def test_a_stage_file_with_the_simulated_engine_works_with_its_defaults(stage_file: str) -> None:
    result = run("anything", "--stage-configs-path", stage_file, "-o", "a.jpg", "-n", "3", "--seed", "1")
    assert result.exit_code == 0, result.output
    assert [line.split(",")[0] for line in result.stdout.splitlines()] == [f"a-{i}.jpg: 48x32" for i in range(3)]
    assert [size_of(f"a-{i}.jpg") for i in range(3)] == [("JPEG", (48, 32))] * 3
    assert "7 steps, seed 3" in result.stdout.splitlines()[2]


def test_flags_win_over_the_stage_file_and_the_suffix_says_the_format(stage_file: str) -> None:
    assert run("x", "--stage-configs-path", stage_file, "--size", "16x8", "-o", "a.webp").exit_code == 0
    assert size_of("a.webp") == ("WEBP", (16, 8))
    assert run("x", "--stage-configs-path", stage_file, "--output-format", "jpeg").exit_code == 0
    assert size_of("triptych.jpg") == ("JPEG", (48, 32))
    assert run("x", "--stage-configs-path", stage_file).exit_code == 0
    assert size_of("triptych.png") == ("PNG", (48, 32))


def test_an_existing_file_is_replaced_only_by_a_whole_one(stage_file: str) -> None:
    Path("a.png").write_text("old")
    assert run("[[error]]", "--stage-configs-path", stage_file, "-o", "a.png").exit_code == 1
    assert Path("a.png").read_text() == "old"
    assert run("x", "--stage-configs-path", stage_file, "-o", "a.png").exit_code == 0
    assert size_of("a.png") == ("PNG", (48, 32))
    assert [path.name for path in Path().iterdir() if path.name.startswith(".")] == []


def test_input_pictures_are_read_and_the_output_is_as_large_as_the_first(stage_file: str) -> None:
    Image.new("RGB", (40, 24)).save("in.png")
    Image.new("L", (40, 24), 255).save("mask.png")
    given = ("--stage-configs-path", stage_file, "--image", "in.png", "--mask", "mask.png", "--strength", "0.5")
    result = run("x", *given)
    assert result.exit_code == 0, result.output
    assert Image.open("triptych.png").size == (40, 24)


def test_an_input_picture_that_cannot_be_used_is_exit_code_2(stage_file: str) -> None:
    Path("broken.png").write_bytes(b"no picture")
    for name, words in (("nowhere.png", "cannot be read"), ("broken.png", "is no picture in a known format")):
        result = run("x", "--stage-configs-path", stage_file, "--image", name)
        assert result.exit_code == 2
        assert name in said(result)
        assert words in said(result)


def test_one_failed_output_ends_the_others(tmp_path: Path) -> None:
    path = tmp_path / "slow.yaml"
    path.write_text(STAGE_FILE.format(seconds=60))
    result = run("[[oom]]", "--stage-configs-path", str(path), "-n", "4")
    assert result.exit_code == 1
    assert said(result) == "Error: simulated fault: oom"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((" ",), "Error: prompt must not be blank, got ' '"),
        (("x", "--seed", "-1"), "Error: seed must be greater than or equal to 0, got -1"),
        (("x", "-n", "11"), "Error: n must be less than or equal to 10, got 11"),
        (("x", "--size", "big"), 'Error: size must be "WxH" in pixels'),
        (("x", "--strength", "0.5"), "Error: strength is not supported by this model (PRXPixelPipeline)"),
        (("x", "--size", "32x32"), "Error: size must be 64x64 with this model, got 32x32"),
        (("x", "--extra-args", '{"eta": 1}'), "Error: extra_args.eta is not supported by this model"),
        (("x", "--extra-args", "{"), "Error: --extra-args: is not JSON: "),
        (("x", "--guidance-scale", "0.5"), "Error: guidance_scale has to be >= 1.0 but is 0.5"),
        (("x", "-o", "a.gif"), "Error: --output: unknown suffix; found 'a.gif'; wanted .png, .jpg, .jpeg, .webp, .mp4"),
        (("x", "-o", "a.mp4"), "Error: this model makes pictures (.png, .jpg, .webp), got --output a.mp4"),
        (("x", "-o", "a.png", "--output-format", "webp"), "Error: --output: format and suffix disagree"),
        (("x", "-o", "none/a.png"), "Error: --output: cannot write there; found 'none/a.png'"),
        (("x", "--extra-args", "[" * 100_000), "Error: --extra-args: is not JSON: "),
        (("x", "--model", "./none"), "Error: --model: no such directory; found './none'"),
        (("x", "--revision", "v1"), "Error: --revision: revision needs a Hugging Face model"),
        (("x", "--stage-configs-path", "none.yaml"), "Error: none.yaml: "),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: tuple[str, ...], line: str) -> None:
    result = run(*arguments)
    assert said(result).startswith(line)
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--seed", str(2**63 - 1), "-n", "2"), "Error: seed must be at most 9223372036854775806 for n 2"),
        (("--num-inference-steps", "1001"), "Error: num_inference_steps must be at most 1000, got 1001"),
        (("--size", "4096x4096"), "Error: size 4096x4096 has 16777216 pixels, the limit is 4194304"),
        (("--width", "16384", "-o", "a.webp"), "Error: width must be at most 16383 pixels a side for webp, got 16384"),
        (("--num-frames", "258"), "Error: num_frames must be at most 257 frames, got 258"),
        (("--extra-args", '{"callback": 1}'), "Error: extra_args may not set 'callback': the name is reserved"),
        (("--lora", "style"), "Error: lora.name cannot be chosen, none is registered, got 'style'"),
        (("--lora-scale", "0.5"), "Error: --lora-scale: needs --lora; found 0.5"),
        (("-n", "2", "--num-outputs-per-prompt", "3"), "Error: num_outputs_per_prompt is another name of n"),
        (("--num-outputs-per-prompt", "11"), "Error: num_outputs_per_prompt must be less than or equal to 10, got 11"),
    ],
)
def test_what_needs_no_model_is_refused_before_one_is_loaded(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], line: str
) -> None:
    monkeypatch.setattr("triptych.cli.generation.Generation.load", lambda *_: pytest.fail("a model is loaded"))
    result = run("x", *arguments)
    assert said(result).startswith(line)
    assert result.exit_code == 2


def specs_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[ReplicaSpec]:
    """Replicas of the plan that `generate` runs the first of."""
    plans: list[ServePlan] = []

    def load(self: Any, *_: Any) -> None:
        plans.append(self._plan)
        raise EngineStartError("enough")

    monkeypatch.setattr("triptych.cli.generation.Generation.load", load)
    assert run("x", *arguments).exit_code == 1
    return list(plans[0].replicas)


def test_without_a_stage_file_all_of_the_machine_is_for_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine = Machine(accelerators=(), cores=(0, 1, 2, 3))
    monkeypatch.setattr("triptych.config.plan.discover_machine", lambda _: machine)
    (spec,) = specs_of(monkeypatch)
    assert (spec.cpu_threads, spec.cpu_affinity) == (4, (0, 1, 2, 3))
    machine = Machine(accelerators=(Accelerator("5", "H200"),), cores=(0, 1, 2, 3))
    monkeypatch.setattr("triptych.config.plan.discover_machine", lambda _: machine)
    (spec,) = specs_of(monkeypatch)
    assert (spec.device_kind, spec.visible_devices) == ("cuda", ("5",))


def test_the_other_name_of_n_works(stage_file: str) -> None:
    result = run("x", "--stage-configs-path", stage_file, "--num-outputs-per-prompt", "2", "-o", "a.png")
    assert result.exit_code == 0, result.output
    assert [size_of(f"a-{i}.png") for i in range(2)] == [("PNG", (48, 32))] * 2


def test_devices_are_pinned_as_in_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.cli.generation.import_engine", lambda _: pytest.fail("pinned too late"))
    pinned: list[ReplicaSpec] = []

    def pin(spec: ReplicaSpec) -> None:
        pinned.append(spec)
        raise EngineStartError("enough")

    monkeypatch.setattr("triptych.cli.generation.pin_devices", pin)
    assert run("x").exit_code == 1
    assert [spec.replica_id for spec in pinned] == [0]


def test_cards_are_counted_in_the_order_in_which_they_were_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(variable, "x")  # so that it is put back afterwards
        monkeypatch.delenv(variable)
    spec = ReplicaSpec(
        replica_id=0,
        stage_id=0,
        engine="diffusers",
        model="m",
        device_kind="cuda",
        devices=("1",),
        visible_devices=("3",),
        cpu_threads=1,
    )
    pin_devices(spec)
    assert (os.environ["CUDA_DEVICE_ORDER"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "3")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    pin_devices(spec)
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_a_model_that_does_not_load_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model_index.json").write_text("{}")
    result = run("x", "--model", str(broken))
    assert said(result).startswith(f"Error: model '{broken}'")
    assert result.exit_code == 1


def test_a_clip_is_written_as_mp4(tiny_pipelines: Path) -> None:
    import av

    model = str(tiny_pipelines / "wan")
    small = ("--size", "32x32", "--num-frames", "5", "--num-inference-steps", "2")
    result = run("x", "--model", model, *small, "--fps", "8", "-o", "a.mp4")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("a.mp4: 32x32, 5 frames at 8 fps, 2 steps, seed ")
    with av.open(io.BytesIO(Path("a.mp4").read_bytes())) as container:
        assert container.streams.video[0].average_rate == 8
        assert len(list(container.decode(video=0))) == 5
    result = run("x", "--model", model, *small, "-o", "a.png")
    assert (result.exit_code, said(result)) == (2, "Error: this model makes clips (.mp4), got --output a.png")


def test_the_module_brings_neither_torch_nor_the_configuration_with_it() -> None:
    heavy = ["torch", "diffusers", "transformers", "numpy", "av", "PIL", "pydantic"]
    code = f"import sys, triptych.cli.generate; sys.exit(', '.join(m for m in {heavy} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
