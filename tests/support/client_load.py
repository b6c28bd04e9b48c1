"""Clients that ask a server for pictures without pause, and look at every answer."""

from __future__ import annotations

import base64
import io
import itertools
import json
import threading
from collections import Counter
from types import TracebackType

import httpx
from PIL import Image

from support.server_process import ServerProcess, wait_until


class ClientLoad:
    """`clients` threads, each with one request after another, from `with` to its end.

    `answers` counts by error code, `ok` for the right picture; after the block every request has its one answer.
    """

    def __init__(self, server: ServerProcess, *, clients: int) -> None:
        self.answers: Counter[str] = Counter()
        self.attempts: Counter[int] = Counter()
        self._url = f"http://127.0.0.1:{server.port}/v1/images/generations"
        self._serial = itertools.count()
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(clients)]

    def __enter__(self) -> ClientLoad:
        for thread in self._threads:
            thread.start()
        self.more(len(self._threads))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(60)
        assert kind is not None or not any(thread.is_alive() for thread in self._threads)

    def more(self, count: int) -> None:
        """Wait for so many more answers."""
        enough = sum(self.answers.values()) + count
        wait_until(lambda: sum(self.answers.values()) >= enough, 30, f"{count} more answers")

    @property
    def failed(self) -> dict[str, int]:
        """Everything but right pictures."""
        return {code: count for code, count in self.answers.items() if code != "ok"}

    def _ask_on(self) -> None:
        with httpx.Client(timeout=60, trust_env=False, verify=False) as client:
            while not self._end.is_set():
                self.answers[self._ask(client, next(self._serial))] += 1

    def _ask(self, client: httpx.Client, number: int) -> str:
        body = {"prompt": f"picture {number}", "seed": number, "size": "64x64"}
        try:
            response = client.post(self._url, json=body)
        except httpx.ConnectError:
            self._end.set()
            return "connection refused"
        except httpx.HTTPError as error:
            return type(error).__name__
        answer = response.json()
        if response.status_code != 200:
            return str(answer["error"]["code"])
        self.attempts[answer["metrics"][0]["attempts"]] += 1
        picture = Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])))
        shown = json.loads(picture.text["triptych"])  # type: ignore[attr-defined]
        return "ok" if shown == {"prompt": f"picture {number}", "seed": number} else "wrong picture"
