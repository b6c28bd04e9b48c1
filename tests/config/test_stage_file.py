"""Stage files, good and bad, the way `check` and `serve` read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.config.devices import Machine
from triptych.config.plan import ServePlan, build_plan
from triptych.config.settings import ServeSettings
from triptych.config.stage_file import read_stage_file
from triptych.config.tree import StageConfig
from triptych.errors import ConfigError

STAGE = """\
stages:
  - stage_id: 0
    stage_type: diffusion
"""
WITH_RUNTIME = STAGE + "    runtime: {{{runtime}}}\n"
WITH_ENGINE = STAGE + "    engine_args: {{{engine}}}\n"


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "stage.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def plan(path: Path) -> ServePlan:
    """As `triptych check` makes it, on a machine without accelerators."""
    machine = Machine(accelerators=(), cores=(0, 1))
    return build_plan(
        ServeSettings(stage_configs_path=str(path)), environ={}, machine=machine, refuse_unavailable=False
    )


def stage_of(path: Path) -> StageConfig:
    return plan(path).stage


def runtime(text: str) -> str:
    return WITH_RUNTIME.format(runtime=text)


def engine(text: str) -> str:
    return WITH_ENGINE.format(engine=text)


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 9))

# name: text of the file, and what the message must hold: key path, found, wanted.
BAD_FILES: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "too few devices": (
        runtime('devices: "0,1,2", num_replicas: 4'),
        ("stages[0].runtime.devices", "4 replica(s) x 1 device(s) each = 4", "found '0,1,2'", "exactly 4 ids"),
    ),
    "too many devices": (
        runtime('devices: "0,1,2,3", num_replicas: 2'),
        ("stages[0].runtime.devices", "= 2, but 4 are listed", "wanted exactly 2 ids"),
    ),
    "too few devices for world_size": (
        runtime('devices: "0,1", num_replicas: 2') + "    engine_args: {parallel_config: {world_size: 2}}\n",
        ("stages[0].runtime.devices", "2 replica(s) x 2 device(s) each = 4", "wanted exactly 4 ids"),
    ),
    "duplicate device": (
        runtime('devices: "0,1,0", num_replicas: 3'),
        ("stages[0].runtime.devices", "entry 3 of 3 repeats device '0' (entry 1)", "wanted distinct ids"),
    ),
    "duplicate device in a list of mixed types": (
        runtime('devices: [1, "1"], num_replicas: 2'),
        ("stages[0].runtime.devices", "entry 2 of 2 repeats device '1'"),
    ),
    "empty device entry": (
        runtime('devices: "0,,1", num_replicas: 3'),
        ("stages[0].runtime.devices", "entry 2 of 3 is empty", "found '0,,1'", "wanted distinct ids"),
    ),
    "trailing comma": (runtime('devices: "0,1,", num_replicas: 2'), ("entry 3 of 3 is empty",)),
    "empty device string": (runtime('devices: ""'), ("stages[0].runtime.devices", "no device is named")),
    "empty device list": (runtime("devices: []"), ("stages[0].runtime.devices", "no device is named")),
    "device with letters": (
        runtime('devices: "0,gpu1", num_replicas: 2'),
        ("stages[0].runtime.devices", "entry 2 of 2", "found 'gpu1'", "wanted non-negative integers"),
    ),
    "negative device": (
        runtime('devices: "0,-1", num_replicas: 2'),
        ("stages[0].runtime.devices", "entry 2 of 2", "found '-1'", "wanted non-negative integers"),
    ),
    "negative device in a list": (runtime("devices: [-1]"), ("stages[0].runtime.devices", "found '-1'")),
    "device with a leading zero": (runtime('devices: "00"'), ("found '00'", "wanted non-negative integers")),
    "device in other digits": (runtime('devices: "٣"'), ("found '٣'", "wanted non-negative integers")),
    "device that is a boolean": (runtime("devices: [true]"), ("entry 1 of 1 is not an id: True",)),
    "device that is a float": (runtime("devices: [0.5]"), ("entry 1 of 1 is not an id: 0.5",)),
    "list entry with a comma": (runtime('devices: ["0,1"]'), ("entry 1 of 1 holds a comma",)),
    "unknown key": (
        runtime("num_replica: 2"),
        ("stages[0].runtime.num_replica", "unknown key", "found 'num_replica'", "wanted `num_replicas`?"),
    ),
    "key of another section": (
        STAGE + "    num_replicas: 2\n",
        ("stages[0].num_replicas", "unknown key", "wanted `stages.runtime.num_replicas`?"),
    ),
    "unknown key with nothing near": (
        STAGE + "    zzz: 2\n",
        ("stages[0].zzz", "unknown key", "wanted one of stage_id, stage_type, runtime"),
    ),
    "unknown key at the top": ("stage: []\n" + STAGE, ("stage: unknown key", "wanted `stages`?")),
    "duplicate key": (
        STAGE + "    runtime:\n      num_replicas: 1\n      num_replicas: 2\n",
        ("stages[0].runtime.num_replicas", "given twice", "lines 5 and 6", "wanted each key once"),
    ),
    "two documents": (STAGE + "---\n" + STAGE, ("several YAML documents", "wanted one document")),
    "empty file": ("", ("the file is empty", "wanted a mapping with the key `stages`")),
    "only a comment": ("# nothing\n", ("the file is empty",)),
    "null document": ("null\n", ("NoneType", "wanted a mapping with the key `stages`")),
    "a list": ("- 1\n", ("the file holds a list", "wanted a mapping")),
    "no stages": ("{}\n", ("stages", "required key is missing")),
    "stages is a mapping": ("stages: {}\n", ("stages: not a list", "wanted a list with one stage")),
    "stages is empty": ("stages: []\n", ("stages: the list is empty", "wanted a list with one stage")),
    "stages is null": ("stages:\n", ("stages: not a list", "found 'null'", "wanted a list with one stage")),
    "a stage that is text": ("stages: [x]\n", ("stages[0]", "found 'x'", "wanted a mapping")),
    "more stages": (
        STAGE + "  - stage_id: 1\n    stage_type: diffusion\n",
        ("stages: several stages are not served yet", "found 2", "wanted exactly one stage"),
    ),
    "another stage type": (
        "stages: [{stage_id: 0, stage_type: llm}]\n",
        ("stages[0].stage_type", "found 'llm'", "wanted 'diffusion'"),
    ),
    "stage type null": (
        "stages: [{stage_id: 0, stage_type: null}]\n",
        ("stages[0].stage_type", "found 'null'", "wanted 'diffusion'"),
    ),
    "another stage type, replicated": (
        "stages: [{stage_id: 0, stage_type: llm, runtime: {num_replicas: 4, devices: '0,1,2,3'}}]\n",
        ("stages[0].stage_type", "stages of type 'llm' are not served", "wanted 'diffusion'"),
    ),
    "another stage type among several stages": (
        STAGE + "  - {stage_id: 1, stage_type: audio, engine_args: {whatever: 1}}\n",
        ("stages[1].stage_type", "found 'audio'", "wanted 'diffusion'"),
    ),
    "stage type missing": ("stages: [{stage_id: 0}]\n", ("stages[0].stage_type", "required key is missing")),
    "stage id missing": ("stages: [{stage_type: diffusion}]\n", ("stages[0].stage_id", "required key is missing")),
    "stage id is not 0": (
        "stages: [{stage_id: 1, stage_type: diffusion}]\n",
        ("stages[0].stage_id", "found 1", "wanted 0 for the only stage"),
    ),
    "old form": ("stage_args: []\n", ("stage_args", "wanted the list `stages`", "stage_type: diffusion")),
    "anchors that explode": (LAUGHS + STAGE, ("aliases expand too far", "wanted at most 10000 nodes")),
    "merge keys that explode": (MERGES + STAGE, ("aliases expand too far", "wanted at most 10000 nodes")),
    "anchor that contains itself": ("stages: &a [*a]\n", ("stages[0]", "an anchor contains itself")),
    "nested too deeply": ("[" * 60_000, ("nested too deeply, wanted at most 100",)),
    "aliases that nest too deeply": (
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} {'[' * 50}*a{n - 1}{']' * 50}\n" for n in range(1, 4)) + STAGE,
        ("nested too deeply, wanted at most 100",),
    ),
    "mappings nested deeply": ("".join(f"{' ' * n}a:\n" for n in range(150)), ("nested too deeply", "at most 100")),
    "not YAML": ("stages: [\n", ("stage.yaml:2:1", "not valid YAML")),
    "tab": ("stages:\n\t- 1\n", ("stage.yaml:2:1", "not valid YAML")),
    "control character": ("stages: \x07\n", ("not valid YAML",)),
    "not UTF-8": (b"stages: \xff\n", ("not UTF-8 at byte 8", "wanted a UTF-8 text file")),
    "UTF-16": (STAGE.encode("utf-16"), ("not UTF-8 at byte 0",)),
    "huge": ("#" * 70_000, ("the file is too large", "wanted at most 64 KiB")),
    "python tag": ("stages: !!python/object/apply:os.getcwd []\n", ("stages: YAML tag is not plain data", "wanted no")),
    "binary tag": (engine("model: !!binary aGk="), ("stages[0].engine_args.model", "YAML tag is not plain data")),
    "key that is no text": ("1: x\n", ("line 1: a key is not text", "wanted string keys")),
    "replicas as text": (
        runtime('num_replicas: "2"'),
        ("stages[0].runtime.num_replicas", "wrong type", "found '2'", "wanted an integer"),
    ),
    "replicas as a float": (runtime("num_replicas: 2.0"), ("stages[0].runtime.num_replicas", "found 2.0")),
    "replicas as a boolean": (runtime("num_replicas: true"), ("found True", "wanted an integer")),
    "replicas null": (runtime("num_replicas: null"), ("found 'null'", "wanted an integer")),
    "no replicas": (runtime("num_replicas: 0"), ("num_replicas: out of range", "found 0", "wanted at least 1")),
    "negative replicas": (runtime("num_replicas: -1"), ("found -1", "wanted at least 1")),
    "absurd replicas": (runtime("num_replicas: 1000000000000"), ("wanted at most 1024",)),
    "a number beyond all bounds": (runtime(f"num_replicas: {'9' * 5000}"), ("a number cannot be read",)),
    "octal": (runtime("num_replicas: 010"), ("found '010'", "wanted an integer")),
    "section null": (STAGE + "    runtime:\n", ("stages[0].runtime", "found 'null'", "wanted a mapping")),
    "not a number": (
        engine("engine: simulated, simulated: {seconds_per_request: .nan}"),
        ("stages[0].engine_args.simulated.seconds_per_request", "found '.nan'", "wanted a finite number"),
    ),
    "infinite": (
        engine("engine: simulated, simulated: {seconds_per_request: -.inf}"),
        ("seconds_per_request", "found '-.inf'", "wanted a finite number"),
    ),
    "infinite by overflow": (
        engine("engine: simulated, simulated: {seconds_per_request: 1.0e999}"),
        ("seconds_per_request", "wanted a finite number"),
    ),
    "degrees that disagree": (
        engine("parallel_config: {world_size: 4, ulysses_degree: 2, cfg_parallel_size: 1}"),
        ("stages[0].engine_args.parallel_config", "world_size is 4", "ulysses_degree 2 x cfg_parallel_size 1 = 2"),
    ),
    "absurd degrees": (
        engine("parallel_config: {ulysses_degree: 1024, ring_degree: 1024, tensor_parallel_size: 1024}"),
        ("stages[0].engine_args.parallel_config", "wanted at most 1024"),
    ),
    "unknown routing": (
        runtime("routing: random"),
        ("stages[0].runtime.routing", "found 'random'", "one of round_robin, strict_round_robin, least_work"),
    ),
    "unknown engine": (
        engine("engine: magic"),
        ("stages[0].engine_args.engine", "found 'magic'", "one of diffusers, simulated"),
    ),
    "unknown executor": (
        runtime("executor: thread"),
        ("stages[0].runtime.executor", "found 'thread'", "wanted 'process' or 'ray'"),
    ),
    "two clocks": (
        engine("engine: simulated, simulated: {seconds_per_request: 1, seconds_per_step: 1}"),
        ("stages[0].engine_args.simulated", "seconds_per_request or seconds_per_step, not both"),
    ),
    "simulated section without the engine": (
        engine("simulated: {seconds_per_request: 1}"),
        ("stages[0].engine_args", "read by engine simulated only"),
    ),
    "warm-up that is no switch": (
        engine("warmup: 3"),
        ("stages[0].engine_args.warmup", "found 3", "wanted true, false, or a list of"),
    ),
    "preset of too many steps": (
        STAGE + "    default_sampling_params: {num_inference_steps: 5000}\n",
        ("stages[0].default_sampling_params.num_inference_steps", "at most 1000, got 5000"),
    ),
    "bad default of a parameter": (
        STAGE + "    default_sampling_params: {num_inference_steps: 0}\n",
        ("stages[0].default_sampling_params.num_inference_steps", "found 0"),
    ),
    "unknown default parameter": (
        STAGE + "    default_sampling_params: {num_inference_step: 2}\n",
        ("stages[0].default_sampling_params.num_inference_step",),
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_told_with_file_key_path_found_and_wanted(tmp_path: Path, name: str) -> None:
    text, expected = BAD_FILES[name]
    with pytest.raises(ConfigError) as caught:
        plan(write(tmp_path, text))
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "stage.yaml"))
    for part in expected:
        assert part in message


def test_a_missing_file_a_directory_and_a_bad_name_are_told(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "is a directory"),
        (Path("a\0b"), "null byte"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan(path)


def test_several_problems_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the first of 2 problems"):
        plan(write(tmp_path, runtime("num_replicas: 0, max_queue_size: 0")))


@pytest.mark.parametrize("devices", ['"0,1,2,3,4,5,6,7"', '"0, 1, 2, 3, 4, 5, 6, 7"', "[0, 1, 2, 3, 4, '5', 6, 7]"])
def test_devices_are_a_string_or_a_list(tmp_path: Path, devices: str) -> None:
    text = runtime(f"devices: {devices}, num_replicas: 4") + "    engine_args: {parallel_config: {world_size: 2}}\n"
    stage = stage_of(write(tmp_path, text))
    assert stage.runtime.devices == tuple("01234567")
    assert stage.engine_args.parallel_config.devices_per_replica == 2


def test_one_device_may_be_a_bare_number(tmp_path: Path) -> None:
    assert stage_of(write(tmp_path, runtime("devices: 3"))).runtime.devices == ("3",)


def test_world_size_may_be_the_product_of_the_degrees(tmp_path: Path) -> None:
    text = engine("parallel_config: {ulysses_degree: 2, cfg_parallel_size: 2}")
    assert stage_of(write(tmp_path, text)).engine_args.parallel_config.devices_per_replica == 4
    text = engine("parallel_config: {ulysses_degree: 2, cfg_parallel_size: 2, world_size: 4}")
    assert stage_of(write(tmp_path, text)).engine_args.parallel_config.devices_per_replica == 4


def test_simulated_devices_are_free_names(tmp_path: Path) -> None:
    text = runtime('devices: "left,right", num_replicas: 2') + "    engine_args: {engine: simulated}\n"
    assert stage_of(write(tmp_path, text)).runtime.devices == ("left", "right")


def test_small_aliases_and_merge_keys_are_welcome(tmp_path: Path) -> None:
    text = "stages:\n- stage_id: 0\n  stage_type: diffusion\n  default_sampling_params: &d {seed: 1}\n  runtime: {}\n"
    assert stage_of(write(tmp_path, text)).default_sampling_params == {"seed": 1}
    text = STAGE + "    runtime: &r {num_replicas: 2}\n    engine_args:\n      engine: simulated\n"
    text += "      simulated: {<<: {seconds_per_request: 1e-1}}\n"
    stage = stage_of(write(tmp_path, text))
    assert stage.engine_args.simulated.seconds_per_request == 0.1


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    assert stage_of(write(tmp_path, b"\xef\xbb\xbf" + STAGE.encode())).stage_id == 0


def test_reference_keys_without_meaning_are_warned_about_and_ignored(tmp_path: Path) -> None:
    text = "async_chunk: false\n" + runtime("process: true, max_batch_size: 1, num_replicas: 2")
    text += "    final_output: true\n    final_output_type: image\n"
    text += "    engine_input_source: [0]\n    async_chunk: true\n"
    result = plan(write(tmp_path, text))
    assert result.stage.runtime.num_replicas == 2
    keys = [warning.split(": ")[1] for warning in result.warnings if "ignored" in warning]
    assert keys == [
        "async_chunk",
        "stages[0].final_output",
        "stages[0].final_output_type",
        "stages[0].engine_input_source",
        "stages[0].async_chunk",
        "stages[0].runtime.process",
        "stages[0].runtime.max_batch_size",
    ]


def test_reading_leaves_counts_to_flags_that_may_change_them(tmp_path: Path) -> None:
    path = write(tmp_path, runtime('devices: "0,1"'))
    assert read_stage_file(path).stages[0].runtime.num_replicas == 1
    with pytest.raises(ConfigError):
        plan(path)
