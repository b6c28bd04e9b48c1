"""What never reaches the application: malformed HTTP, upgrades, pipelines, limits, clients that are slow or gone."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from api_fakes import FakeOrchestrator, make_app
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from triptych.api.protocol import HttpProtocol

pytestmark = pytest.mark.anyio

WAIT_S = 20
BODY = b'{"prompt":"x","size":"32x32"}'


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


class ImpatientProtocol(HttpProtocol):
    read_timeout_s = 0.4
    write_timeout_s = 0.6


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert self.headers["x-request-id"]
        assert self.headers["content-type"] == "application/json"
        code: str = error["code"]
        return code


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> Answer:
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            status, *lines = head.decode().split("\r\n")[:-2]
            headers = dict(line.split(": ", 1) for line in lines)
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(status.split()[1]), headers, body)

    async def end(self) -> bytes:
        """What comes until the server closes."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()


@dataclass
class Serving:
    port: int
    server: uvicorn.Server
    running: asyncio.Task[None]
    clients: list[Client] = field(default_factory=list)

    async def connect(self) -> Client:
        self.clients.append(Client(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.clients[-1]


@asynccontextmanager
async def serving(
    orchestrator: FakeOrchestrator, protocol: type[HttpProtocol] = HttpProtocol, **settings: Any
) -> AsyncIterator[Serving]:
    app = make_app(orchestrator, **settings)
    config = uvicorn.Config(
        app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False, port=0, log_level="warning"
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    async with asyncio.timeout(WAIT_S):
        while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.01)
    serving = Serving(server.servers[0].sockets[0].getsockname()[1], server, running)
    try:
        yield serving
    finally:
        for client in serving.clients:
            client.writer.close()
            with contextlib.suppress(ConnectionError):
                await client.writer.wait_closed()
        server.should_exit = True
        await asyncio.wait_for(running, WAIT_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what the server holds has no event
            await asyncio.sleep(0.01)


CHUNKED = (
    b"POST /v1/images/generations HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\nx-request-id: mine\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def post(body: bytes = BODY, *, length: int | None = None, headers: str = "") -> bytes:
    head = (
        "POST /v1/images/generations HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body) if length is None else length}\r\n{headers}\r\n"
    )
    return head.encode() + body


def test_what_the_protocol_overrides_and_reads_exists_in_this_uvicorn() -> None:
    own = {
        "read_timeout_s",
        "write_timeout_s",
        "_check_progress",
        "_is_stuck",
        "_parse",
        "_refuse",
        "_answer",
        "_take_no_more",
        "_let_go",
        "_linger",
    }
    own |= {"_begin_again_without_upgrade", "_bound_pipeline", "_head_bytes"}
    for name in vars(HttpProtocol).keys() - own:
        assert hasattr(HttpToolsProtocol, name), name
    read = set(HttpToolsProtocol.__init__.__code__.co_names)
    assert {"parser", "pipeline", "cycle", "flow", "timeout_keep_alive_task", "headers", "scope"} <= read
    read = set(RequestResponseCycle.__init__.__code__.co_names)
    assert {"disconnected", "keep_alive", "message_event", "body", "more_body", "response_started"} <= read


MALFORMED = (
    b"garbage\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"FOO / HTTP/1.1\r\nhost: t\r\n\r\n",
    b"CONNECT example.org:443 HTTP/1.1\r\nhost: t\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nhost: t\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nhost: t\r\n\r\n",
    b"GET / HTTP/9.9\r\nhost: t\r\n\r\n",
    post(length=-1),
    post(headers="content-length: 3\r\n"),
    post(headers="transfer-encoding: chunked\r\n"),
    CHUNKED + b"xyz\r\n",
)


async def test_malformed_http_is_a_400_with_envelope_and_id(orchestrator: FakeOrchestrator) -> None:
    async with serving(orchestrator) as server:
        for data in MALFORMED:
            client = await server.connect()
            client.send(data)
            answer = await client.answer()
            assert (answer.status, answer.code, answer.headers["connection"]) == (400, "invalid_value", "close"), data
            assert await client.end() == b""
    assert orchestrator.submitted == []


async def test_a_body_that_breaks_while_it_is_read_is_answered_once_and_quietly(
    orchestrator: FakeOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(orchestrator) as server:
        client = await server.connect()
        client.send(CHUNKED + b"2\r\n{}\r\n")
        await asyncio.sleep(0.1)
        client.send(b"not a size\r\n")
        answer = await client.answer()
        assert (answer.status, answer.code, answer.headers["x-request-id"]) == (400, "invalid_value", "mine")
        assert await client.end() == b""
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("cut", [None, 20, -10])
async def test_an_offered_upgrade_to_http2_is_ignored_and_the_body_kept(
    orchestrator: FakeOrchestrator, cut: int | None
) -> None:
    offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
    async with serving(orchestrator) as server:
        client = await server.connect()
        for seed in (1, 2):
            data = post(b'{"prompt":"x","seed":%d}' % seed, headers=offer)
            client.send(data[:cut])
            if cut is not None:
                await asyncio.sleep(0.05)
                client.send(data[cut:])
            answer = await client.answer()
            assert (answer.status, json.loads(answer.body)["data"][0]["seed"]) == (200, seed)
        client.send(b"GET /livez HTTP/1.1\r\nhost: t\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert (await client.answer()).status == 200


async def test_pipelined_requests_are_answered_in_order(orchestrator: FakeOrchestrator) -> None:
    async with serving(orchestrator) as server:
        client = await server.connect()
        client.send(b"".join(post(b'{"prompt":"x","seed":%d}' % seed) for seed in range(40)))
        seeds = [json.loads((await client.answer()).body)["data"][0]["seed"] for _ in range(40)]
        assert seeds == list(range(40))


@pytest.mark.parametrize(
    "behind", [b"", post(), post()[:-5], post()[:40], post(b" " * 300_000), b"garbage\r\n\r\n"], ids=len
)
async def test_a_client_that_goes_is_noticed_whatever_it_had_pipelined(
    orchestrator: FakeOrchestrator, behind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    orchestrator.hold = asyncio.Event()
    async with serving(orchestrator) as server:
        client = await server.connect()
        client.send(post() + behind)
        await asyncio.wait_for(orchestrator.arrived.wait(), WAIT_S)
        await asyncio.sleep(0.1)
        client.writer.close()
        await until(lambda: orchestrator.streams[0].closed)
        await until(lambda: not server.server.server_state.tasks)
    assert len(orchestrator.submitted) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("behind", [post(b" " * 300_000), b"garbage\r\n\r\n", b"GET /" + b"x" * 400_000], ids=len)
async def test_what_is_too_much_or_broken_behind_a_request_costs_the_connection_but_not_its_answer(
    orchestrator: FakeOrchestrator, behind: bytes
) -> None:
    orchestrator.hold = asyncio.Event()
    async with serving(orchestrator) as server:
        client = await server.connect()
        client.send(post() + behind)
        await asyncio.wait_for(orchestrator.arrived.wait(), WAIT_S)
        await asyncio.sleep(0.1)
        orchestrator.hold.set()
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.end() == b""
    assert len(orchestrator.submitted) == 1


LARGE_HEADS = (
    b"GET /livez HTTP/1.1\r\nhost: t\r\nx-a: " + b"a" * 70_000 + b"\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nhost: t\r\n" + b"x-a: aaaaaaaa\r\n" * 5_000 + b"\r\n",
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: t\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nhost: t\r\nx-a: " + b"a" * 400_000,
    post(headers=f"x-a: {'a' * 70_000}\r\n"),
    CHUNKED + b"2\r\n{}\r\n0\r\n" + b"x-trailer: a\r\n" * 30_000,
)


async def test_a_head_over_64_kib_is_431(orchestrator: FakeOrchestrator) -> None:
    async with serving(orchestrator) as server:
        for data in LARGE_HEADS:
            client = await server.connect()
            client.send(data)
            answer = await client.answer()
            assert (answer.status, answer.code) == (431, "headers_too_large"), data[:100]
            assert await client.end() == b""


async def test_a_large_head_and_a_large_body_are_fine(orchestrator: FakeOrchestrator) -> None:
    async with serving(orchestrator) as server:
        client = await server.connect()
        for _ in range(2):
            client.send(post(BODY + b" " * 1_000_000, headers=f"x-a: {'a' * 60_000}\r\n"))
            assert (await client.answer()).status == 200


async def test_http_client_reads_the_413_of_a_large_body_and_can_go_on(orchestrator: FakeOrchestrator) -> None:
    def ask(port: int) -> list[tuple[int, bytes]]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        answers = []
        for body in (bytes(50 << 20), iter([bytes(1 << 20)] * 20), BODY):
            connection.request("POST", "/v1/images/generations", body, {"content-type": "application/json"})
            response = connection.getresponse()
            answers.append((response.status, response.read()))
        connection.close()
        return answers

    async with serving(orchestrator, max_body_size=1 << 20) as server:
        answers = await asyncio.to_thread(ask, server.port)
    assert [status for status, _ in answers] == [413, 413, 200]
    assert json.loads(answers[0][1])["error"]["code"] == "payload_too_large"


@pytest.mark.parametrize("sent", [post(length=1000), post()[:60]])
async def test_a_request_that_is_still_arriving_when_the_server_ends_is_told_so_at_once(
    orchestrator: FakeOrchestrator, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    orchestrator.hold = asyncio.Event()
    async with serving(orchestrator) as server:
        working, arriving = await server.connect(), await server.connect()
        working.send(post())
        arriving.send(sent)
        await asyncio.wait_for(orchestrator.arrived.wait(), WAIT_S)
        await asyncio.sleep(0.1)
        server.server.should_exit = True
        answer = await arriving.answer()
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "draining", "5")
        assert await arriving.end() == b""
        orchestrator.hold.set()
        assert (await working.answer()).status == 200
        await asyncio.wait_for(server.running, WAIT_S)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_request_that_does_not_go_on_is_408(orchestrator: FakeOrchestrator) -> None:
    async with serving(orchestrator, ImpatientProtocol) as server:
        for sent in (b"GET /livez HTT", post()[:60], post(length=1000), post(b"", length=30)):
            client = await server.connect()
            client.send(sent)
            answer = await client.answer()
            assert (answer.status, answer.code, answer.headers["connection"]) == (408, "read_timeout", "close")
            assert await client.end() == b""


async def test_a_head_that_drips_is_408_but_a_body_may_take_its_time(orchestrator: FakeOrchestrator) -> None:
    async def drip(client: Client, data: bytes) -> None:
        for byte in data:
            client.send(bytes([byte]))
            await asyncio.sleep(0.05)

    async with serving(orchestrator, ImpatientProtocol) as server:
        head, body = await server.connect(), await server.connect()
        body.send(post(b"", length=len(BODY)))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(drip(head, post()[:30]))
            tasks.create_task(drip(body, BODY))
            answers = await head.answer(), await body.answer()
        assert [answer.status for answer in answers] == [408, 200]


async def test_silent_connections_and_bodies_of_answered_requests_do_not_stay(orchestrator: FakeOrchestrator) -> None:
    async with serving(orchestrator, ImpatientProtocol, max_body_size=1024) as server:
        silent, refused = await server.connect(), await server.connect()
        refused.send(post(length=2000))
        assert (await refused.answer()).code == "payload_too_large"
        assert await silent.end() == b""
        assert await refused.end() == b""


async def test_a_client_that_does_not_take_its_answer_is_cut_off(orchestrator: FakeOrchestrator) -> None:
    orchestrator.payload = bytes(16 << 20)  # more than the kernel keeps for a client
    async with serving(orchestrator, ImpatientProtocol) as server:
        client = await server.connect()
        client.send(post())
        await orchestrator.arrived.wait()
        await until(lambda: not server.server.server_state.connections)
        with contextlib.suppress(ConnectionError):
            assert len(await client.end()) < 16 << 20


async def test_a_client_that_waits_for_its_picture_is_not_hurried(orchestrator: FakeOrchestrator) -> None:
    orchestrator.hold = asyncio.Event()
    async with serving(orchestrator, ImpatientProtocol) as server:
        client = await server.connect()
        client.send(post())
        await asyncio.sleep(3 * ImpatientProtocol.read_timeout_s)
        orchestrator.hold.set()
        assert (await client.answer()).status == 200
        await asyncio.sleep(2 * ImpatientProtocol.read_timeout_s)  # idle and kept alive
        client.send(post())
        assert (await client.answer()).status == 200
