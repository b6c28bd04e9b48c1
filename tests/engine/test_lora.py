"""LoRAs in the engine: what they draw, what scale 0 draws, and that none reaches the next or the neighbouring unit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch

from tiny.engine_run import EngineRun, decoded, spec_of
from tiny.loras import save_lora
from triptych.engine.base import EngineStartError
from triptych.engine.diffusers_engine import DiffusersEngine
from triptych.errors import ErrorCode
from triptych.messages import Abort, Aborted, Failure, Generate, Lora, Progress

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers and transformers

PARTS = {
    "sd15": ("unet",),
    "flux": ("transformer",),
    "qwen": ("transformer",),
}


@pytest.fixture(scope="module")
def lora_run(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EngineRun]:
    """An engine of a family with the LoRAs `style/one` and `style.two`."""
    folder = tmp_path_factory.mktemp("loras")

    @functools.cache
    def run(family: str, slots: int = 1) -> EngineRun:
        model = model_path(family)
        paths = {
            name: str(save_lora(model, folder / f"{family}-{seed}.safetensors", seed=seed, parts=PARTS[family]))
            for seed, name in enumerate(("style/one", "style.two"), start=1)
        }
        return EngineRun(model, slots=slots, engine_args={"lora_modules": paths})

    return run


def units_of(run: EngineRun) -> list[Generate]:
    wanted = (None, Lora("style/one"), Lora("style.two"), Lora("style/one", 0.5), Lora("style/one", 0), None)
    return [run.unit(number, lora=lora) for number, lora in enumerate(wanted)]


@pytest.mark.parametrize("family", PARTS)
def test_each_lora_draws_its_own_picture_and_leaves_nothing_to_the_next_unit(
    family: str, lora_run: Callable[[str], EngineRun], model_path: Callable[[str], Path]
) -> None:
    run = lora_run(family)
    assert run.info.loras == ("style/one", "style.two")
    plain, one, two, half, none, again = (run.bytes_of(unit)[0] for unit in units_of(run))
    assert plain == none == again == EngineRun(model_path(family)).bytes_of(run.unit())[0]
    assert len({plain, one, two, half}) == 4


@pytest.mark.parametrize(("family", "scale"), [("qwen", 10.0), ("sd15", 1.0)])
def test_units_with_different_loras_side_by_side_draw_what_each_draws_alone(
    family: str, scale: float, lora_run: Callable[..., EngineRun]
) -> None:
    run = lora_run(family, slots=6)
    one, two, less = Lora("style/one", scale), Lora("style.two", scale), Lora("style/one", -scale)
    units = [run.unit(number, lora=lora) for number, lora in enumerate((None, one, two, less, None, None))]
    alone = [decoded(run.bytes_of(unit)[0]).astype(int) for unit in units]
    assert min(abs(one - other).max() for one, other in itertools.combinations(alone[:4], 2)) > 8
    together = [decoded(data).astype(int) for data in run.bytes_of(*units)]
    assert max(abs(one - other).max() for one, other in zip(alone, together, strict=True)) <= 1
    shares = [run.end_of(unit.address).batch_size_mean for unit in units]  # type: ignore[union-attr]
    assert shares[1:4] == [1.0] * 3, "units with different LoRAs, or scales, share no forward"
    assert min(shares[0], *shares[4:]) > 1, "those without share theirs"


def test_a_lora_draws_what_plain_diffusers_draws_with_it(
    lora_run: Callable[[str], EngineRun], model_path: Callable[[str], Path]
) -> None:
    run = lora_run("sd15")
    unit = run.unit(lora=Lora("style.two", 0.75))
    path = Path(run.engine_args["lora_modules"]["style.two"])
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(str(model_path("sd15")))
    pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="two")
    pipe.set_adapters(["two"], [0.75])
    generator = torch.Generator("cpu").manual_seed(unit.params.seed)
    wanted = pipe(
        unit.params.prompt, width=16, height=16, num_inference_steps=4, generator=generator, output_type="pt"
    ).images[0]
    drawn = torch.from_numpy(decoded(run.bytes_of(unit)[0]).copy()).permute(2, 0, 1) / 255
    assert (drawn - wanted).abs().max() <= 0.51 / 255


def test_an_aborted_unit_leaves_no_lora_behind(
    lora_run: Callable[[str], EngineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.engine.progress._INTERVAL_S", 0)  # every step is told
    run = lora_run("sd15")
    plain = run.bytes_of(run.unit())[0]
    styled = run.unit(1, lora=Lora("style/one"))

    def abort_in_the_middle(message: object) -> None:
        if isinstance(message, Progress) and message.address == styled.address and message.step == 2:
            run.engine.abort(Abort(styled.address))

    run.on_message = abort_in_the_middle
    assert isinstance(run.run(styled)[0], Aborted)
    run.on_message = None
    assert run.bytes_of(run.unit())[0] == plain


def test_a_name_that_is_not_registered_fails_its_unit_and_names_the_others(
    lora_run: Callable[[str], EngineRun],
) -> None:
    run = lora_run("sd15")
    (end,) = run.run(run.unit(lora=Lora("style")))
    assert isinstance(end, Failure)
    assert (end.code, end.param) == (ErrorCode.INVALID_VALUE, "lora.name")
    assert end.message == "lora.name must be one of style/one, style.two, got 'style'"


def start_error(model: Path, loras: dict[str, str]) -> str:
    with pytest.raises(EngineStartError) as caught:
        DiffusersEngine(spec_of(model, lora_modules=loras), lambda *_: None).load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_text_encoder_takes_part(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    model = model_path("sd15")
    path = save_lora(model, tmp_path / "encoder.safetensors", seed=1, parts=("text_encoder",))
    run = EngineRun(model, engine_args={"lora_modules": {"x": str(path)}})
    plain, styled, again = (run.bytes_of(run.unit(lora=lora))[0] for lora in (None, Lora("x"), None))
    assert plain == again != styled


def test_what_cannot_be_loaded_is_a_start_error_that_says_why(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    other = save_lora(model_path("flux"), tmp_path / "flux.safetensors", seed=1, parts=("transformer",))
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no tensors")
    refusals = {
        ("pixart", other): "lora_modules: x: diffusers loads no LoRA into PixArtAlphaPipeline",
        ("sd15", broken): f"lora_modules: x: {broken} cannot be loaded: ",
        ("sd15", other): f"lora_modules: x: {other} ",
        ("sd15", tmp_path / "missing"): "lora_modules: x: no such file or folder",
    }
    for (family, path), words in refusals.items():
        assert words in start_error(model_path(family), {"x": str(path)})
