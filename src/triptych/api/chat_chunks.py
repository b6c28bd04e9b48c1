"""Chat answers in pieces: `chat.completion.chunk` objects, the role first, the pictures in the last content delta.

Steps show as empty deltas with a `progress` object beside them, a few a second for each output.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from triptych.api.chat_content import content_members
from triptych.api.fields import BodyFields
from triptych.api.sse import DONE, event
from triptych.config.parameters import shown
from triptych.errors import ErrorCode, TriptychError
from triptych.orchestrator.events import Event, UnitOutput, UnitProgress

__all__ = ["ChatChunks", "include_usage"]

_PROGRESS_INTERVAL_S = 0.2
_NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def include_usage(fields: BodyFields, *, stream: bool) -> bool:
    """The field `stream_options`. Raises `TriptychError`."""
    options = fields.own.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise _invalid(f"stream_options must be an object, got {shown(options)}")
    if not stream:
        raise _invalid("stream_options needs stream: true")
    wanted = options.get("include_usage")
    if wanted is not None and not isinstance(wanted, bool):
        raise _invalid(f"stream_options.include_usage must be a boolean, got {shown(wanted)}")
    return bool(wanted)


def _invalid(message: str) -> TriptychError:
    return TriptychError(ErrorCode.INVALID_VALUE, message, param="stream_options")


class ChatChunks:
    """An `EventEncoder`; `head` are the members that all chunks share (id, object, created, model)."""

    def __init__(
        self,
        head: dict[str, Any],
        *,
        image_format: Literal["parts", "images"],
        usage: bool,
        ignored: list[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._head = head | {"object": "chat.completion.chunk"} | ({"usage": None} if usage else {})
        self._image_format: Literal["parts", "images"] = image_format
        self._usage = usage
        self._ignored = ignored
        self._clock = clock
        self._outputs: list[UnitOutput] = []
        self._shown: dict[int, tuple[UnitProgress, float]] = {}

    def begin(self) -> list[bytes]:
        """The role."""
        return self._chunk({"role": "assistant"})

    def encode(self, happened: Event) -> list[bytes]:
        """Progress; results are kept for the end."""
        if isinstance(happened, UnitOutput):
            self._outputs.append(happened)
        if not isinstance(happened, UnitProgress) or not self._is_news(happened):
            return []
        return self._chunk({}, progress={"index": happened.unit, "step": happened.step, "steps": happened.steps})

    def end(self) -> list[bytes]:
        """The pictures, the finish reason, the usage if it was asked for."""
        outputs = sorted(self._outputs, key=lambda output: output.unit)
        opening = msgspec.json.encode(self._head)[:-1] + b',"choices":[{"index":0,"delta":{'
        pictures = [
            opening,
            *content_members(outputs, self._image_format),
            b'},"logprobs":null,"finish_reason":null}]}',
        ]
        metrics = [output.metrics for output in outputs]
        last = self._chunk({}, finish="stop", metrics=metrics, ignored_parameters=self._ignored)
        if self._usage:
            last += event([msgspec.json.encode(self._head | {"choices": [], "usage": _NO_USAGE})])
        return [*event(pictures), *last, DONE]

    def _is_news(self, progress: UnitProgress) -> bool:
        now = self._clock()
        before, at = self._shown.get(progress.unit, (None, -_PROGRESS_INTERVAL_S))
        if progress == before or (now - at < _PROGRESS_INTERVAL_S and progress.step < progress.steps):
            return False
        self._shown[progress.unit] = progress, now
        return True

    def _chunk(self, delta: dict[str, Any], *, finish: str | None = None, **extra: Any) -> list[bytes]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event([msgspec.json.encode(self._head | {"choices": [choice]} | extra)])
