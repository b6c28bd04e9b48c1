from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from api_fakes import FakeOrchestrator, client_of, make_app


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def orchestrator() -> FakeOrchestrator:
    return FakeOrchestrator()


@pytest.fixture
async def client(orchestrator: FakeOrchestrator) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app(orchestrator)) as client:
        yield client
