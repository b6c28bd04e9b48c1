"""What one request may ask for at most: limits of the operator, of the output formats, and of the seeds."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.config.limits import LARGEST_SIDE, Limits, check_timeout
from triptych.config.parameters import build_request, check_without_model, parse_parameters, validate_defaults
from triptych.errors import ErrorCode, TriptychError
from triptych.media.codecs import CODECS
from triptych.messages import GenerationRequest, ModelInfo, OutputSpec

LIMITS = Limits(max_pixels=512 * 512, max_num_frames=81, max_num_inference_steps=100, request_timeout_s=60)


def build(fields: dict[str, Any], *, info: ModelInfo, defaults: dict[str, Any] | None = None) -> GenerationRequest:
    return build_request(
        parse_parameters({"prompt": "a cat"} | fields),
        model="m",
        info=info,
        defaults=validate_defaults(defaults or {}, where="d"),
        limits=LIMITS,
    )


def refusal(fields: dict[str, Any], *, info: ModelInfo, defaults: dict[str, Any] | None = None) -> TriptychError:
    with pytest.raises(TriptychError) as caught:
        build(fields, info=info, defaults=defaults)
    return caught.value


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.filterwarnings("ignore")
def test_the_largest_side_of_a_format_is_that_of_its_encoder(name: str) -> None:
    largest = LARGEST_SIDE.get(name)
    lead = (1,) if CODECS[name].kind == "video" else ()
    for side in (largest or 70_000, (largest or 70_000) + 2):
        for shape in ((*lead, side, 16, 3), (*lead, 16, side, 3)):
            pixels = np.zeros(shape, np.uint8)
            if largest is None or side <= largest:
                assert CODECS[name].encode(pixels, 16, None)
            else:
                with pytest.raises((ValueError, OSError, av.FFmpegError)):
                    CODECS[name].encode(pixels, 16, None)


def test_formats_with_a_largest_side_are_formats() -> None:
    assert set(LARGEST_SIDE) < set(CODECS) == set(get_args(get_type_hints(OutputSpec)["format"]))


@pytest.mark.parametrize(("output_format", "limit"), [("webp", 16383), ("jpeg", 65500)])
@pytest.mark.parametrize("fields", [{"size": "66000x1"}, {"width": 66000, "height": 1}, {"width": 1, "height": 66000}])
def test_a_side_that_the_format_cannot_have_is_refused(output_format: str, limit: int, fields: dict[str, Any]) -> None:
    info = ModelInfo(pipeline="P", kind="image", parameters=("width", "height"), size_multiple=1)
    assert build(fields, info=info).output.format == "png"
    error = refusal(fields | {"output_format": output_format}, info=info)
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, next(iter(fields)))
    assert f"at most {limit} pixels a side for {output_format}, got 66000" in error.message
    preset = refusal(fields, info=info, defaults={"output_format": output_format})
    assert preset.message == error.message
    within = fields | {"size": None, "width": limit, "height": 1, "output_format": output_format}
    assert build(within, info=info).params.width == limit


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_args": {"latents": 1}}, "extra_args.latents"),
        ({"n": 1, "num_outputs_per_prompt": 2}, "num_outputs_per_prompt"),
        ({"seed": 2**63 - 1, "n": 2}, "seed"),
        ({"size": "1024x1024"}, "size"),
        ({"size": "64x64", "width": 32}, "width"),
        ({"height": 512 * 512 + 1}, "height"),
        ({"num_inference_steps": 101}, "num_inference_steps"),
        ({"num_frames": 82}, "num_frames"),
        ({"seconds": 98}, "seconds"),
        ({"seconds": 7, "fps": 16}, "seconds"),
    ],
)
def test_what_no_model_could_make_is_refused_without_one(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(TriptychError) as caught:
        check_without_model(parse_parameters({"prompt": "x"} | fields), LIMITS)
    assert caught.value.param == param


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "num_inference_steps": st.sampled_from([1, 100, 101]),
            "size": st.sampled_from(["16x16", "512x512", "512x528"]),
            "num_frames": st.sampled_from([77, 81, 85]),
            "seconds": st.floats(0.1, 20),
            "fps": st.integers(1, 30),
            "seed": st.sampled_from([0, 2**63 - 2, 2**63 - 1]),
            "n": st.integers(1, 3),
        },
    ),
    st.sampled_from([1, 4, 8]),
)
def test_what_a_model_would_take_is_never_refused_without_one(fields: dict[str, Any], multiple: int) -> None:
    info = ModelInfo(
        pipeline="P",
        kind="video",
        parameters=("width", "height", "num_inference_steps"),
        size_multiple=16,
        frame_multiple=multiple,
    )
    try:
        build(fields, info=info)
    except TriptychError:
        return
    check_without_model(parse_parameters({"prompt": "x"} | fields), LIMITS)


def test_a_timeout_is_checked_against_the_operators() -> None:
    check_timeout(60, LIMITS)
    with pytest.raises(TriptychError, match="timeout must be at most 60 seconds, got 61"):
        check_timeout(61, LIMITS)


def test_a_model_that_needs_two_steps_is_not_asked_for_one() -> None:
    info = ModelInfo(pipeline="P", kind="image", parameters=("num_inference_steps",), min_num_inference_steps=2)
    assert build({"num_inference_steps": 2}, info=info).params.num_inference_steps == 2
    error = refusal({"num_inference_steps": 1}, info=info)
    assert (error.status, error.param) == (400, "num_inference_steps")
    assert error.message == "num_inference_steps must be at least 2 with this model, got 1"
