"""What a bad parameter is told: the first failure in plain words, the value as a message repeats it, the nearest name.

`parameters` and the routes raise these; a Pydantic ValidationError never leaves this package.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError

from triptych.errors import ErrorCode, TriptychError

__all__ = ["MAX_TEXT_CHARACTERS", "first_error", "invalid", "nearest", "parameter_error", "shown"]

MAX_TEXT_CHARACTERS = 32_000


def invalid(param: str, message: str) -> TriptychError:
    """`invalid_value` of a parameter; the message goes on after its name."""
    return TriptychError(ErrorCode.INVALID_VALUE, f"{param} {message}", param=param)


def parameter_error(error: ValidationError, known: Iterable[str]) -> TriptychError:
    """The first failure of a Pydantic validation as an answer to the client; `known` feeds the nearest-name hint."""
    kind = error.errors(include_url=False)[0]["type"]
    param, message, found = first_error(error)
    if kind == "missing":
        return TriptychError(ErrorCode.MISSING_PARAMETER, f"{param} is required", param=param)
    if kind == "extra_forbidden":
        message = f"unknown parameter {shown(param)}{nearest(param, known)}"
        return TriptychError(ErrorCode.UNKNOWN_PARAMETER, message, param=param)
    return invalid(param, f"{message}, got {found if kind == 'string_too_long' else shown(found)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an "unknown" message: `; did you mean 'seed'?`, or nothing when no known name is near."""
    matches = difflib.get_close_matches(name[:64], list(known), n=1)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def first_error(error: ValidationError) -> tuple[str, str, object]:
    """Dotted name, message and value of the first failure of a Pydantic validation."""
    first = error.errors(include_url=False)[0]
    location, message, found = [str(part) for part in first["loc"]], first["msg"], first["input"]
    if location[0] == "extra_args" and len(location) > 1:
        location = location[:2]
        message = f"must be a boolean, a finite 64-bit number or a string of at most {MAX_TEXT_CHARACTERS} characters"
    elif first["type"] == "string_pattern_mismatch":
        message = 'must be "WxH" in pixels, such as "1024x1024", or "auto"'
    for start in ("Input should ", "String should "):
        message = message.replace(start, "must ")
    if first["type"] == "string_too_long":
        found = f"{len(str(found))} characters"
    return ".".join(location), message, found


def shown(value: object) -> str:
    """A value as an error message repeats it: short, one line, containers by type only."""
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, bytes | bytearray):
        return "a file"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**40:
        return "an integer of more than 40 digits"
    text = repr(value[:65] if isinstance(value, str) else value)
    return text if len(text) <= 64 else f"{text[:61]}..."
