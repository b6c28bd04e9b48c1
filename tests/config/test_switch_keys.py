"""diffusers' switches in the stage file: names, options and combinations, all told without torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from triptych.config import switches
from triptych.config.combinations import check_combinations
from triptych.config.switches import NamedSwitch, warm_up_shapes
from triptych.config.tree import EngineArgs
from triptych.errors import ConfigError


def engine_args(tmp_path: Path, **values: Any) -> EngineArgs:
    """As a stage file holds them."""
    import yaml

    from triptych.config.stage_file import read_stage_file

    path = tmp_path / "stage.yaml"
    path.write_text(yaml.safe_dump({"stages": [{"stage_id": 0, "stage_type": "diffusion", "engine_args": values}]}))
    return read_stage_file(path).stages[0].engine_args


@pytest.mark.parametrize(
    ("key", "value", "effective"),
    [
        ("compile", True, {"scope": "blocks", "mode": "default", "fullgraph": False, "dynamic": None}),
        ("compile", {"scope": "model", "dynamic": True}, {"scope": "model", "dynamic": True}),
        ("quantization", "layerwise_casting", {"name": "layerwise_casting", "options": {}, "components": None}),
        ("cache", "first_block_cache", {"name": "first_block_cache", "options": {}}),
        ("cache", {"name": "first_block_cache", "options": {"threshold": 0.1}}, {"options": {"threshold": 0.1}}),
        ("offload", {"name": "group", "options": {"offload_type": "leaf_level"}}, {"name": "group"}),
    ],
)
def test_a_switch_is_a_name_or_a_mapping(tmp_path: Path, key: str, value: object, effective: dict[str, Any]) -> None:
    found = getattr(engine_args(tmp_path, **{key: value}), key).model_dump()
    assert effective.items() <= found.items()


@pytest.mark.parametrize("key", ["compile", "quantization", "cache", "offload"])
@pytest.mark.parametrize("value", [None, False, "none", "off"])
def test_every_switch_has_words_for_off(tmp_path: Path, key: str, value: object) -> None:
    assert getattr(engine_args(tmp_path, **{key: value}), key) is None


def test_a_stage_that_was_printed_is_read_to_the_same_effect(tmp_path: Path) -> None:
    args = engine_args(
        tmp_path,
        compile={"mode": "reduce-overhead"},
        quantization={"name": "torchao", "components": ["unet"], "options": {"quant_type": "Int8WeightOnlyConfig"}},
        cache={"name": "mag_cache", "options": {"mag_ratios": [1, 0.9]}},
        warmup=["64x64", "64x64x5"],
    )
    assert engine_args(tmp_path, **args.model_dump(mode="json", exclude_none=True, exclude={"simulated"})) == args
    assert EngineArgs.model_validate(args.model_dump(mode="json", exclude_unset=True), strict=False) == args
    assert warm_up_shapes(args.warmup) == ((64, 64, None), (64, 64, 5))


WRONG: list[tuple[str, Any, str]] = [
    ("compile", {"mod": "x"}, r"compile.mod: unknown key; .*wanted `mode`\?"),
    ("compile", "fast", "compile: wrong type; found 'fast'; wanted a mapping"),
    ("compile", {"scope": "model", "mode": "max-autotune"}, "compile: mode max-autotune reuses .*wanted scope: blocks"),
    ("attention_backend", "flsh", "attention_backend: unknown attention backend 'flsh'; .*wanted one of native, flex"),
    ("attention_backend", "flash_hub", "attention_backend: unknown attention backend 'flash_hub'"),
    ("quantization", "fp8", "quantization: unknown name 'fp8'; .*wanted one of layerwise_casting, bitsandbytes_4bit"),
    ("quantization", "torchao", "quantization: options.quant_type: required key is missing"),
    ("quantization", {"options": {}}, "quantization.name: required key is missing"),
    (
        "quantization",
        {"name": "layerwise_casting", "options": {"dtype": "x"}},
        "quantization: options.dtype: unknown option",
    ),
    (
        "cache",
        {"name": "first_block_cache", "options": {"threshold": 0}},
        "cache: options.threshold: out of range",
    ),
    ("cache", "mag_cache", "cache: options.mag_ratios: required key is missing"),
    ("offload", "disk", "offload: unknown name 'disk'; .*wanted one of model, group, sequential"),
    ("warmup", ["512"], "warmup: not a shape: '512'; .*wanted true, false, or a list of \"WIDTHxHEIGHT\""),
    ("warmup", "yes", "warmup: wrong type; found 'yes'"),
    ("warmup", [], "warmup: wrong type"),
    ("lora_modules", {"a": 1}, "lora_modules.a: wrong type"),
]


@pytest.mark.parametrize(("key", "value", "words"), WRONG)
def test_what_is_wrong_is_told_with_key_value_and_what_would_be_right(
    tmp_path: Path, key: str, value: object, words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"stages\[0\].engine_args.{words}"):
        engine_args(tmp_path, **{key: value})


CLASHES: list[tuple[dict[str, Any], str, str]] = [
    ({"cache": "first_block_cache", "max_num_seqs": 2}, "cuda", "cache: a step cache keeps the state of one request"),
    ({"offload": "model", "max_num_seqs": 2}, "cuda", "offload: requests that take turns need all models at once"),
    ({"quantization": "bitsandbytes_4bit"}, "cpu", "quantization: needs accelerators, and replicas run on CPUs here"),
    ({"offload": "group"}, "cpu", "offload: replicas run on CPUs here"),
    ({"offload": "sequential"}, "cpu", "offload: replicas run on CPUs here"),
    ({"compile": True, "lora_modules": {"a": "a"}}, "cuda", "compile: the model would be compiled anew"),
    (
        {"compile": {"mode": "max-autotune"}, "deterministic": True},
        "cuda",
        "compile: replicas would choose",
    ),
    (
        {"parallel_config": {"ring_degree": 2}},
        "cpu",
        "parallel_config.ring_degree: needs accelerators; .*cfg_",
    ),
    (
        {"parallel_config": {"tensor_parallel_size": 2}},
        "cpu",
        "parallel_config.tensor_parallel_size: needs",
    ),
    (
        {"parallel_config": {"world_size": 2}, "cache": "first_block_cache"},
        "cpu",
        "cache: not with 2 devices",
    ),
    ({"parallel_config": {"world_size": 2}, "offload": "group"}, "cuda", "offload: not with 2 devices per replica"),
    ({"lora_modules": {"a": "/nowhere"}}, "cpu", "lora_modules: a: no such file or folder; found '/nowhere'"),
]


@pytest.mark.parametrize(("values", "kind", "words"), CLASHES)
def test_switches_that_exclude_each_other_are_told_before_anything_loads(
    tmp_path: Path, values: dict[str, Any], kind: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"^engine_args.{words}"):
        check_combinations(engine_args(tmp_path, **values), kind=kind, origin=str)


@pytest.mark.parametrize(
    "values",
    [
        {"cache": "first_block_cache"},
        {"offload": "group", "max_num_seqs": 2},
        {"offload": "sequential", "max_num_seqs": 2},
        {"compile": {"mode": "max-autotune"}},
        {"compile": True, "deterministic": True},
        {"parallel_config": {"world_size": 2}, "max_num_seqs": 4},
        {"parallel_config": {"world_size": 2, "tensor_parallel_size": 2}},
    ],
)
def test_switches_that_go_together_are_accepted(tmp_path: Path, values: dict[str, Any]) -> None:
    check_combinations(engine_args(tmp_path, **values), kind="cuda", origin=str)


def test_a_package_that_is_missing_is_told_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    args = engine_args(tmp_path, quantization="bitsandbytes_8bit")
    with pytest.raises(ConfigError, match=r"quantization: the package bitsandbytes is not installed"):
        check_combinations(args, kind="cuda", origin=str)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: sys)
    check_combinations(args, kind="cuda", origin=str)


def test_a_folder_means_the_one_lora_in_it(tmp_path: Path) -> None:
    from triptych.config.lora import lora_file

    one = tmp_path / "x.safetensors"
    one.write_bytes(b"")
    assert lora_file(str(tmp_path), where="a") == lora_file(str(one), where="a") == one
    (tmp_path / "y.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^a: 2 .safetensors files are there; found 'x.safetensors, y.safetensors'"):
        lora_file(str(tmp_path), where="a")
    (tmp_path / "pytorch_lora_weights.safetensors").write_bytes(b"")
    assert lora_file(str(tmp_path), where="a").name == "pytorch_lora_weights.safetensors"
    (tmp_path / "z.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^a: not a safetensors file"):
        lora_file(str(tmp_path / "z.bin"), where="a")


def test_every_named_switch_says_which_names_it_knows() -> None:
    kinds = [kind for kind in vars(switches).values() if isinstance(kind, type) and issubclass(kind, NamedSwitch)]
    assert sum(bool(getattr(kind, "kinds", None)) for kind in kinds) == 3
