"""What a chat asks for: the text of its last user message is the prompt, the pictures in it are the inputs."""

from __future__ import annotations

from typing import Any

from triptych.api.media import MAX_INPUT_PICTURES, MediaSource, sources_of
from triptych.config.parameters import shown
from triptych.errors import ErrorCode, TriptychError

__all__ = ["read_messages"]

_FIELD = "messages"
_IMAGE_PARTS = ("image_url", "input_image", "image")


def read_messages(messages: Any) -> tuple[str, list[MediaSource]]:
    """Prompt and pictures. Raises `TriptychError`."""
    content = _last_user_content(messages)
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        raise _invalid(f"content of the last user message must be a string or a list of parts, got {_got(content)}")
    texts, pictures = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "input_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in _IMAGE_PARTS:
            pictures += sources_of(part.get("image_url", part.get("image")), param=_FIELD)
        else:
            wanted = '{"type": "text", "text": "..."} or {"type": "image_url", "image_url": {"url": "data:..."}}'
            raise _invalid(f"parts of a user message must look like {wanted}, got {_got(kind or part)}")
    if len(pictures) > MAX_INPUT_PICTURES:
        raise _invalid(f"a message may hold at most {MAX_INPUT_PICTURES} pictures, got {len(pictures)}")
    return "\n".join(texts), pictures


def _last_user_content(messages: Any) -> Any:
    if messages is None:
        raise TriptychError(ErrorCode.MISSING_PARAMETER, "messages is required", param=_FIELD)
    if not isinstance(messages, list) or not messages:
        raise _invalid(f"messages must be a list with at least one message, got {shown(messages)}")
    last: dict[str, Any] | None = None
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _invalid(f"messages[{index}] must be an object with a role, got {_got(message)}")
        if message["role"] == "user":
            last = message
    if last is None:
        raise _invalid("messages must hold a user message: its text is the prompt")
    return last.get("content")


def _got(value: Any) -> str:
    return "null" if value is None else shown(value)


def _invalid(message: str) -> TriptychError:
    return TriptychError(ErrorCode.INVALID_VALUE, message, param=_FIELD)
