"""Shared by the orchestrator's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROUTING = Path(__file__).parents[2] / "benchmarks/routing"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The capacity planning program: a core on a virtual clock."""
    monkeypatch.syspath_prepend(str(ROUTING))
    import simulate

    yield simulate
    sys.modules.pop("simulate", None)
