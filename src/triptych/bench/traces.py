"""Reading a trace of requests: `Request(height=…, width=…, timestamp=…)` lines or JSON lines.

Every line that is not blank becomes one `TraceRow`; a line that cannot be read is an error naming file and line,
and fields that the benchmark does not know are reported to the caller, never dropped in silence.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from triptych.errors import ConfigError

__all__ = ["TraceRow", "read_trace"]


_Positive = Annotated[int, Meta(ge=1)]


class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace: sizes in pixels, `timestamp` in seconds, `slo_ms` in milliseconds."""

    prompt: str | None = None
    text: str | None = None
    negative_prompt: str | None = None
    width: _Positive | None = None
    height: _Positive | None = None
    num_frames: _Positive | None = None
    fps: _Positive | None = None
    num_inference_steps: _Positive | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    timestamp: float | None = None
    slo_ms: float | None = None
    image_path: str | None = None
    image_paths: tuple[str, ...] = ()
    request_id: str | int | None = None


_FIELDS = frozenset(TraceRow.__struct_fields__)
_WANTED = "Request(height=…, width=…, num_inference_steps=…, timestamp=…) or a JSON object"


def read_trace(path: Path, *, limit: int) -> tuple[list[TraceRow], int, list[str]]:
    """The first `limit` rows, how many the file has, and the names of fields that were not understood.

    Raises `ConfigError` with file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read it: {error}", where="--dataset-path", found=str(path)) from error
    rows: list[TraceRow] = []
    unknown: dict[str, None] = {}
    total = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        total += 1
        if len(rows) == limit:
            continue
        values = _line_values(line.strip(), where=f"{path}:{number}")
        unknown.update(dict.fromkeys(values.keys() - _FIELDS))
        try:
            # strict=False: traces write whole numbers as 512.0 and numbers as text.
            rows.append(msgspec.convert(values, TraceRow, strict=False))
        except msgspec.ValidationError as error:
            raise ConfigError(str(error), where=f"{path}:{number}", found=line.strip()[:200], wanted=_WANTED) from error
    if not rows:
        raise ConfigError("no request in it", where="--dataset-path", found=str(path), wanted=_WANTED)
    stamped = sum(row.timestamp is not None for row in rows)
    if 0 < stamped < len(rows):
        raise ConfigError(
            "a timestamp on every line or on none", where=str(path), found=f"{stamped} of {len(rows)} lines with one"
        )
    return rows, total, sorted(unknown)


def _line_values(line: str, *, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line) if line.startswith("{") else _call_keywords(line)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ConfigError(f"not a request ({error})", where=where, found=line[:200], wanted=_WANTED) from error
    return {key: value for key, value in values.items() if value is not None}


def _call_keywords(line: str) -> dict[str, Any]:
    call = ast.parse(line, mode="eval").body
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Request"):
        raise ValueError("a line starts with Request( or {")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("every field has a name")
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
