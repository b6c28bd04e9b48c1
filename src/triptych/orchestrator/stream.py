"""The event stream of one request: what the orchestrator pushes in, a route reads out.

No task and no queue object per request: one ordered dict of pending events and at most one future. Progress is
coalesced to the latest per unit, previews and outputs are bounded by the request, so a slow reader costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from triptych.errors import TriptychError
from triptych.orchestrator.events import Event, UnitOutput, UnitProgress

__all__ = ["EventStream"]


class EventStream:
    """Async iterator of `Event` for one reader.

    It ends after the last output, or raises the request's `TriptychError` after the events that came before it.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._pending: dict[int, Event] = {}
        self._serial = -1  # keys of all but progress, which has its unit as key
        self._outputs: list[UnitOutput] = []
        self._ended = False
        self._error: TriptychError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_end = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        while not self._pending and not self._ended:
            await self._wait(for_end=False)
        if self._pending:
            return self._pending.pop(next(iter(self._pending)))
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def outputs(self) -> list[UnitOutput]:
        """All outputs by unit index; wakes the caller once, at the end. Raises `TriptychError`."""
        while not self._ended:
            await self._wait(for_end=True)
        if self._error is not None:
            raise self._error
        return sorted(self._outputs, key=lambda output: output.unit)

    def close(self) -> None:
        """The reader leaves: abort the request unless it has ended."""
        if not self._ended:
            self._abort(self.request_id)

    def push(self, event: Event) -> None:
        """Take one event (the orchestrator's side)."""
        if isinstance(event, UnitProgress):
            self._pending.pop(event.unit, None)
            self._pending[event.unit] = event
        else:
            if isinstance(event, UnitOutput):
                self._outputs.append(event)
            self._pending[self._serial] = event
            self._serial -= 1
        if not self._waits_for_end:
            self._wake()

    def end(self, error: TriptychError | None) -> None:
        """No event follows (the orchestrator's side)."""
        self._ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, *, for_end: bool) -> None:
        if self._waiter is not None:
            raise RuntimeError("the stream has one reader already")
        self._waiter = asyncio.get_running_loop().create_future()
        self._waits_for_end = for_end
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._waits_for_end = False
