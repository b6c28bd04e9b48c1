"""Requests that have ended, kept for a while for whoever asks what became of them."""

from __future__ import annotations

from collections.abc import Iterator

from triptych.orchestrator.units import Request

__all__ = ["KEEP_S", "MAX_FINISHED", "History"]

KEEP_S = 600.0
MAX_FINISHED = 1000


class History:
    """Finished requests by id, oldest first; at most `MAX_FINISHED`, none older than `KEEP_S` seconds."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def get(self, request_id: str) -> Request | None:
        """The finished request of this id, if it is still kept."""
        return self._requests.get(request_id)

    def add(self, request: Request, now: float) -> None:
        """Keep one more, forget what is too old or too much."""
        self._requests[request.id] = request
        self.forget(now)

    def forget(self, now: float) -> None:
        """Drop what is too old or too much."""
        while self._requests:
            oldest = next(iter(self._requests.values()))
            assert oldest.finished_at_s is not None
            if len(self._requests) <= MAX_FINISHED and oldest.finished_at_s > now - KEEP_S:
                return
            del self._requests[oldest.id]
            oldest.units = []  # they point back; without the cycle both are freed at once
