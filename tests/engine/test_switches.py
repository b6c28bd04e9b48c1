"""diffusers' switches on tiny pipelines: each changes what it is for, and what cannot be had is a start error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from tiny.engine_run import EngineRun, decoded, spec_of
from triptych.config.switches import ATTENTION_BACKENDS, CacheConfig
from triptych.engine.base import EngineStartError
from triptych.engine.diffusers_engine import DiffusersEngine
from triptych.engine.switches import CACHES
from triptych.messages import Abort, Aborted, Progress

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers and transformers

ModelPath = Callable[[str], Path]

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def attention_backend_of_the_process() -> Iterator[None]:
    """diffusers sets it for the whole process."""
    before = _AttentionBackendRegistry.get_active_backend()[0]
    yield
    _AttentionBackendRegistry.set_active_backend(before)


def start_error(model: Path, **engine_args: Any) -> str:
    with pytest.raises(EngineStartError) as caught:
        DiffusersEngine(spec_of(model, **engine_args), lambda *_: None).load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def picture(run: EngineRun, **params: Any) -> np.ndarray[Any, Any]:
    return decoded(run.bytes_of(run.unit(**params))[0]).astype(int)


def test_vae_switches_reach_the_vae(model_path: ModelPath) -> None:
    vae = EngineRun(model_path("sd15"), engine_args={"vae_tiling": True, "vae_slicing": True}).engine._pipe.vae
    assert (vae.use_tiling, vae.use_slicing) == (True, True)
    assert "vae_tiling: PRXPixelPipeline has no VAE" in start_error(model_path("shapes"), vae_tiling=True)


def test_an_attention_backend_reaches_every_processor_and_draws_the_same(model_path: ModelPath) -> None:
    plain = picture(EngineRun(model_path("qwen")))
    run = EngineRun(model_path("qwen"), engine_args={"attention_backend": "_native_math"})
    backends = {processor._attention_backend for processor in run.engine._pipe.transformer.attn_processors.values()}
    assert backends == {"_native_math"}
    assert abs(picture(run) - plain).max() <= 1


@pytest.mark.parametrize(
    ("family", "backend", "words"),
    [
        ("qwen", "_native_cudnn", "attention_backend: '_native_cudnn' cannot be had here: "),
        ("qwen", "sage", "attention_backend: 'sage' cannot be had here: "),
        ("sd15", "native", "attention_backend: unet (UNet2DConditionModel) has no attention that a backend could do"),
    ],
)
def test_an_attention_backend_that_cannot_be_had_is_a_start_error(
    family: str, backend: str, words: str, model_path: ModelPath
) -> None:
    assert words in start_error(model_path(family), attention_backend=backend, warmup=False)


@pytest.mark.parametrize(("family", "scope", "parts"), [("qwen", "blocks", 2), ("sd15", "model", 1)])
def test_the_denoiser_is_compiled_and_its_forwards_run_what_was_compiled(
    family: str, scope: str, parts: int, model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[dict[str, Any]] = []
    calls = 0

    def compile_nothing(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The real one takes half a minute here."""
        compiled.append(options)

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(torch, "compile", compile_nothing)
    run = EngineRun(model_path(family), engine_args={"compile": {"scope": scope, "mode": "max-autotune-no-cudagraphs"}})
    wanted = {"fullgraph": False, "dynamic": None, "backend": "inductor", "mode": "max-autotune-no-cudagraphs"}
    assert compiled == [wanted] * parts
    calls = 0
    run.bytes_of(run.unit(num_inference_steps=3))
    assert calls >= 3 * parts


def test_a_model_without_repeated_blocks_names_the_other_scope(model_path: ModelPath) -> None:
    message = start_error(model_path("pixart"), compile={})
    assert "compile: scope blocks of transformer (PixArtTransformer2DModel) cannot be had here" in message


def test_weights_are_stored_in_eight_bits(model_path: ModelPath) -> None:
    run = EngineRun(model_path("qwen"), engine_args={"quantization": {"name": "layerwise_casting"}})
    transformer = run.engine._pipe.transformer
    assert transformer.transformer_blocks[0].attn.to_q.weight.dtype == torch.float8_e4m3fn
    difference = abs(picture(run) - picture(EngineRun(model_path("qwen"))))
    assert 0 < difference.max() < 128


def test_a_component_that_is_not_there_is_told_with_those_that_are(model_path: ModelPath) -> None:
    wanted = {"name": "layerwise_casting", "components": ["unet"]}
    message = start_error(model_path("qwen"), quantization=wanted)
    assert "quantization: no component 'unet' in the model; it has scheduler, text_encoder, tokenizer" in message


CACHED: list[dict[str, Any]] = [
    {"name": "first_block_cache", "options": {"threshold": 10.0}},
    {"name": "taylorseer_cache", "options": {"cache_interval": 2, "disable_cache_before_step": 1}},
]


