"""Field types that the stage file and the command line share, and the plain words for a value that does not fit.

A custom error carries `wanted` in its context; `explain` turns the first problem of a pydantic ValidationError into
what a reader needs: where in the tree, what is wrong, what was found, what would be right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

__all__ = [
    "ByteSize",
    "DeviceIds",
    "Location",
    "NamedPaths",
    "Problem",
    "Section",
    "explain",
    "key_path",
    "parse_device_ids",
    "problem",
    "short",
]

Location = tuple[int | str, ...]

_DEVICES_WANTED = 'distinct ids, as "0,1" or a list'
_BYTES_WANTED = "a size such as 64MiB, 1GB or a number of bytes"
_BYTE_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}


class Section(BaseModel):
    """One YAML mapping: frozen, strict, and without keys that nobody reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def problem(message: str, wanted: str) -> PydanticCustomError:
    """What a validator raises; both texts are shown as they are."""
    # The message travels as context, so that braces in what the user typed are never taken for a template.
    return PydanticCustomError("unfit", "{problem}", {"problem": message, "wanted": wanted})


def parse_device_ids(value: object) -> tuple[str, ...]:
    """Ids in list order from `"0,1"`, `0` or `[0, "1"]`; empty and repeated entries are refused by name."""
    if isinstance(value, str):
        entries: list[object] = [*value.split(",")]
    elif isinstance(value, list | tuple):
        entries = list(value)
    else:
        entries = [value]
    if entries in ([], [""]):
        raise problem("no device is named", _DEVICES_WANTED)
    ids: dict[str, int] = {}
    for position, entry in enumerate(entries, start=1):
        label = f"device entry {position} of {len(entries)}"
        if isinstance(entry, bool) or not isinstance(entry, str | int):
            raise problem(f"{label} is not an id: {entry!r}", _DEVICES_WANTED)
        name = str(entry).strip()
        if not name:
            raise problem(f"{label} is empty", _DEVICES_WANTED)
        if "," in name:
            raise problem(f"{label} holds a comma: {name!r}", "one id per list entry")
        if name in ids:
            raise problem(f"{label} repeats device {name!r} (entry {ids[name]})", _DEVICES_WANTED)
        ids[name] = position
    return tuple(ids)


def _parse_bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([A-Za-z]*)", value.strip(), re.ASCII)
    unit = _BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise problem("not a size", _BYTES_WANTED)
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def _parse_named_paths(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    named: dict[str, str] = {}
    for entry in value:
        name, equals, path = str(entry).partition("=")
        if not (name and equals and path):
            raise problem(f"{entry!r} names no path", "NAME=PATH")
        if name in named:
            raise problem(f"name {name!r} is given twice", "distinct names")
        named[name] = path
    return named


DeviceIds = Annotated[tuple[str, ...], BeforeValidator(parse_device_ids)]
ByteSize = Annotated[int, BeforeValidator(_parse_bytes)]
NamedPaths = Annotated[dict[str, str], BeforeValidator(_parse_named_paths)]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a value: `kind` is pydantic's error type, `found` the offending value."""

    kind: str
    location: Location
    message: str
    found: Any
    wanted: str | None
    others: int


def key_path(location: Location) -> str:
    """`("stages", 0, "runtime")` as `stages[0].runtime`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def short(found: object) -> object:
    """A value as a message shows it: null by name, and not all of what is long."""
    if found is None:
        return "null"
    return f"{repr(found)[:200]}..." if isinstance(found, str | list | dict) and len(repr(found)) > 200 else found


_WANTED_TYPES = {
    "int": "an integer",
    "float": "a number",
    "string": "a string",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "model": "a mapping",
}


def _wanted(kind: str, context: Mapping[str, Any]) -> str | None:
    if "wanted" in context:
        return str(context["wanted"])
    bounds = {"greater_than_equal": ("ge", "at least"), "less_than_equal": ("le", "at most")}
    bounds |= {"greater_than": ("gt", "more than"), "less_than": ("lt", "less than")}
    if kind in bounds:
        key, words = bounds[kind]
        return f"{words} {context[key]}"
    if kind in ("literal_error", "enum"):
        return str(context["expected"])
    if kind == "finite_number":
        return "a finite number"
    if kind == "string_too_short":
        return "a string that is not empty"
    return _WANTED_TYPES.get(kind.split("_")[0])


def _message(error: ErrorDetails) -> str:
    kind, words = error["type"], error["msg"]
    if kind == "unfit":
        return words
    if kind == "missing":
        return "required key is missing"
    if kind.endswith(("_type", "_parsing", "_from_float")):
        return "wrong type"
    if kind.startswith(("greater_than", "less_than", "finite_number")):
        return "out of range"
    if kind == "string_too_short":
        return "empty"
    return "value is not allowed" if kind == "literal_error" else words[:1].lower() + words[1:]


def explain(error: ValidationError) -> Problem:
    """The first problem of a validation error; `others` counts the rest."""
    details = error.errors(include_url=False)
    first = details[0]
    return Problem(
        kind=first["type"],
        location=first["loc"],
        message=_message(first),
        found=None if first["type"] == "missing" else first["input"],
        wanted=_wanted(first["type"], first.get("ctx", {})),
        others=len(details) - 1,
    )
