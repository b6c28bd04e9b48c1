"""The table of common parameters: every range, default, alias and refusal, without HTTP."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.config.parameters import (
    CommonParameters,
    Limits,
    SamplingDefaults,
    build_request,
    parse_parameters,
    unsupported_parameters,
    validate_defaults,
)
from triptych.errors import ConfigError, ErrorCode, TriptychError
from triptych.messages import GenerationRequest, Lora, ModelInfo

LIMITS = Limits(max_pixels=512 * 512, max_num_frames=81, max_num_inference_steps=100, request_timeout_s=60)
EVERYTHING = (
    *("width", "height", "num_inference_steps", "negative_prompt", "guidance_scale", "true_cfg_scale"),
    *("strength", "num_frames"),
)
IMAGE = ModelInfo(
    pipeline="QwenImagePipeline",
    kind="image",
    parameters=EVERYTHING,
    extra_parameters=("max_sequence_length", "use_x"),
    size_multiple=16,
    default_width=256,
    default_height=128,
    default_num_inference_steps=20,
)
VIDEO = ModelInfo(
    pipeline="WanPipeline",
    kind="video",
    parameters=EVERYTHING,
    size_multiple=16,
    default_width=64,
    default_height=64,
    frame_multiple=4,
    default_num_frames=13,
    default_fps=16,
)
PLAIN = ModelInfo(pipeline="PlainPipeline", kind="image", parameters=())


def build(
    fields: dict[str, Any], *, info: ModelInfo = IMAGE, defaults: dict[str, Any] | None = None, form: bool = False
) -> GenerationRequest:
    return build_request(
        parse_parameters({"prompt": "a cat"} | fields, form=form),
        model="m",
        info=info,
        defaults=validate_defaults(defaults or {}, where="d"),
        limits=LIMITS,
    )


def refusal(
    fields: dict[str, Any], *, info: ModelInfo = IMAGE, defaults: dict[str, Any] | None = None, form: bool = False
) -> TriptychError:
    with pytest.raises(TriptychError) as caught:
        build(fields, info=info, defaults=defaults, form=form)
    return caught.value


def test_a_bare_prompt_gets_every_default_of_the_model() -> None:
    request = build({})
    params = request.params
    assert (params.prompt, params.width, params.height, params.num_inference_steps) == ("a cat", 256, 128, 20)
    assert (params.negative_prompt, params.guidance_scale, params.num_frames, params.fps) == (None, None, None, None)
    assert (request.n, request.priority, request.timeout_s, request.output.format) == (1, 0, 60, "png")
    assert 0 <= params.seed < 2**32
    assert request.id.startswith("req_")


def test_two_requests_get_different_ids_and_seeds() -> None:
    first, second = build({}), build({})
    assert first.id != second.id
    assert len({build({}).params.seed for _ in range(4)}) > 1


def test_what_the_request_says_wins_over_stage_file_and_model() -> None:
    defaults = {"num_inference_steps": 5, "size": "64x64", "seed": 7, "negative_prompt": "x", "n": 2}
    assert build({}, defaults=defaults).params.num_inference_steps == 5
    request = build({"num_inference_steps": 9, "width": 32, "seed": 0}, defaults=defaults)
    assert (request.params.num_inference_steps, request.params.width, request.params.height) == (9, 32, 64)
    assert (request.params.seed, request.params.negative_prompt, request.n) == (0, "x", 2)


@pytest.mark.parametrize(
    ("field", "good"),
    [
        ("prompt", ["x", "x" * 32000, "null", " x "]),
        ("negative_prompt", ["", "x"]),
        ("n", [1, 10]),
        ("num_outputs_per_prompt", [1, 10]),
        ("size", ["16x16", "512X512", "auto"]),
        ("width", [16, 512]),
        ("height", [16, 512]),
        ("num_inference_steps", [1, 100]),
        ("guidance_scale", [0, 100, 3.5]),
        ("true_cfg_scale", [0, 100.0]),
        ("strength", [0, 1, 0.5]),
        ("seed", [0, 2**63 - 1]),
        ("output_format", ["png", "jpeg", "webp"]),
        ("output_compression", [0, 100]),
        ("priority", [-100, 0, 100]),
        ("timeout", [0.001, 60]),
        ("session", ["", "s" * 256]),
        ("user", ["u" * 256]),
        ("extra_args", [{}, {"max_sequence_length": 5}, {"use_x": True}, {"use_x": "y"}, {"use_x": 0.5}]),
    ],
)
def test_every_value_at_the_edge_of_its_range_is_taken_and_null_is_the_default(field: str, good: list[Any]) -> None:
    for value in good:
        build({field: value})
    if field != "prompt":
        build({field: None})


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("prompt", ["", "   \n", "x" * 32001, 3, ["a"], True, "\ud800"]),
        ("negative_prompt", [3, "x" * 32001, "\udfff"]),
        ("n", [0, 11, 2.0, True, "1", [1]]),
        ("num_outputs_per_prompt", [0, 11]),
        ("size", ["", "16", "0x16", "16x", "17x16", "16x17", "1024x1024", "-16x16", "16x16\n", "١٦x١٦", 16, "9" * 99]),
        ("width", [0, -16, 17, 10**30, 16.0, "16"]),
        ("height", [0, -16, 17, 100_000_000]),
        ("num_inference_steps", [0, -1, 101, 1.0, "5", 10**300]),
        ("guidance_scale", [-0.1, 100.5, float("nan"), float("inf"), "3", True, 10**400]),
        ("true_cfg_scale", [-1, 101]),
        ("strength", [-0.01, 1.01]),
        ("seed", [-1, 2**63, 1.0, False, "0"]),
        ("output_format", ["gif", "PNG", 1]),
        ("output_compression", [-1, 101, 50.0]),
        ("priority", [-101, 101, 1.0]),
        ("timeout", [0, -1, 60.5, float("inf")]),
        ("session", ["s" * 257, 3]),
        ("user", ["u" * 257]),
        ("extra_args", ["x", [], {"use_x": [1]}, {"use_x": {}}, {"use_x": float("nan")}]),
    ],
)
def test_every_value_out_of_range_is_refused_by_name(field: str, bad: list[Any]) -> None:
    for value in bad:
        error = refusal({field: value})
        assert error.code is ErrorCode.INVALID_VALUE
        assert error.param is not None
        assert error.param.split(".")[0] == field
        assert field in error.message or error.message.startswith("size")
        assert len(error.message) < 400


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"n": 11}, ["11", "10"]),
        ({"size": "1024x512"}, ["1024x512", "524288", "262144"]),
        ({"width": 100}, ["100", "16"]),
        ({"num_inference_steps": 101}, ["101", "100"]),
        ({"timeout": 61}, ["61", "60"]),
        ({"seed": 2**63 - 1, "n": 2}, [str(2**63 - 2), str(2**63 - 1)]),
        ({"prompt": "x" * 32001}, ["32000", "32001"]),
        ({"extra_args": {f"a{number}": [] for number in range(65)}}, ["extra_args", "64", "65"]),
        ({"lora": {"name": "x", **{f"a{number}": 1 for number in range(64)}}}, ["lora", "64", "65"]),
    ],
)
def test_a_refusal_repeats_the_value_and_the_limit(fields: dict[str, Any], parts: list[str]) -> None:
    message = refusal(fields).message
    assert all(part in message for part in parts)


def test_a_missing_prompt_is_missing_and_a_null_one_too() -> None:
    for fields in ({}, {"prompt": None}):
        with pytest.raises(TriptychError) as caught:
            parse_parameters(fields)
        assert (caught.value.code, caught.value.param) == (ErrorCode.MISSING_PARAMETER, "prompt")


def test_an_unknown_parameter_names_the_nearest() -> None:
    error = refusal({"num_inference_step": 3})
    assert error.code is ErrorCode.UNKNOWN_PARAMETER
    assert "did you mean 'num_inference_steps'?" in error.message


def test_the_two_names_of_n_must_agree() -> None:
    assert build({"n": 3, "num_outputs_per_prompt": 3}).n == 3
    assert build({"num_outputs_per_prompt": 4}).n == 4
    assert refusal({"n": 3, "num_outputs_per_prompt": 4}).param == "num_outputs_per_prompt"


def test_size_and_width_and_height_must_agree() -> None:
    same = build({"size": "32x64", "width": 32, "height": 64}).params
    assert (same.width, same.height) == (32, 64)
    assert refusal({"size": "32x64", "width": 64}).param == "width"
    assert refusal({"size": "32x64", "height": 32}).param == "height"
    auto = build({"size": "auto", "width": 32}).params
    assert (auto.width, auto.height) == (32, 128)


def test_a_model_that_lists_its_sizes_refuses_others() -> None:
    info = ModelInfo(
        pipeline="P",
        kind="image",
        parameters=("width", "height"),
        default_width=64,
        default_height=64,
        sizes=((64, 64),),
    )
    assert build({}, info=info).params.width == 64
    assert "must be 64x64 with this model, got 128x64" in refusal({"size": "128x64"}, info=info).message
    assert "must be 64x64 with this model, got 65x65" in refusal({"size": "65x65"}, info=info).message


def test_a_model_that_lists_its_frame_counts_refuses_others() -> None:
    info = msgspec.structs.replace(VIDEO, default_num_frames=13, frame_counts=(13,))
    assert build({}, info=info).params.num_frames == 13
    for frames in (17, 20):
        error = refusal({"num_frames": frames}, info=info)
        wanted = f"num_frames must be 13 frames with this model, got {frames}"
        assert (error.param, error.message) == ("num_frames", wanted)
    error = refusal({"seconds": 1, "fps": 8}, info=info)
    wanted = "seconds must be 13 frames with this model, got 1 s, which is 9 frames at 8 fps"
    assert (error.param, error.message) == ("seconds", wanted)
    assert refusal({"seconds": 5}, info=info).param == "seconds"


def test_the_seeds_of_all_outputs_must_fit() -> None:
    assert build({"seed": 2**63 - 2, "n": 2}).params.seed == 2**63 - 2
    assert refusal({"seed": 2**63 - 1, "n": 2}).param == "seed"


@pytest.mark.parametrize(
    "field", ["size", "negative_prompt", "num_inference_steps", "guidance_scale", "true_cfg_scale", "strength"]
)
def test_what_the_pipeline_does_not_take_is_refused(field: str) -> None:
    value = {"size": "64x64", "negative_prompt": "x", "num_inference_steps": 2}.get(field, 1.0)
    error = refusal({field: value}, info=PLAIN)
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, field)
    assert "PlainPipeline" in error.message


def test_size_auto_is_fine_for_a_pipeline_without_sizes_but_a_width_beside_it_is_not() -> None:
    assert build({"size": "auto"}, info=PLAIN).params.width is None
    assert refusal({"size": "auto", "width": 64}, info=PLAIN).param == "width"


@pytest.mark.parametrize("field", ["num_frames", "fps", "seconds"])
def test_clip_parameters_are_refused_by_a_picture_model(field: str) -> None:
    assert refusal({field: 5}).code is ErrorCode.UNSUPPORTED_PARAMETER


def test_picture_formats_are_refused_by_a_video_model() -> None:
    assert refusal({"output_format": "png"}, info=VIDEO).code is ErrorCode.UNSUPPORTED_PARAMETER


def test_a_clip_gets_the_defaults_of_its_model_and_is_an_mp4() -> None:
    request = build({}, info=VIDEO)
    assert (request.params.num_frames, request.params.fps, request.output.format) == (13, 16, "mp4")


@pytest.mark.parametrize(
    ("fields", "frames"),
    [({"seconds": 5}, 81), ({"seconds": 1}, 17), ({"seconds": 0.01}, 1), ({"seconds": 2, "fps": 8}, 17)],
)
def test_seconds_give_the_nearest_frame_count_that_the_model_can_make(fields: dict[str, Any], frames: int) -> None:
    assert build(fields, info=VIDEO).params.num_frames == frames


def test_frames_are_checked_against_multiple_limit_and_seconds() -> None:
    assert build({"num_frames": 81}, info=VIDEO).params.num_frames == 81
    assert "77 or 81" in refusal({"num_frames": 80}, info=VIDEO).message
    assert "81" in refusal({"num_frames": 85}, info=VIDEO).message
    assert refusal({"seconds": 6}, info=VIDEO).param == "seconds"
    assert refusal({"seconds": 1e308}, info=VIDEO).param == "seconds"
    assert build({"num_frames": 17, "seconds": 1}, info=VIDEO).params.num_frames == 17
    assert refusal({"num_frames": 13, "seconds": 1}, info=VIDEO).param == "seconds"
    assert refusal({"fps": 121}, info=VIDEO).param == "fps"


def test_frames_of_the_request_replace_the_seconds_of_the_stage_file() -> None:
    assert build({"num_frames": 5}, info=VIDEO, defaults={"seconds": 5}).params.num_frames == 5
    assert build({"seconds": 1}, info=VIDEO, defaults={"num_frames": 5}).params.num_frames == 17


@pytest.mark.parametrize(
    "name",
    [
        *("generator", "callback", "callback_on_step_end", "output_type", "return_dict", "num_images_per_prompt"),
        *("timesteps", "sigmas", "latents", "prompt_embeds", "cross_attention_kwargs", "image", "image_embeds"),
        *("prompt", "seed", "n", "width", "negative_prompt", "strength"),
    ],
)
def test_reserved_names_never_pass_through_extra_args(name: str) -> None:
    info = ModelInfo(pipeline="P", kind="image", parameters=(), extra_parameters=(name,))
    error = refusal({"extra_args": {name: 1}}, info=info)
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, f"extra_args.{name}")
    with pytest.raises(ConfigError, match=name):
        validate_defaults({"extra_args": {name: 1}}, where="d")


def test_extra_args_that_the_call_does_not_name_are_refused_with_the_good_ones() -> None:
    error = refusal({"extra_args": {"eta": 0.5}})
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "extra_args.eta")
    assert "max_sequence_length, use_x" in error.message


def test_extra_args_add_to_those_of_the_stage_file_and_null_is_the_default() -> None:
    defaults = {"extra_args": {"use_x": True, "max_sequence_length": 8, "gone": 1}}
    assert build({"extra_args": {"max_sequence_length": 9, "use_x": None}}, defaults=defaults).params.extra_args == {
        "use_x": True,
        "max_sequence_length": 9,
    }


def test_a_lora_is_one_of_those_that_are_registered() -> None:
    info = msgspec.structs.replace(IMAGE, loras=("one", "two"))
    assert build({"lora": {"name": "two", "scale": 2}}, info=info).params.lora == Lora("two", 2.0)
    assert build({"lora": {"name": "one"}}, info=info).params.lora == Lora("one", 1.0)
    unknown = refusal({"lora": {"name": "x"}}, info=info)
    assert (unknown.code, unknown.param) == (ErrorCode.INVALID_VALUE, "lora.name")
    assert unknown.message == "lora.name must be one of one, two, got 'x'"
    assert "none is registered" in refusal({"lora": {"name": "x"}}).message
    assert refusal({"lora": {"name": "x", "scale": 11}}).param == "lora.scale"
    assert refusal({"lora": {"scale": 1}}).code is ErrorCode.MISSING_PARAMETER
    assert refusal({"lora": {"name": "x", "path": "/etc"}}).code is ErrorCode.UNKNOWN_PARAMETER
    assert build({"lora": None}).params.lora is None


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({"seed": "0"}, "seed", 0),
        ({"prompt": "null"}, "prompt", "null"),
        ({"prompt": "3"}, "prompt", "3"),
        ({"negative_prompt": "true"}, "negative_prompt", "true"),
        ({"num_inference_steps": "7"}, "num_inference_steps", 7),
        ({"guidance_scale": "1e1"}, "guidance_scale", 10.0),
        ({"width": "32", "height": "48"}, "width", 32),
        ({"extra_args": '{"use_x": true}'}, "extra_args", {"use_x": True}),
    ],
)
def test_form_strings_are_parsed_by_the_type_of_the_field(
    fields: dict[str, str], attribute: str, value: object
) -> None:
    assert getattr(build(fields, form=True).params, attribute) == value


@pytest.mark.parametrize("value", ["", "null", "2.0", "1_0", "0x1", "true", "NaN", "٣", "[" * 9999])
def test_form_strings_that_are_no_number_are_refused(value: str) -> None:
    assert refusal({"seed": value}, form=True).param == "seed"
    assert refusal({"num_inference_steps": value}, form=True).param == "num_inference_steps"


@given(st.sampled_from(sorted(CommonParameters.model_fields)), st.integers() | st.floats(allow_nan=False, width=32))
def test_a_number_means_the_same_in_json_and_in_a_form(name: str, number: float) -> None:
    if name in ("prompt", "negative_prompt", "size", "output_format", "session", "user", "extra_args", "lora"):
        return
    results = []
    for fields, form in (({name: number}, False), ({name: repr(number)}, True)):
        try:
            results.append(parse_parameters({"prompt": "x"} | fields, form=form))
        except TriptychError as error:
            results.append(error.code)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("mapping", "parts"),
    [
        ({"num_inference_steps": 0}, ["s[0].d.num_inference_steps", "greater than or equal to 1", "0"]),
        ({"num_inference_step": 5}, ["s[0].d.num_inference_step", "did you mean 'num_inference_steps'"]),
        ({"prompt": "x"}, ["s[0].d.prompt"]),
        ({"timeout": 3}, ["s[0].d.timeout"]),
        ({"size": "big"}, ["s[0].d.size", "1024x1024", "'big'"]),
        ({"size": "32x32", "width": 64}, ["s[0].d.width"]),
        ({"n": 1, "num_outputs_per_prompt": 2}, ["s[0].d.num_outputs_per_prompt"]),
        ({3: 4}, ["s[0].d"]),
    ],
)
def test_a_bad_preset_is_a_configuration_error_with_its_key_path(mapping: dict[Any, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_defaults(mapping, where="s[0].d")
    assert all(part in str(caught.value) for part in parts)


def test_presets_that_the_pipeline_does_not_take_are_named_and_not_used() -> None:
    defaults = validate_defaults({"guidance_scale": 3.0, "extra_args": {"eta": 1}}, where="d")
    assert unsupported_parameters(defaults, PLAIN) == ["guidance_scale", "extra_args.eta"]
    request = build({}, info=PLAIN, defaults={"guidance_scale": 3.0, "extra_args": {"eta": 1}})
    assert request.params.guidance_scale is None
    assert request.params.extra_args == {}


def test_an_empty_preset_is_the_default_of_the_class() -> None:
    assert validate_defaults({}, where="d") == SamplingDefaults()