@pytest.mark.parametrize("cache", CACHED, ids=lambda cache: cache["name"])
def test_a_cache_saves_work_and_leaves_nothing_to_the_next_unit(
    cache: dict[str, Any], model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.engine.progress._INTERVAL_S", 0)  # every step is told
    run = EngineRun(model_path("qwen"), engine_args={"cache": cache})
    cached = run.bytes_of(run.unit())[0]
    assert cached != EngineRun(model_path("qwen")).bytes_of(run.unit())[0]
    stopped = run.unit(1, prompt="another", num_inference_steps=6)

    def abort_in_the_middle(message: object) -> None:
        if isinstance(message, Progress) and message.address == stopped.address and message.step == 2:
            run.engine.abort(Abort(stopped.address))

    run.on_message = abort_in_the_middle
    assert isinstance(run.run(stopped)[0], Aborted)
    run.on_message = None
    assert run.bytes_of(run.unit())[0] == cached


def test_a_cache_that_asks_for_the_timestep_gets_that_of_the_unit(model_path: ModelPath) -> None:
    options = {
        "spatial_attention_block_skip_range": 2,
        "cross_attention_block_skip_range": 2,
        "spatial_attention_timestep_skip_range": [0, 1000],
        "cross_attention_timestep_skip_range": [0, 1000],
    }
    cache = {"name": "pyramid_attention_broadcast", "options": options}
    run = EngineRun(model_path("wan"), engine_args={"cache": cache})
    plain = EngineRun(model_path("wan"))
    assert run.bytes_of(run.unit())[0] != plain.bytes_of(plain.unit())[0]


def test_a_cache_that_the_model_cannot_have_is_a_start_error(model_path: ModelPath) -> None:
    message = start_error(model_path("sd15"), cache={"name": "first_block_cache"}, warmup=False)
    assert "cache: first_block_cache of unet (UNet2DConditionModel): diffusers has no step caches for this" in message
    temporal = {"name": "pyramid_attention_broadcast", "options": {"temporal_attention_block_skip_range": 2}}
    message = start_error(model_path("qwen"), cache=temporal, warmup=False)
    assert "(QwenImageTransformer2DModel): none of its blocks takes this cache with these options" in message


@pytest.mark.parametrize("name", ["model", "group", "sequential"])
def test_offloaded_weights_keep_their_way_through_the_hub_from_unit_to_unit(
    name: str, model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloaded = accelerate.cpu_offload
    # accelerate stumbles over the device "cpu:0" that diffusers makes of every CPU.
    monkeypatch.setattr(accelerate, "cpu_offload", lambda model, device, **options: offloaded(model, CPU, **options))
    run = EngineRun(model_path("sd15"), engine_args={"offload": {"name": name}})
    plain = EngineRun(model_path("sd15")).bytes_of(run.unit())[0]
    for number in range(2):
        assert run.bytes_of(run.unit(number))[0] == plain
        assert run.progress(run.unit(number).address)[0].phase == "encode"
        assert run.end_of(run.unit(number).address).steps == 4  # type: ignore[union-attr]


def test_shapes_are_run_before_ready(model_path: ModelPath, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded_shapes: list[tuple[int, ...]] = []
    from diffusers import AutoencoderKL

    decode = AutoencoderKL.decode

    def watched(self: Any, z: Any, *args: Any, **kwargs: Any) -> Any:
        decoded_shapes.append(tuple(z.shape[-2:]))
        return decode(self, z, *args, **kwargs)

    monkeypatch.setattr(AutoencoderKL, "decode", watched)
    EngineRun(model_path("sd15"), engine_args={"warmup": ["48x32", "64x48"]})
    small, *named, in_one_step = decoded_shapes
    assert (named, in_one_step) == ([(16, 24), (24, 32)], small)


@pytest.mark.parametrize(
    ("family", "shape", "words"),
    [
        ("sd15", "33x32", "warmup: 33x32: width and height must be multiples of 8"),
        ("sd15", "32x32x5", "warmup: 32x32x5: StableDiffusionPipeline makes pictures; wanted WIDTHxHEIGHT"),
        ("wan", "32x32x4", "warmup: 32x32x4: frames must be 1 more than a multiple of 4"),
        ("shapes", "32x32", "warmup: 32x32: the model's sizes are 64x64"),
    ],
)
def test_a_shape_that_the_model_cannot_draw_is_a_start_error(
    family: str, shape: str, words: str, model_path: ModelPath
) -> None:
    assert words in start_error(model_path(family), warmup=[shape])


def test_attention_backends_are_those_of_diffusers_that_fetch_no_code() -> None:
    assert set(ATTENTION_BACKENDS) == {name.value for name in AttentionBackendName if "hub" not in name.value}


def test_options_of_caches_are_fields_of_their_configurations() -> None:
    assert set(CACHES) == set(CacheConfig.kinds)
    for name, kind in CacheConfig.kinds.items():
        assert set(kind.model_fields) <= {field.name for field in dataclasses.fields(CACHES[name])}, name
