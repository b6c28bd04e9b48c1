"""One thread for what is done on disk, in the order it was asked for.

The thread is a daemon, which those of `concurrent.futures` are not: a disk that never answers must not keep a server
that was told to stop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

__all__ = ["Writer"]


class Writer:
    """Runs work beside the event loop, one piece at a time, until it is closed; the thread starts with the first."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What `work` returns or raises. When the caller is cancelled, work that has begun goes on unheard."""
        if self._thread.ident is None:
            self._thread.start()
        done: Future[Any] = Future()

        def carry_out() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(work(*arguments))
            except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
                done.set_exception(error)

        self._work.put(carry_out)
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """The thread ends after what was asked for so far."""
        self._work.put(None)

    def _run(self) -> None:
        while (carry_out := self._work.get()) is not None:
            carry_out()
