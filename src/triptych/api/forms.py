"""Multipart forms as the fields that the same request would have as JSON.

A text part is a string, a file part is bytes; `name[]` collects a list and `name[key]` an object, as the official
client writes them. What a string means is told by its field's type later (see `config.parameters`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from triptych.config.parameters import shown
from triptych.errors import ErrorCode, TriptychError

__all__ = ["parse_form"]

_MAX_PARTS = 256
_NESTED = re.compile(r"(?P<name>[^\[\]]+)\[(?P<key>[^\[\]]*)\]")


def parse_form(body: bytes | bytearray, content_type: str) -> dict[str, Any]:
    """The fields of a `multipart/form-data` body. Raises `TriptychError` for a broken form or a field given twice."""
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise _broken("its content-type names no boundary")
    reader = _Reader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(bytes(body))
        parser.finalize()
    except FormParserError as error:
        raise _broken(str(error)) from None
    if not reader.is_complete:
        raise _broken("its end is missing")
    fields: dict[str, Any] = {}
    for part in reader.parts:
        if not (part.is_file and not part.filename and not part.data):  # a browser's file field that was left empty
            _add(fields, part)
    return fields


@dataclass(slots=True)
class _Part:
    name: str = ""
    filename: str = ""
    is_file: bool = False
    data: bytearray = field(default_factory=bytearray)

    def value(self) -> str | bytes:
        """The content: bytes of a file, else text."""
        if self.is_file:
            return bytes(self.data)
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            message = f"{shown(self.name)} is not UTF-8 text"
            raise TriptychError(ErrorCode.INVALID_VALUE, message, param=self.name) from None


class _Reader:
    """Collects what the parser finds."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.is_complete = False
        self._header = bytearray()
        self._value = bytearray()

    def callbacks(self) -> Any:
        """What the parser calls, by its own names."""
        calls: dict[str, Callable[..., None]] = {
            "on_part_begin": self._on_part_begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._on_header_end,
            "on_part_data": lambda data, start, end: self.parts[-1].data.extend(data[start:end]),
            "on_headers_finished": self._on_headers_finished,
            "on_end": self._on_end,
        }
        return calls

    def _on_part_begin(self) -> None:
        if len(self.parts) >= _MAX_PARTS:
            raise _broken(f"it has more than {_MAX_PARTS} parts")
        self.parts.append(_Part())

    def _on_header_end(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            part = self.parts[-1]
            part.name = options.get(b"name", b"").decode("utf-8", "replace")
            part.is_file = b"filename" in options
            part.filename = options.get(b"filename", b"").decode("utf-8", "replace")
        self._header.clear()
        self._value.clear()

    def _on_headers_finished(self) -> None:
        if not self.parts[-1].name:
            raise _broken("a part has no name")

    def _on_end(self) -> None:
        self.is_complete = True


def _add(fields: dict[str, Any], part: _Part) -> None:
    nested = _NESTED.fullmatch(part.name)
    if nested is None:
        if part.name in fields:
            raise _twice(part.name)
        fields[part.name] = part.value()
        return
    name, key = nested["name"], nested["key"]
    collected = fields.setdefault(name, {} if key else [])
    if isinstance(collected, list) and not key:
        collected.append(part.value())
    elif isinstance(collected, dict) and key and key not in collected:
        collected[key] = part.value()
    else:
        raise _twice(part.name)


def _twice(name: str) -> TriptychError:
    return TriptychError(ErrorCode.INVALID_VALUE, f"{shown(name)} is given twice", param=name)


def _broken(reason: str) -> TriptychError:
    return TriptychError(ErrorCode.INVALID_VALUE, f"the body is not a valid form: {reason}")
