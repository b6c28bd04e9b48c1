"""Input pictures and masks through the engine, against plain diffusers called with the same ones."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # other people's deprecations
    import torch
    from diffusers import (
        AutoPipelineForImage2Image,
        AutoPipelineForInpainting,
        DiffusionPipeline,
        FluxKontextPipeline,
        LTXImageToVideoPipeline,
    )

    from tiny.engine_run import PROMPT, EngineRun, decoded

from triptych.errors import ErrorCode
from triptych.media.video import encode_mp4
from triptych.messages import Failure, MediaInput, Output

pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = ["sd15", "flux", "qwen", "zimage"]
RunOf = Callable[..., EngineRun]
PathOf = Callable[[str], Path]


def noise(width: int, height: int, *, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def left_half(width: int, height: int) -> Image.Image:
    mask = Image.new("L", (width, height), 0)
    mask.paste(255, (0, 0, width // 2, height))
    return mask


def inputs_of(*images: Image.Image) -> tuple[tuple[MediaInput, ...], tuple[bytes, ...]]:
    """What travels to the engine; a picture of mode L is the mask."""
    inputs = tuple(
        MediaInput("mask" if image.mode == "L" else "image", image.mode, image.width, image.height, number)  # type: ignore[arg-type]
        for number, image in enumerate(images)
    )
    return inputs, tuple(image.tobytes() for image in images)


def made_of(run: EngineRun, *images: Image.Image, **params: Any) -> np.ndarray[Any, Any]:
    inputs, frames = inputs_of(*images)
    (data,) = run.bytes_of(run.unit(inputs=inputs, **params), frames=frames)
    return decoded(data)


def by_hand(pipe: Any, size: tuple[int, int], **arguments: Any) -> np.ndarray[Any, Any]:
    """What plain diffusers makes with the arguments of `EngineRun.unit`."""
    pipe.set_progress_bar_config(disable=True)
    if "width" in inspect.signature(type(pipe).__call__).parameters:
        arguments |= {"width": size[0], "height": size[1]}
    seeded = torch.Generator("cpu").manual_seed(5)
    return np.asarray(pipe(prompt=PROMPT, num_inference_steps=4, generator=seeded, **arguments).images[0])


def size_of(run: EngineRun) -> tuple[int, int]:
    return 2 * run.info.size_multiple, 3 * run.info.size_multiple


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_is_redrawn_as_by_the_image_to_image_class_of_the_family(
    family: str, engine_run: RunOf, model_path: PathOf
) -> None:
    run = engine_run(family)
    width, height = size_of(run)
    picture = noise(width, height)
    expected = by_hand(
        AutoPipelineForImage2Image.from_pretrained(model_path(family)), (width, height), image=picture, strength=0.5
    )
    made = made_of(run, picture, width=width, height=height, strength=0.5)
    np.testing.assert_array_equal(made, expected)
    assert not np.array_equal(
        made, made_of(run, noise(width, height, seed=1), width=width, height=height, strength=0.5)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_is_filled_as_by_the_inpainting_class_of_the_family(
    family: str, engine_run: RunOf, model_path: PathOf
) -> None:
    run = engine_run(family)
    width, height = size_of(run)
    picture, mask = noise(width, height), left_half(width, height)
    pipe = AutoPipelineForInpainting.from_pretrained(model_path(family))
    expected = by_hand(pipe, (width, height), image=picture, mask_image=mask, strength=0.75)
    made = made_of(run, picture, mask, width=width, height=height, strength=0.75)
    np.testing.assert_array_equal(made, expected)
    assert not np.array_equal(made, made_of(run, picture, width=width, height=height, strength=0.75))


@pytest.mark.parametrize("family", ["sd15", "qwen"])
def test_pictures_of_another_size_are_scaled_to_the_output(family: str, engine_run: RunOf) -> None:
    run = engine_run(family)
    width, height = size_of(run)
    picture, mask = noise(50, 40), left_half(50, 40)
    scaled = [image.resize((width, height), Image.Resampling.LANCZOS) for image in (picture, mask)]
    made = made_of(run, picture, mask, width=width, height=height)
    assert made.shape == (height, width, 3)
    np.testing.assert_array_equal(made, made_of(run, *scaled, width=width, height=height))


def test_pictures_leave_calls_with_a_prompt_alone_as_they_were(engine_run: RunOf) -> None:
    run = engine_run("sd15")
    before = run.bytes_of(run.unit())
    made_of(run, noise(16, 16), width=16, height=16)
    made_of(run, noise(16, 16), left_half(16, 16), width=16, height=16)
    assert run.bytes_of(run.unit()) == before


def test_units_with_and_without_pictures_side_by_side_share_forwards_and_draw_what_each_draws_alone(
    engine_run: RunOf,
) -> None:
    run = engine_run("sd15", slots=8)
    inputs, frames = inputs_of(noise(16, 16), left_half(16, 16))
    units = [
        run.unit(0),
        run.unit(1, inputs=inputs[:1], strength=0.75, seed=6),
        run.unit(2, inputs=inputs, strength=0.75, seed=7),
    ]
    alone = run.bytes_of(*(msgspec.structs.replace(unit, alone=True) for unit in units), frames=frames)
    together = run.bytes_of(*units, frames=frames)
    for one, other in zip(alone, together, strict=True):
        assert np.abs(decoded(one).astype(int) - decoded(other)).max() <= 1
    assert len(set(alone)) == 3
    assert min(run.end_of(unit.address).batch_size_mean for unit in units) > 1  # type: ignore[union-attr]


def test_siblings_share_the_weights_of_the_loaded_pipeline(engine_run: RunOf) -> None:
    modes = engine_run("sd15").engine._modes
    picture, mask = (modes.of(inputs_of(*images)[0]) for images in ([noise(8, 8)], [noise(8, 8), left_half(8, 8)]))
    names = [type(mode.pipe).__name__ for mode in (picture, mask)]
    assert names == ["StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"]
    for name in ("unet", "vae", "text_encoder"):
        assert getattr(picture.pipe, name) is getattr(mask.pipe, name) is getattr(modes.loaded.pipe, name)
    assert picture.pipe.scheduler is not modes.loaded.pipe.scheduler


@pytest.mark.parametrize("family", FAMILIES)
def test_model_info_tells_the_parameters_of_each_mode(family: str, engine_run: RunOf) -> None:
    info = engine_run(family).info
    assert not info.needs_image
    assert "strength" not in info.parameters
    for call in (info.image, info.mask):
        assert call is not None
        assert {"prompt", "seed", "width", "height", "num_inference_steps", "strength"} <= set(call.parameters)
        assert call.pipeline != info.pipeline
        assert (call.kind, call.max_images, call.image, call.mask) == ("image", 1, None, None)
        assert (call.default_width, call.default_height) == (info.default_width, info.default_height)
        assert call.size_multiple % info.size_multiple == 0
        assert call.default_strength is not None
        assert not {name for name in call.extra_parameters if "mask_image" in name or name.startswith("image")}


@pytest.mark.parametrize("family", ["pixart", "wan", "shapes"])
def test_a_family_without_siblings_takes_no_pictures(family: str, engine_run: RunOf) -> None:
    run = engine_run(family)
    assert run.info.image is run.info.mask is None
    inputs, frames = inputs_of(noise(8, 8))
    (end,) = run.run(run.unit(inputs=inputs), frames=frames)
    assert isinstance(end, Failure)
    assert (end.code, end.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "image")
    assert end.message.endswith("takes no input pictures")


def test_a_clip_begins_with_the_picture_where_the_family_has_such_a_class(
    engine_run: RunOf, model_path: PathOf
) -> None:
    run = engine_run("ltx")
    assert run.info.image is not None
    assert (run.info.image.pipeline, run.info.mask) == ("LTXImageToVideoPipeline", None)
    picture = noise(32, 32)
    inputs, frames = inputs_of(picture)
    unit = run.unit(inputs=inputs)
    (data,) = run.bytes_of(unit, frames=frames)
    pipe = LTXImageToVideoPipeline.from_pretrained(model_path("ltx"))
    pipe.set_progress_bar_config(disable=True)
    clip = pipe(
        image=picture,
        prompt=PROMPT,
        width=32,
        height=32,
        num_frames=unit.params.num_frames,
        num_inference_steps=4,
        generator=torch.Generator("cpu").manual_seed(5),
    ).frames[0]
    assert data == encode_mp4(np.stack([np.asarray(frame) for frame in clip]), fps=25)


def test_an_edit_model_gets_the_picture_as_it_is_and_draws_the_size_that_was_asked_for(
    model_path: PathOf, tmp_path: Path
) -> None:
    flux = DiffusionPipeline.from_pretrained(model_path("flux"))
    FluxKontextPipeline(**flux.components).save_pretrained(tmp_path)
    run = EngineRun(tmp_path)
    call = run.info.image
    assert call is not None
    assert (call.pipeline, run.info.pipeline, run.info.mask) == ("FluxKontextPipeline", "FluxKontextPipeline", None)
    assert not run.info.needs_image, "Kontext draws from a prompt alone, too"
    assert "strength" not in call.parameters
    picture = noise(24, 16)
    own = {"_auto_resize": False}
    pipe = FluxKontextPipeline.from_pretrained(tmp_path)
    expected = by_hand(pipe, (16, 32), image=picture, max_area=16 * 32, **own)
    assert expected.shape == (32, 16, 3)
    np.testing.assert_array_equal(made_of(run, picture, width=16, height=32, extra_args=own), expected)
    (drawn,) = run.run(run.unit())
    assert isinstance(drawn, Output), drawn


def test_progress_of_a_redrawn_picture_counts_the_steps_that_run(engine_run: RunOf) -> None:
    run = engine_run("flux")
    inputs, frames = inputs_of(noise(16, 16))
    unit = run.unit(inputs=inputs, width=16, height=16, num_inference_steps=8, strength=0.5)
    (output,) = run.run(unit, frames=frames)
    assert isinstance(output, Output), output
    assert output.steps == 4
    assert run.progress(unit.address)[-1].step == 4
