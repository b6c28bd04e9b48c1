"""A storm: clients under load against a real server while its processes are killed, stopped and kept from starting.

It keeps a record of what was wished, how each wish ended and when replicas died; judging is `chaos_judge`'s affair.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from chaos_judge import GONE, RIGHT, Outcome, Span
from chaos_schedule import Blow, Fault, Wish, wishes

from support.light_connection import Answer, LightConnection, split_picture
from support.server_process import ServerProcess

PATIENCE_S = 60.0
_FOUND_WITHIN_S = {Blow.STOP: 8.0}  # a stopped replica dies when the watchdog kills it
_DEATH_S = 0.5


@dataclass
class Storm:
    """One storm over `server`; `start_faults` is the folder that its replicas look into when they start."""

    server: ServerProcess
    start_faults: Path
    seed: int
    plan: list[Fault]
    duration_s: float
    clients: int
    wished: list[Wish] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    deaths: list[Span] = field(default_factory=list)
    blows: list[Blow] = field(default_factory=list)  # those that hit something
    health: set[str] = field(default_factory=set)
    _picture: bytes = b""
    _began_s: float = 0.0

    async def rage(self) -> None:
        """Returns when the time is over and every client has had its answer."""
        connection = await LightConnection.open(self.server.port)
        answer = await connection.request({"prompt": "reference", "seed": 0, "size": "64x64"})
        connection.drop()
        _, self._picture = split_picture(base64.b64decode(answer.json()["data"][0]["b64_json"]))
        self._began_s = time.monotonic()
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch_health())
            tasks.create_task(self._strike(over))
            clients = [tasks.create_task(self._ask_on(number, over)) for number in range(self.clients)]
            await asyncio.wait(clients)
            watching.cancel()

    def _now(self) -> float:
        return time.monotonic() - self._began_s

    # ---- what is done to the server

    async def _strike(self, over: asyncio.Event) -> None:
        connection = await LightConnection.open(self.server.port)
        for fault in self.plan:
            await asyncio.sleep(max(0.0, fault.at_s - self._now()))
            if self._hit(fault.blow, *await self._victim(connection, fault.replica)):
                self.blows.append(fault.blow)
        await asyncio.sleep(max(0.0, self.duration_s - self._now()))
        connection.drop()
        over.set()

    async def _victim(self, connection: LightConnection, first: int) -> tuple[int, int]:
        """Id and pid of the first ready replica from `first` on; waits for one if there is none."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                replicas = (await connection.request(None, method="GET", path="/v1/replicas")).json()["data"]
                for replica in replicas[first:] + replicas[:first]:
                    if replica["state"] == "ready":
                        return replica["id"], replica["pid"]
                await asyncio.sleep(0.05)  # over HTTP there is nothing to wait on

    def _hit(self, blow: Blow, replica_id: int, pid: int) -> bool:
        if blow is Blow.FORKSERVER:
            forkserver = self.server.forkserver()
            pid = 0 if forkserver is None else forkserver.pid
        if pid <= 0:  # a replica or the forkserver is not there; such a number would mean a whole group
            return False
        if blow in (Blow.REFUSE, Blow.DIE):
            (self.start_faults / str(replica_id)).write_text(blow.value)
        try:
            os.kill(pid, signal.SIGSTOP if blow is Blow.STOP else signal.SIGKILL)
        except ProcessLookupError:
            return False
        if blow is not Blow.FORKSERVER:
            self.deaths.append((self._now() - _DEATH_S, self._now() + _FOUND_WITHIN_S.get(blow, _DEATH_S)))
        return True

    async def _watch_health(self) -> None:
        connection = await LightConnection.open(self.server.port)
        try:
            while True:
                answer = await connection.request(None, method="GET", path="/health")
                self.health.add(answer.json()["status"] if answer.status == 200 else answer.error_code)
                await asyncio.sleep(0.1)
        finally:
            connection.drop()

    # ---- clients

    async def _ask_on(self, client: int, over: asyncio.Event) -> None:
        connection = await LightConnection.open(self.server.port)
        for wish in wishes(self.seed, client):
            if over.is_set():
                break
            self.wished.append(wish)
            began_s = self._now()
            result = await self._ask(connection, wish)
            self.outcomes.append(Outcome(wish, result, (began_s, self._now())))
            if result == GONE:
                connection = await LightConnection.open(self.server.port)
        connection.drop()

    async def _ask(self, connection: LightConnection, wish: Wish) -> str:
        request_id = f"wish-{wish.number}"
        connection.send(wish.body, request_id=request_id)
        deleting = asyncio.create_task(self._delete(request_id, wish.deleted_after_s))
        try:
            async with asyncio.timeout(PATIENCE_S if wish.gone_after_s is None else wish.gone_after_s):
                answer = await connection.receive()
        except TimeoutError:
            connection.drop()
            return "no answer" if wish.gone_after_s is None else GONE
        except (OSError, EOFError) as error:
            return f"connection lost: {error}"
        finally:
            await deleting
        if answer.headers["x-request-id"] != request_id:
            return f"the answer of {answer.headers['x-request-id']}"
        return answer.error_code if answer.status != 200 else self._look_at(wish, answer)

    def _look_at(self, wish: Wish, answer: Answer) -> str:
        images = answer.json()["data"]
        for index, image in enumerate(images):
            shown, picture = split_picture(base64.b64decode(image["b64_json"]))
            wanted = {"prompt": wish.prompt, "seed": wish.number + index}
            if shown != wanted or picture != self._picture or image["seed"] != wanted["seed"]:
                return f"wrong picture: {shown}"
        return RIGHT if len(images) == wish.outputs else f"{len(images)} pictures of {wish.outputs}"

    async def _delete(self, request_id: str, after_s: float | None) -> None:
        if after_s is not None:
            await asyncio.sleep(after_s)
            connection = await LightConnection.open(self.server.port)
            await connection.request(None, method="DELETE", path=f"/v1/requests/{request_id}")
            connection.drop()
