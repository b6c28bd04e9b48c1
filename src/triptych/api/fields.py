"""What each field of a generation body is: a common parameter, the route's own, known but meaningless, or unknown.

The ignored names are those of the OpenAI, vLLM and vLLM-Omni request schemas that steer text generation or other
models; answers list the ones that were sent. A nested `extra_body` means its fields at top level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from triptych.config.parameters import CommonParameters, nearest, shown
from triptych.errors import ErrorCode, TriptychError
from triptych.messages import MediaInput

__all__ = ["CHAT_FIELDS", "EDIT_FIELDS", "IMAGE_FIELDS", "VIDEO_FIELDS", "BodyFields", "RouteFields"]

_OMNI_IGNORED = frozenset(
    {"bot_task", "flow_shift", "generator_device", "guidance_scale_2", "infer_align_image_size", "layers"}
    | {"request_id", "safety_identifier", "session_id", "slo_ms", "system_prompt", "use_system_prompt"}
    | {"vae_use_slicing", "vae_use_tiling"}
)
_OPENAI_IMAGE_IGNORED = frozenset(
    {"background", "complexity", "frame_count", "frame_duration_ms", "input_fidelity", "moderation", "quality"}
    | {"style", "svg"}
)
_OPENAI_CHAT_IGNORED = frozenset(
    {"audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens"}
    | {"max_tokens", "metadata", "modalities", "moderation", "parallel_tool_calls", "prediction", "presence_penalty"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "response_format"}
    | {"service_tier", "stop", "store", "temperature", "tool_choice", "tools", "top_logprobs"}
    | {"top_p", "verbosity", "web_search_options"}
)
_VLLM_CHAT_IGNORED = frozenset(
    {"add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "chat_template"}
    | {"chat_template_kwargs", "continue_final_message", "documents", "echo", "ec_transfer_params", "guided_choice"}
    | {"guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern"}
    | {"ignore_eos", "include_reasoning", "include_stop_str_in_output", "kv_transfer_params", "length_penalty"}
    | {"logits_processors", "logprob_token_ids", "media_io_kwargs", "min_p", "min_tokens", "mm_processor_kwargs"}
    | {"prompt_logprobs", "repetition_detection", "repetition_penalty", "return_mm_kwargs", "return_prompt_text"}
    | {"return_token_ids", "return_token_offsets", "return_tokens_as_token_ids", "routed_experts_prompt_start"}
    | {"skip_special_tokens", "spaces_between_special_tokens", "stop_token_ids", "stream_interval"}
    | {"structured_outputs", "thinking_token_budget", "top_k", "truncate_prompt_tokens", "truncation_side"}
    | {"use_beam_search", "vllm_xargs", "watermarking"}
)
_NESTED = "extra_body"


@dataclass(slots=True)
class BodyFields:
    """One body, sorted; nulls are dropped. `ignored` lists names in alphabetical order; values of a form are text.

    `inputs` and `frames` are its pictures, once they are decoded (see `media`).
    """

    common: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    is_form: bool = False
    inputs: tuple[MediaInput, ...] = ()
    frames: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class RouteFields:
    """The field table of one route."""

    common: frozenset[str]
    own: frozenset[str]
    ignored: frozenset[str]

    def sort(self, body: Mapping[str, Any], *, is_form: bool = False) -> BodyFields:
        """Sort a decoded body. Raises `TriptychError` for an unknown field or one that is given twice."""
        fields = BodyFields(is_form=is_form)
        for name, value in _flat(body).items():
            if name in self.common:
                fields.common[name] = value
            elif name in self.own:
                fields.own[name] = value
            elif name in self.ignored:
                fields.ignored.append(name)
            else:
                hint = nearest(name, self.common | self.own | {_NESTED})
                message = f"unknown parameter {shown(name)}{hint}"
                raise TriptychError(ErrorCode.UNKNOWN_PARAMETER, message, param=name)
        fields.ignored.sort()
        return fields


def _flat(body: Mapping[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in body.items() if value is not None}
    nested = flat.pop(_NESTED, None)
    if nested is None:
        return flat
    if not isinstance(nested, dict):
        message = f"{_NESTED} must be an object, got {shown(nested)}"
        raise TriptychError(ErrorCode.INVALID_VALUE, message, param=_NESTED)
    for name, value in nested.items():
        if value is None:
            continue
        if name == _NESTED:
            message = f"{_NESTED} may not hold another {_NESTED}"
            raise TriptychError(ErrorCode.UNKNOWN_PARAMETER, message, param=name)
        if name in flat:
            message = f"{shown(name)} is given twice, at top level and in {_NESTED}"
            raise TriptychError(ErrorCode.INVALID_VALUE, message, param=name)
        flat[name] = value
    return flat


_COMMON = frozenset(CommonParameters.model_fields)

CHAT_FIELDS = RouteFields(
    common=_COMMON - {"prompt"},
    own=frozenset({"model", "messages", "stream", "stream_options"}),
    ignored=_OMNI_IGNORED | _OPENAI_IMAGE_IGNORED | _OPENAI_CHAT_IGNORED | _VLLM_CHAT_IGNORED,
)
IMAGE_FIELDS = RouteFields(
    common=_COMMON,
    own=frozenset({"model", "stream", "partial_images", "response_format"}),
    ignored=_OMNI_IGNORED | _OPENAI_IMAGE_IGNORED,
)
EDIT_FIELDS = RouteFields(
    common=_COMMON,
    own=IMAGE_FIELDS.own | {"image", "images", "mask"},
    ignored=IMAGE_FIELDS.ignored | {"markup"},
)
VIDEO_FIELDS = RouteFields(
    common=_COMMON,
    own=frozenset({"model", "input_reference"}),
    ignored=_OMNI_IGNORED | _OPENAI_IMAGE_IGNORED,
)
