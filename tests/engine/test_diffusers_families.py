"""Every supported family through the engine, against the same pipeline called by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # other people's deprecations
    import torch
    from diffusers import DiffusionPipeline

    from tiny.engine_run import PROMPT, EngineRun, decoded
    from tiny.pipelines import FAMILIES

from triptych.media.video import encode_mp4
from triptych.messages import Abort, Aborted, Output, Progress

pytestmark = pytest.mark.filterwarnings("ignore")

MODELS = [*FAMILIES, "shapes"]
RunOf = Callable[..., EngineRun]

# family: size multiple, default width and height, steps, frame multiple, frames, fps
DEFAULTS = {
    "qwen": (16, 1024, 1024, 50, 1, 1),
    "sd15": (8, 32, 32, 50, 1, 1),
    "sdxl": (8, 32, 32, 50, 1, 1),
    "sd3": (2, 64, 64, 28, 1, 1),
    "flux": (4, 256, 256, 28, 1, 1),
    "zimage": (4, 1024, 1024, 50, 1, 1),
    "pixart": (8, 32, 32, 20, 1, 1),
    "wan": (16, 832, 480, 50, 4, 81),
    "ltx": (32, 704, 512, 50, 4, 161),
    "shapes": (8, 64, 64, 20, 1, 1),
}


def by_hand(path: Path, name: str, run: EngineRun) -> bytes | np.ndarray[Any, Any]:
    """What plain diffusers makes of the small unit: pixels, or for clips the MP4 of its frames."""
    pipe = DiffusionPipeline.from_pretrained(path)
    pipe.set_progress_bar_config(disable=True)
    params = run.unit().params
    arguments: dict[str, Any] = {"num_frames": params.num_frames} if params.num_frames else {}
    if name in ("pixart", "shapes"):
        arguments["use_resolution_binning"] = False
    if name == "shapes":
        arguments["guidance_scale"] = 3.0
    output = pipe(
        PROMPT,
        width=params.width,
        height=params.height,
        num_inference_steps=params.num_inference_steps,
        generator=torch.Generator("cpu").manual_seed(params.seed),
        output_type="pil",
        **arguments,
    )
    if run.info.kind == "image":
        return np.asarray(output.images[0])
    frames = np.stack([np.asarray(frame) for frame in output.frames[0]])
    return encode_mp4(frames, fps=run.info.default_fps)


@pytest.mark.parametrize("name", MODELS)
def test_engine_output_is_bit_for_bit_that_of_plain_diffusers_and_so_is_a_repeat(
    name: str, engine_run: RunOf, model_path: Callable[[str], Path]
) -> None:
    run = engine_run(name)
    expected = by_hand(model_path(name), name, run)
    first, again = run.bytes_of(run.unit(0), run.unit(1))
    assert first == again
    if isinstance(expected, bytes):
        assert first == expected
    else:
        np.testing.assert_array_equal(decoded(first), expected)


@pytest.mark.parametrize("name", MODELS)
def test_abort_takes_effect_before_the_next_forward_and_leaves_the_pipeline_clean(name: str, engine_run: RunOf) -> None:
    run = engine_run(name)
    unit = run.unit()
    before = run.bytes_of(unit)
    forwards_at_abort: list[int] = []

    def abort_in_second_step(message: object) -> None:
        if isinstance(message, Progress) and message.phase == "step" and not forwards_at_abort:
            forwards_at_abort.append(run.engine.heartbeat()[0])
            run.engine.abort(Abort(unit.address))

    run.on_message = abort_in_second_step
    try:
        (end,) = run.run(unit)
    finally:
        run.on_message = None
    assert isinstance(end, Aborted)
    assert run.engine.heartbeat() == (forwards_at_abort[0], "idle")
    assert run.bytes_of(unit) == before


@pytest.mark.parametrize("name", MODELS)
def test_model_info_names_the_defaults_of_the_family(name: str, engine_run: RunOf) -> None:
    info = engine_run(name).info
    found = (info.size_multiple, info.default_width, info.default_height, info.default_num_inference_steps)
    assert (*found, info.frame_multiple, info.default_num_frames) == DEFAULTS[name]
    assert info.kind == ("video" if name in ("wan", "ltx") else "image")
    assert info.default_fps == (25 if name == "ltx" else 16)
    assert {"prompt", "seed", "width", "height", "negative_prompt", "num_inference_steps"} <= set(info.parameters)
    assert ("true_cfg_scale" in info.parameters) == (name in ("qwen", "flux"))
    assert info.sizes == (((64, 64),) if name == "shapes" else ())
    # One divides by the steps less one, the other takes a step's second result; both only when there is one step.
    assert info.min_num_inference_steps == (2 if name in ("qwen", "pixart") else 1)
    forbidden = {"generator", "output_type", "return_dict", "num_images_per_prompt", "num_videos_per_prompt", "latents"}
    assert not forbidden & set(info.extra_parameters)


@pytest.mark.parametrize("name", FAMILIES)
def test_odd_multiples_of_the_announced_size_and_frame_count_are_made_exactly(name: str, engine_run: RunOf) -> None:
    run = engine_run(name)
    side = run.info.size_multiple
    frames = run.info.frame_multiple * 2 + 1 if run.info.kind == "video" else None
    for width, height in ((side, 3 * side), (3 * side, side)):
        (output,) = run.run(run.unit(width=width, height=height, num_frames=frames, num_inference_steps=2))
        assert isinstance(output, Output), output
        assert (output.width, output.height, output.num_frames) == (width, height, frames or 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_half_of_the_announced_size_multiple_is_not_enough(name: str, engine_run: RunOf) -> None:
    run = engine_run(name)
    side = run.info.size_multiple * 3 // 2
    if name == "sd3":
        side = 3  # its multiple is 2
    (end,) = run.run(run.unit(width=side, height=side, num_inference_steps=2))
    assert not isinstance(end, Output)


@pytest.mark.parametrize("name", MODELS)
def test_progress_counts_from_nought_to_the_steps_that_were_asked_for(name: str, engine_run: RunOf) -> None:
    run = engine_run(name)
    unit = run.unit(num_inference_steps=6)
    (output,) = run.run(unit)
    progress = run.progress(unit.address)
    assert (progress[0].step, progress[0].steps, progress[0].phase) == (0, 6, "encode")
    steps = [message.step for message in progress]
    assert steps == sorted(steps)
    assert steps[-1] == 6
    assert {message.steps for message in progress} == {6}
    phases = list(dict.fromkeys(message.phase for message in progress))
    assert phases == (["encode", "step"] if name == "shapes" else ["encode", "step", "decode"])
    assert isinstance(output, Output)
    assert output.steps == 6
    assert output.inference_s > 0
    assert output.peak_memory_mb > 100
