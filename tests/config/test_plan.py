"""From settings and stage file to a plan: precedence, names, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from triptych.config.accelerators import Accelerator
from triptych.config.devices import Machine
from triptych.config.parameters import SamplingDefaults
from triptych.config.plan import ServePlan, build_plan
from triptych.config.settings import ServeSettings, read_settings
from triptych.config.stage_file import BUILTIN_ENGINES, ENGINE_GROUP, ROUTING_POLICIES
from triptych.config.tree import RuntimeConfig
from triptych.engine.registry import ENTRY_POINT_GROUP, engine_names
from triptych.errors import ConfigError
from triptych.orchestrator.routing import POLICIES

CPU = Machine(accelerators=(), cores=(0, 1, 2, 3))
H200S = Machine(accelerators=tuple(Accelerator(number, "H200") for number in "0123"), cores=(0, 1))


def plan(settings: ServeSettings, *, machine: Machine = CPU, refuse_unavailable: bool = True) -> ServePlan:
    return build_plan(settings, environ={}, machine=machine, refuse_unavailable=refuse_unavailable)


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    directory = tmp_path / "pipeline"
    directory.mkdir()
    (directory / "model_index.json").write_text("{}")
    return directory


def write(tmp_path: Path, *, runtime: dict[str, Any] | None = None, **engine_args: Any) -> str:
    path = tmp_path / "stage.yaml"
    stage = {"stage_id": 0, "stage_type": "diffusion", "runtime": runtime or {}, "engine_args": engine_args}
    path.write_text(yaml.safe_dump({"stages": [stage]}))
    return str(path)


def test_nothing_asked_serves_the_embedded_model_on_two_replicas() -> None:
    result = plan(ServeSettings())
    assert (result.model, len(result.replicas)) == ("triptych/shapes", 2)
    assert (Path(result.replicas[0].model) / "model_index.json").is_file()
    assert [(spec.cpu_threads, spec.cpu_affinity) for spec in result.replicas] == [(2, (0, 1)), (2, (2, 3))]
    assert result.warnings == ()


def test_beside_one_accelerator_the_embedded_model_keeps_its_two_replicas_on_cpu_slots() -> None:
    one = Machine(accelerators=(Accelerator("0", "H200"),), cores=(0, 1))
    result = plan(ServeSettings(), machine=one)
    assert [spec.device_kind for spec in result.replicas] == ["cpu", "cpu"]
    assert "--num-replicas 1 would use it" in result.warnings[0]
    assert [spec.device_kind for spec in plan(ServeSettings(num_replicas=1), machine=one).replicas] == ["cuda"]


def test_flag_wins_over_environment_and_environment_over_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        engine="simulated",
        max_num_seqs=2,
        runtime={"num_replicas": 2, "devices": "a,b", "max_queue_size": 5},
    )
    assert len(plan(ServeSettings(stage_configs_path=path)).replicas) == 2
    environ = {"TRIPTYCH_NUM_REPLICAS": "3", "TRIPTYCH_DEVICES": "x,y,z", "TRIPTYCH_MAX_QUEUE_SIZE": "6"}
    from_environment = plan(read_settings({"stage_configs_path": path}, environ))
    assert [spec.devices for spec in from_environment.replicas] == [("x",), ("y",), ("z",)]
    assert from_environment.stage.runtime.max_queue_size == 6
    given = {"stage_configs_path": path, "num_replicas": "1", "devices": "d", "max_num_seqs": "4"}
    from_flags = plan(read_settings(given, environ))
    assert [(spec.devices, spec.max_num_seqs) for spec in from_flags.replicas] == [(("d",), 4)]
    assert from_flags.stage.runtime.num_replicas == 1


def test_a_flag_that_breaks_the_count_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, engine="simulated", runtime={"num_replicas": 2, "devices": "a,b"})
    with pytest.raises(ConfigError, match=r"stage.yaml: stages\[0\].runtime.devices: 3 .*\(from --num-replicas\)"):
        plan(ServeSettings(stage_configs_path=path, num_replicas=3))
    with pytest.raises(ConfigError, match=r"^--devices: .*wanted exactly 2 ids"):
        plan(ServeSettings(stage_configs_path=path, devices=("a",)))


def test_the_file_says_where_the_weights_are_and_model_is_the_served_name(tmp_path: Path, pipeline: Path) -> None:
    path = write(tmp_path, model=str(pipeline))
    result = plan(ServeSettings(model="Qwen/Qwen-Image", stage_configs_path=path))
    assert result.served_model_names == ("Qwen/Qwen-Image",)
    assert result.model_source.path == result.replicas[0].model == str(pipeline)
    assert plan(ServeSettings(stage_configs_path=path)).model == str(pipeline)
    named = ServeSettings(model="x/y", stage_configs_path=path, served_model_names=("one", "two"))
    assert plan(named).served_model_names == ("one", "two")
    assert plan(named).model == "one"


def test_a_hub_model_stays_an_id_until_it_is_fetched() -> None:
    result = plan(ServeSettings(model="Qwen/Qwen-Image", revision="main"))
    assert (result.model_source.kind, result.model_source.path) == ("hub", None)
    assert result.replicas[0].model == "Qwen/Qwen-Image"
    assert result.stage.engine_args.revision == "main"


def test_the_simulated_engine_needs_no_weights(tmp_path: Path) -> None:
    path = write(tmp_path, engine="simulated", simulated={"seconds_per_request": 0.5})
    result = plan(ServeSettings(stage_configs_path=path))
    assert (result.model, result.model_source.kind) == ("simulated", "none")
    assert result.replicas[0].engine_args["simulated"]["seconds_per_request"] == 0.5
    assert plan(ServeSettings(model="no such thing", stage_configs_path=path)).model == "no such thing"


def test_a_stage_file_for_diffusers_must_get_a_model_somewhere(tmp_path: Path, pipeline: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(ConfigError, match=r"stage.yaml: stages\[0\].engine_args.model: no model is named"):
        plan(ServeSettings(stage_configs_path=path))
    unnamed = plan(ServeSettings(stage_configs_path=path), refuse_unavailable=False)
    assert "no model is named; wanted a model there, or MODEL on the command line" in unnamed.warnings[0]
    assert unnamed.stage.engine_args.model is None
    assert plan(ServeSettings(stage_configs_path=path, model=str(pipeline))).replicas[0].model == str(pipeline)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nonsense", "not a model"),
        ("./missing", "no such directory"),
        ("/missing/dir", "no such directory"),
        ("a/b/c", "not a model"),
        ("triptych/nothing", "no such embedded model"),
    ],
)
def test_what_is_no_model_is_told_at_once(model: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^MODEL: {words}.*found '{model}'"):
        plan(ServeSettings(model=model))


def test_a_directory_without_model_index_and_a_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no model_index\.json.*wanted a diffusers pipeline directory"):
        plan(ServeSettings(model=str(tmp_path)))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"")
    with pytest.raises(ConfigError, match="is a single file"):
        plan(ServeSettings(model=str(weights)))


UNAVAILABLE_IN_FILE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"num_replicas": 1, "executor": "ray"}, {}, "runtime.executor"),
    ({}, {"parallel_config": {"ulysses_degree": 2, "tensor_parallel_size": 2}}, "engine_args.parallel_config"),
]


@pytest.mark.parametrize(("runtime", "engine_args", "key"), UNAVAILABLE_IN_FILE)
def test_what_later_versions_build_is_refused_by_serve_and_a_warning_in_check(
    tmp_path: Path, pipeline: Path, runtime: dict[str, Any], engine_args: dict[str, Any], key: str
) -> None:
    settings = ServeSettings(stage_configs_path=write(tmp_path, runtime=runtime, model=str(pipeline), **engine_args))
    with pytest.raises(ConfigError, match=rf"stage.yaml: stages\[0\].{key}: not available in this version"):
        plan(settings, machine=H200S)
    (warning,) = plan(settings, machine=H200S, refuse_unavailable=False).warnings
    assert f"stages[0].{key}: not available in this version" in warning
    assert warning.endswith("; `serve` refuses this")


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"executor": "ray"}, "--executor"),
        ({"ray_address": "auto"}, "--ray-address"),
    ],
)
def test_a_flag_that_is_not_built_is_refused_by_its_name(given: dict[str, object], option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: not available in this version"):
        plan(read_settings(given, {}))
    variable = f"TRIPTYCH_{option.removeprefix('--').upper().replace('-', '_')}"
    ((_, value),) = given.items()
    with pytest.raises(ConfigError, match=f"^{variable}: not available in this version"):
        plan(read_settings({}, {variable: ",".join(value) if isinstance(value, list) else str(value)}))


def test_loras_of_flag_and_file_are_looked_for_before_anything_loads(tmp_path: Path, pipeline: Path) -> None:
    lora = tmp_path / "style.safetensors"
    with pytest.raises(ConfigError, match=r"^--lora-modules: style: no such file or folder; found '/nowhere'"):
        plan(read_settings({"model": str(pipeline), "lora_modules": ["style=/nowhere"]}, {}))
    path = write(tmp_path, model=str(pipeline), lora_modules={"style": str(lora)})
    with pytest.raises(ConfigError, match=r"stages\[0\].engine_args.lora_modules: style: no such file or folder"):
        plan(ServeSettings(stage_configs_path=path))
    lora.write_bytes(b"")
    assert plan(ServeSettings(stage_configs_path=path)).replicas[0].engine_args["lora_modules"] == {"style": str(lora)}


def test_switches_that_exclude_each_other_are_told_with_flags_in_place(tmp_path: Path, pipeline: Path) -> None:
    path = write(tmp_path, model=str(pipeline), cache="first_block_cache")
    with pytest.raises(ConfigError, match=r"stages\[0\].engine_args.cache: a step cache keeps .* max_num_seqs is 2"):
        plan(ServeSettings(stage_configs_path=path, max_num_seqs=2), refuse_unavailable=False)


def test_trivial_values_of_what_is_not_built_are_accepted(tmp_path: Path, pipeline: Path) -> None:
    path = write(
        tmp_path,
        model=str(pipeline),
        compile=False,
        quantization=None,
        offload="none",
        lora_modules={},
        parallel_config={"world_size": 1, "ulysses_degree": 1},
        dtype="bfloat16",
        deterministic=True,
        warmup=True,
        runtime={"executor": "process", "routing": "strict_round_robin"},
    )
    settings = ServeSettings(stage_configs_path=path, omni=True, executor="process", chat_image_format="images")
    assert plan(settings).stage.engine_args.dtype == "bfloat16"


@pytest.mark.parametrize("engine", ["simulated", "diffusers"])
def test_a_replica_takes_any_number_of_slots(tmp_path: Path, engine: str) -> None:
    path = write(tmp_path, engine=engine, max_num_seqs=8, model="a/b")
    assert plan(ServeSettings(stage_configs_path=path)).replicas[0].max_num_seqs == 8


def test_bad_counts_come_before_what_is_not_available(tmp_path: Path) -> None:
    path = write(tmp_path, parallel_config={"world_size": 2}, model="Wan-AI/Wan2.2", runtime={"devices": "0"})
    with pytest.raises(ConfigError, match="wanted exactly 2 ids"):
        plan(ServeSettings(stage_configs_path=path))


def test_the_effective_stage_has_what_was_left_out_filled_in(tmp_path: Path) -> None:
    path = write(tmp_path, model="triptych/shapes", runtime={"num_replicas": 4})
    runtime = plan(ServeSettings(stage_configs_path=path)).stage.runtime
    assert (runtime.devices, runtime.cpu_threads) == (("0", "1", "2", "3"), 1)


def test_settings_of_a_plan_agree_with_its_stage(tmp_path: Path) -> None:
    path = write(tmp_path, model="a/b", revision="v1", runtime={"num_replicas": 3, "max_queue_size": 7})
    settings = plan(ServeSettings(stage_configs_path=path, max_num_seqs=1)).settings
    assert (settings.num_replicas, settings.devices, settings.max_num_seqs) == (3, ("0", "1", "2"), 1)
    assert (settings.max_queue_size, settings.revision, settings.executor) == (7, "v1", "process")


def test_listening_beyond_loopback_without_keys_is_worth_a_warning() -> None:
    (warning,) = plan(ServeSettings(host="0.0.0.0")).warnings
    assert "no API key is set" in warning
    assert plan(ServeSettings(host="::1")).warnings == ()


@pytest.mark.parametrize(
    ("runtime", "engine_args", "key"),
    [
        ({"cpu_threads": 2}, {}, "runtime.cpu_threads"),
        ({}, {"dtype": "float32"}, "engine_args.dtype"),
        ({}, {"deterministic": True}, "engine_args.deterministic"),
        ({}, {"warmup": False}, "engine_args.warmup"),
        ({}, {"revision": "main"}, "engine_args.revision"),
        ({}, {"compile": True}, "engine_args.compile"),
        ({}, {"attention_backend": "flash"}, "engine_args.attention_backend"),
        ({}, {"quantization": "layerwise_casting"}, "engine_args.quantization"),
        ({}, {"cache": "first_block_cache"}, "engine_args.cache"),
        ({}, {"offload": "model"}, "engine_args.offload"),
        ({}, {"vae_tiling": True}, "engine_args.vae_tiling"),
        ({}, {"vae_slicing": True}, "engine_args.vae_slicing"),
        ({}, {"lora_modules": {"a": "/a"}}, "engine_args.lora_modules"),
    ],
)
def test_keys_that_the_simulated_engine_does_not_read_are_refused_with_it(
    tmp_path: Path, runtime: dict[str, Any], engine_args: dict[str, Any], key: str
) -> None:
    path = write(tmp_path, runtime=runtime, engine="simulated", **engine_args)
    with pytest.raises(ConfigError, match=rf"stage.yaml: stages\[0\].{key}: read by engine diffusers only; found"):
        plan(ServeSettings(stage_configs_path=path), refuse_unavailable=False)


def test_keys_at_their_default_and_threads_of_the_plan_are_fine_with_the_simulated_engine(tmp_path: Path) -> None:
    path = write(tmp_path, engine="simulated", dtype="auto", deterministic=False, warmup=True)
    assert plan(ServeSettings(stage_configs_path=path)).stage.runtime.cpu_threads is None
    with pytest.raises(ConfigError, match=r"^TRIPTYCH_REVISION: read by engine diffusers only; found 'v1'"):
        plan(read_settings({"stage_configs_path": path}, {"TRIPTYCH_REVISION": "v1"}))


@pytest.mark.parametrize("embedded", [True, False])
def test_a_revision_needs_a_hub_model(tmp_path: Path, pipeline: Path, embedded: bool) -> None:
    model = "triptych/shapes" if embedded else str(pipeline)
    with pytest.raises(ConfigError, match=r"^--revision: revision needs a Hugging Face model; found 'v1'"):
        plan(ServeSettings(model=model, revision="v1"))
    with pytest.raises(ConfigError, match=r"stages\[0\].engine_args.revision: revision needs a Hugging Face model"):
        plan(ServeSettings(stage_configs_path=write(tmp_path, model=model, revision="v1")))


PRESETS_OVER_A_LIMIT: list[tuple[dict[str, Any], str, str]] = [
    ({"num_inference_steps": 5000}, "num_inference_steps", "at most 1000, got 5000"),
    ({"num_inference_steps": 21}, "num_inference_steps", "at most 20, got 21"),
    ({"size": "4096x4096"}, "size", "16777216 pixels, the limit is 4194304"),
    ({"width": 4096, "height": 4096}, "width", "16777216 pixels, the limit is 4194304"),
    ({"height": 5_000_000}, "height", "5000000 pixels, the limit is 4194304"),
    ({"width": 16384, "output_format": "webp"}, "width", "at most 16383 pixels a side for webp, got 16384"),
    ({"num_frames": 258}, "num_frames", "at most 257 frames, got 258"),
    ({"seconds": 30, "fps": 16}, "seconds", "too long for 16 fps and at most 257 frames, got 30"),
    ({"seed": 2**63 - 2, "n": 3}, "seed", f"at most {2**63 - 3} for n 3"),
    ({"extra_args": {"latents": 1}}, "extra_args.latents", "reserved"),
]


@pytest.mark.parametrize(("presets", "key", "words"), PRESETS_OVER_A_LIMIT)
def test_a_preset_over_a_limit_is_told_by_its_key_path_and_not_to_every_client(
    tmp_path: Path, presets: dict[str, Any], key: str, words: str
) -> None:
    path = tmp_path / "stage.yaml"
    stage = {"stage_id": 0, "stage_type": "diffusion", "default_sampling_params": presets}
    path.write_text(yaml.safe_dump({"stages": [stage | {"engine_args": {"engine": "simulated"}}]}))
    given = {"stage_configs_path": str(path), "max_num_inference_steps": "20" if "20," in words else None}
    with pytest.raises(ConfigError) as caught:
        plan(read_settings(given, {}), refuse_unavailable=False)
    assert str(caught.value).startswith(f"{path}: stages[0].default_sampling_params.{key}: ")
    assert words in str(caught.value)


def test_a_plan_keeps_the_presets_that_it_has_checked(tmp_path: Path) -> None:
    path = tmp_path / "stage.yaml"
    presets = {"num_inference_steps": 1000, "seconds": 16.25, "fps": 16, "seed": 2**63 - 2, "n": 2}
    stage = {"stage_id": 0, "stage_type": "diffusion", "default_sampling_params": presets}
    path.write_text(yaml.safe_dump({"stages": [stage | {"engine_args": {"engine": "simulated"}}]}))
    assert plan(ServeSettings(stage_configs_path=str(path))).defaults == SamplingDefaults(**presets)
    assert plan(ServeSettings()).defaults == SamplingDefaults()


def test_a_value_from_the_environment_is_called_by_its_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^TRIPTYCH_MODEL: not a model"):
        plan(read_settings({}, {"TRIPTYCH_MODEL": "nonsense"}))
    path = write(tmp_path, engine="simulated", runtime={"num_replicas": 2, "devices": "a,b"})
    with pytest.raises(ConfigError, match=r"runtime.devices: 3 replica\(s\) \(from TRIPTYCH_NUM_REPLICAS\) x"):
        plan(read_settings({"stage_configs_path": path}, {"TRIPTYCH_NUM_REPLICAS": "3"}))
    with pytest.raises(ConfigError, match=r"^TRIPTYCH_DEVICES: "):
        plan(read_settings({"stage_configs_path": path}, {"TRIPTYCH_DEVICES": "a"}))
    (warning,) = plan(read_settings({}, {"TRIPTYCH_HOST": "0.0.0.0"})).warnings
    assert warning.startswith("TRIPTYCH_HOST 0.0.0.0: no API key is set")


def test_names_in_the_configuration_are_those_of_the_registries(
    tmp_path: Path, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.engine.registry.entry_points", lambda **_: ())
    assert set(BUILTIN_ENGINES) == set(engine_names())
    assert ENGINE_GROUP == ENTRY_POINT_GROUP
    assert set(POLICIES) <= set(ROUTING_POLICIES)
    for name in ROUTING_POLICIES:
        settings = ServeSettings(stage_configs_path=write(tmp_path, runtime={"routing": name}, model=str(pipeline)))
        refused = [warning for warning in plan(settings, refuse_unavailable=False).warnings if "routing" in warning]
        assert bool(refused) == (name not in POLICIES)


def test_executors_are_the_same_in_file_and_flag() -> None:
    in_file = get_args(RuntimeConfig.model_fields["executor"].annotation)
    in_flag = get_args(get_args(ServeSettings.model_fields["executor"].annotation)[0])
    assert in_file == in_flag
