"""What input pictures change in a request, and which are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from triptych.config.parameters import Limits, build_request, parse_parameters, validate_defaults
from triptych.errors import ErrorCode, TriptychError
from triptych.messages import GenerationRequest, MediaInput, ModelInfo

TEXT = ModelInfo(
    pipeline="TextPipeline",
    kind="image",
    parameters=("width", "height", "num_inference_steps"),
    size_multiple=16,
    default_width=64,
    default_height=32,
    default_num_inference_steps=10,
)
CALL = msgspec.structs.replace(
    TEXT, pipeline="PicturePipeline", parameters=(*TEXT.parameters, "strength"), default_strength=0.6
)
MODEL = msgspec.structs.replace(TEXT, image=CALL, mask=msgspec.structs.replace(CALL, pipeline="MaskPipeline"))
EDITOR = msgspec.structs.replace(
    TEXT, needs_image=True, image=msgspec.structs.replace(TEXT, pipeline="EditPipeline", max_images=3)
)
LIMITS = Limits(max_pixels=256 * 256, max_num_frames=81, max_num_inference_steps=100, request_timeout_s=60)


def picture(width: int = 100, height: int = 50, kind: Any = "image") -> MediaInput:
    return MediaInput(kind, "L" if kind == "mask" else "RGB", width, height, 0)


def request_of(
    *inputs: MediaInput, info: ModelInfo = MODEL, defaults: dict[str, Any] | None = None, **fields: Any
) -> GenerationRequest:
    return build_request(
        parse_parameters({"prompt": "x"} | fields),
        model="m",
        info=info,
        defaults=validate_defaults(defaults or {}, where="default_sampling_params"),
        limits=LIMITS,
        inputs=inputs,
        frames=(b"",) * len(inputs),
    )


def refusal(*inputs: MediaInput, **fields: Any) -> TriptychError:
    with pytest.raises(TriptychError) as caught:
        request_of(*inputs, **fields)
    return caught.value


def size_of(request: GenerationRequest) -> tuple[int | None, int | None]:
    return request.params.width, request.params.height


@pytest.mark.parametrize("said", [{}, {"size": "auto"}])
def test_the_output_is_as_large_as_the_first_picture_cut_to_the_multiple(said: dict[str, Any]) -> None:
    request = request_of(picture(100, 50), defaults={"size": "32x32"}, **said)
    assert size_of(request) == (96, 48)
    assert (len(request.inputs), len(request.frames)) == (1, 1)
    assert size_of(request_of(picture(3, 5))) == (16, 16)


def test_a_size_that_was_asked_for_is_kept() -> None:
    assert size_of(request_of(picture(), size="32x64")) == (32, 64)
    assert size_of(request_of(picture(), width=32)) == (32, 48)


def test_a_picture_over_the_limit_keeps_its_shape() -> None:
    assert size_of(request_of(picture(2000, 1000))) == (352, 176)


def test_of_the_sizes_that_a_model_draws_the_one_of_the_nearest_shape_is_taken() -> None:
    call = msgspec.structs.replace(CALL, sizes=((64, 64), (128, 64), (64, 128)))
    info = msgspec.structs.replace(MODEL, image=call)
    assert size_of(request_of(picture(300, 160), info=info)) == (128, 64)


def test_a_clip_has_the_shape_of_the_picture_and_the_pixels_the_model_likes() -> None:
    call = msgspec.structs.replace(CALL, kind="video", parameters=(*CALL.parameters, "num_frames"), default_width=128)
    request = request_of(picture(4000, 2000), info=msgspec.structs.replace(TEXT, kind="video", image=call))
    assert size_of(request) == (80, 32)


def test_pictures_and_masks_choose_the_parameters_they_are_checked_against() -> None:
    assert request_of(picture(), strength=0.5).params.strength == 0.5
    assert request_of(picture(), picture(kind="mask"), strength=0.5).params.strength == 0.5
    assert request_of(picture(), defaults={"strength": 0.3}).params.strength == 0.3
    assert request_of(defaults={"strength": 0.3}).params.strength is None
    error = refusal(strength=0.5)
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "strength")
    assert error.message == "strength is not supported by this model (TextPipeline) without an input picture"


@pytest.mark.parametrize(
    ("inputs", "info", "code", "param", "message"),
    [
        ([picture()], TEXT, ErrorCode.UNSUPPORTED_PARAMETER, "image", "TextPipeline takes no input pictures"),
        (
            [picture(), picture(kind="mask")],
            EDITOR,
            ErrorCode.UNSUPPORTED_PARAMETER,
            "mask",
            "TextPipeline takes input pictures, but no mask",
        ),
        (
            [picture(), picture()],
            MODEL,
            ErrorCode.INVALID_VALUE,
            "image",
            "PicturePipeline takes one input picture, got 2",
        ),
        (
            [picture()] * 4,
            EDITOR,
            ErrorCode.INVALID_VALUE,
            "image",
            "EditPipeline takes at most 3 input pictures, got 4",
        ),
        ([], EDITOR, ErrorCode.MISSING_PARAMETER, "image", "image is required: TextPipeline works on input pictures"),
        ([picture(kind="mask")], MODEL, ErrorCode.MISSING_PARAMETER, "image", "image is required beside a mask"),
        (
            [picture()],
            msgspec.structs.replace(MODEL, image=None),
            ErrorCode.MISSING_PARAMETER,
            "mask",
            "TextPipeline needs a mask beside the input picture",
        ),
        (
            [picture(100, 50), picture(50, 50, "mask")],
            MODEL,
            ErrorCode.INVALID_VALUE,
            "mask",
            "mask must be as large as the picture, 100x50, got 50x50",
        ),
    ],
)
def test_what_the_model_cannot_take_is_refused_in_words_of_what_it_can(
    inputs: list[MediaInput], info: ModelInfo, code: ErrorCode, param: str, message: str
) -> None:
    error = refusal(*inputs, info=info)
    assert (error.code, error.param, error.message) == (code, param, message)


def test_as_many_pictures_as_the_model_takes_are_accepted() -> None:
    assert len(request_of(*[picture()] * 3, info=EDITOR).inputs) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"strength": 0.05}, "strength"),
        ({"strength": 0}, "strength"),
        ({"strength": 0.5, "num_inference_steps": 1}, "strength"),
        ({"num_inference_steps": 1}, "num_inference_steps"),
    ],
)
def test_a_strength_that_leaves_no_step_is_refused(fields: dict[str, Any], param: str) -> None:
    error = refusal(picture(), **fields)
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, param)
    assert "their product must be at least 1" in error.message
    assert request_of(picture(), strength=0.1).params.strength == 0.1
