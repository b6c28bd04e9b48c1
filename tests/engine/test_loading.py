"""Model folders good and bad: one readable line for each thing that can be wrong."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import diffusers
    import torch

    from tiny.engine_run import EngineRun, spec_of
    from triptych.engine.diffusers_engine import DiffusersEngine
    from triptych.engine.loading import check_guiders

from triptych.engine.base import EngineStartError

pytestmark = pytest.mark.filterwarnings("ignore")


def start_error(model: Path | str, **engine_args: Any) -> str:
    with pytest.raises(EngineStartError) as caught:
        DiffusersEngine(spec_of(model, **engine_args), lambda message, frames: None).load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def sd15(model_path: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(model_path("sd15"), tmp_path / "sd15"))


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    message = start_error("nobody/has-this")
    assert "'nobody/has-this' is neither a folder nor in the Hugging Face cache" in message
    assert "holds no model_index.json" in start_error(tmp_path)


def test_broken_weights_are_named(sd15: Path) -> None:
    weights = sd15 / "unet/diffusion_pytorch_model.safetensors"
    weights.write_bytes(b"\xff" * 100)
    assert str(weights) in start_error(sd15)
    weights.unlink()
    message = start_error(sd15)
    assert str(sd15) in message
    assert "cannot be loaded: OSError" in message


def test_code_in_a_model_folder_is_not_run(sd15: Path) -> None:
    index = json.loads((sd15 / "model_index.json").read_text())
    index["_class_name"] = ["evil", "EvilPipeline"]
    (sd15 / "model_index.json").write_text(json.dumps(index))
    (sd15 / "evil.py").write_text(f"open({str(sd15 / 'ran')!r}, 'w')")
    assert "cannot be loaded" in start_error(sd15)
    assert not (sd15 / "ran").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("{", "triptych.json: "),
        ('{"steps": 3}', "unknown field `steps`"),
        ('{"default_sampling_params": {"width": 0}}', "`int` >= 1 - at `$.default_sampling_params.width`"),
        ('{"call_args": {"latents": 1}}', "call_args.latents: 1 does not fit StableDiffusionPipeline"),
        ('{"call_args": {"eta": "x"}}', "call_args.eta: 'x' does not fit StableDiffusionPipeline"),
        ('{"sizes": [[64, 64]]}', "the default size 32x32 is not among `sizes`"),
    ],
)
def test_a_bad_settings_file_is_refused_with_its_path(sd15: Path, settings: str, said: str) -> None:
    (sd15 / "triptych.json").write_text(settings)
    message = start_error(sd15)
    assert "triptych.json" in message
    assert said in message


def test_the_settings_file_overlays_defaults_and_closes_its_arguments_to_requests(sd15: Path) -> None:
    settings = {
        "default_sampling_params": {"width": 16, "height": 24, "num_inference_steps": 3, "guidance_scale": 1.0},
        "call_args": {"guidance_rescale": 0.7},
        "sizes": [[16, 24], [32, 32]],
    }
    (sd15 / "triptych.json").write_text(json.dumps(settings))
    run = EngineRun(sd15)
    info = run.info
    assert (info.default_width, info.default_height, info.default_num_inference_steps) == (16, 24, 3)
    assert info.sizes == ((16, 24), (32, 32))
    assert "guidance_rescale" not in info.extra_parameters
    unit = run.unit(width=None, height=None, num_inference_steps=None)
    run.bytes_of(unit)
    end: Any = run.end_of(unit.address)
    assert (end.width, end.height, end.steps) == (16, 24, 3)


@pytest.mark.parametrize(
    ("stored", "served"), [("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "float32")]
)
def test_on_cpu_the_dtype_is_that_on_disk_if_the_processor_computes_in_it(
    sd15: Path, tmp_path: Path, stored: str, served: str
) -> None:
    pipe = diffusers.DiffusionPipeline.from_pretrained(sd15, dtype=getattr(torch, stored))
    pipe.save_pretrained(tmp_path / "stored")
    run = EngineRun(tmp_path / "stored")
    assert {module.dtype for module in (run.engine._pipe.unet, run.engine._pipe.text_encoder)} == {
        getattr(torch, served)
    }


def test_an_explicit_dtype_wins(sd15: Path) -> None:
    assert EngineRun(sd15, engine_args={"dtype": "bfloat16"}).engine._pipe.unet.dtype == torch.bfloat16


def test_a_failing_warm_up_is_a_start_error_that_says_how_to_go_without(
    sd15: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such kernel\nsecond line")

    monkeypatch.setattr(diffusers.PNDMScheduler, "scale_model_input", broken)
    message = start_error(sd15)
    assert "the warm-up at 32x32 failed: RuntimeError: no such kernel; `warmup: false` starts without" in message
    EngineRun(sd15, engine_args={"warmup": False})


def test_perturbed_attention_guidance_is_refused() -> None:
    pipe = diffusers.StableDiffusionPAGPipeline.__new__(diffusers.StableDiffusionPAGPipeline)
    with pytest.raises(EngineStartError, match=r"StableDiffusionPAGPipeline changes .* not available in"):
        check_guiders(pipe)


def test_a_guider_that_changes_the_model_for_single_forwards_is_refused() -> None:
    check_guiders(SimpleNamespace(components={"guider": diffusers.ClassifierFreeGuidance(), "vae": None}))
    skipping = diffusers.SkipLayerGuidance(skip_layer_guidance_layers=[0])
    with pytest.raises(EngineStartError, match=r"guider \(SkipLayerGuidance\) changes the model .* not available in"):
        check_guiders(SimpleNamespace(components={"guider": skipping}))
