"""Every way a request or a configuration can fail, in one closed list.

A code decides HTTP status, OpenAI error type and whether a client should retry; HTTP answers, streams,
jobs and metrics all read the same table. Nothing else in the package invents an error code.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["CODES", "CodeSpec", "ConfigError", "ErrorCode", "TriptychError"]


class ErrorCode(StrEnum):
    """Machine-readable reason of a failure, the `code` of the error envelope."""

    INVALID_VALUE = "invalid_value"
    MISSING_PARAMETER = "missing_parameter"
    UNKNOWN_PARAMETER = "unknown_parameter"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    INVALID_JSON = "invalid_json"
    INVALID_IMAGE = "invalid_image"
    NOT_AVAILABLE = "not_available"
    INVALID_API_KEY = "invalid_api_key"
    PERMISSION_DENIED = "permission_denied"
    MODEL_NOT_FOUND = "model_not_found"
    VIDEO_NOT_FOUND = "video_not_found"
    REQUEST_NOT_FOUND = "request_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    READ_TIMEOUT = "read_timeout"
    CONFLICT = "conflict"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    RANGE_NOT_SATISFIABLE = "range_not_satisfiable"
    HEADERS_TOO_LARGE = "headers_too_large"
    QUEUE_FULL = "queue_full"
    REQUEST_ABORTED = "request_aborted"
    ENGINE_ERROR = "engine_error"
    OUT_OF_MEMORY = "out_of_memory"
    POISON_REQUEST = "poison_request"
    NOT_READY = "not_ready"
    DRAINING = "draining"
    NO_REPLICA = "no_replica"
    DEADLINE_EXCEEDED = "deadline_exceeded"


@dataclass(frozen=True, slots=True)
class CodeSpec:
    """What HTTP says for a code: status, OpenAI error type, and `x-should-retry` (None: leave it to the client)."""

    status: int
    type: str
    should_retry: bool | None = None


_BAD = CodeSpec(400, "invalid_request_error")
_ABSENT = CodeSpec(404, "invalid_request_error")

CODES: dict[ErrorCode, CodeSpec] = {
    ErrorCode.INVALID_VALUE: _BAD,
    ErrorCode.MISSING_PARAMETER: _BAD,
    ErrorCode.UNKNOWN_PARAMETER: _BAD,
    ErrorCode.UNSUPPORTED_PARAMETER: _BAD,
    ErrorCode.INVALID_JSON: _BAD,
    ErrorCode.INVALID_IMAGE: _BAD,
    ErrorCode.NOT_AVAILABLE: _BAD,
    ErrorCode.INVALID_API_KEY: CodeSpec(401, "authentication_error"),
    ErrorCode.PERMISSION_DENIED: CodeSpec(403, "permission_error"),
    ErrorCode.MODEL_NOT_FOUND: _ABSENT,
    ErrorCode.VIDEO_NOT_FOUND: _ABSENT,
    ErrorCode.REQUEST_NOT_FOUND: _ABSENT,
    ErrorCode.NOT_FOUND: _ABSENT,
    ErrorCode.METHOD_NOT_ALLOWED: CodeSpec(405, "invalid_request_error"),
    ErrorCode.READ_TIMEOUT: CodeSpec(408, "invalid_request_error"),
    ErrorCode.CONFLICT: CodeSpec(409, "invalid_request_error", should_retry=False),
    ErrorCode.PAYLOAD_TOO_LARGE: CodeSpec(413, "invalid_request_error"),
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: CodeSpec(415, "invalid_request_error"),
    ErrorCode.RANGE_NOT_SATISFIABLE: CodeSpec(416, "invalid_request_error"),
    ErrorCode.HEADERS_TOO_LARGE: CodeSpec(431, "invalid_request_error"),
    ErrorCode.QUEUE_FULL: CodeSpec(429, "rate_limit_error"),
    ErrorCode.REQUEST_ABORTED: CodeSpec(499, "request_aborted", should_retry=False),
    ErrorCode.ENGINE_ERROR: CodeSpec(500, "server_error", should_retry=False),
    ErrorCode.OUT_OF_MEMORY: CodeSpec(500, "server_error", should_retry=False),
    ErrorCode.POISON_REQUEST: CodeSpec(500, "server_error", should_retry=False),
    ErrorCode.NOT_READY: CodeSpec(503, "server_error"),
    ErrorCode.DRAINING: CodeSpec(503, "server_error"),
    ErrorCode.NO_REPLICA: CodeSpec(503, "server_error"),
    ErrorCode.DEADLINE_EXCEEDED: CodeSpec(504, "server_error", should_retry=False),
}


class TriptychError(Exception):
    """A failure with a code from the closed list.

    `param` names the request field (dotted path) at fault; `retry_after_s` is the wait worth telling the client;
    `should_retry` overrides the code's own verdict (an engine error that a repeat may survive, say).
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self._should_retry = should_retry

    @property
    def status(self) -> int:
        """HTTP status of this failure."""
        return CODES[self.code].status

    @property
    def should_retry(self) -> bool | None:
        """What `x-should-retry` says: True, False, or None for no header."""
        return CODES[self.code].should_retry if self._should_retry is None else self._should_retry


class ConfigError(Exception):
    """A configuration that cannot be served: found before any weights load, exit code 2.

    `where` is the file and key path or the flag, `found` what stands there, `wanted` what would be right.
    """

    def __init__(self, message: str, *, where: str | None = None, found: object = None, wanted: str | None = None):
        self.where, self.found, self.wanted = where, found, wanted
        parts = [f"{where}: {message}" if where else message]
        if found is not None:
            parts.append(f"found {found!r}")
        if wanted is not None:
            parts.append(f"wanted {wanted}")
        super().__init__("; ".join(parts))
