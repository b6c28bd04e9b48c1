"""Which accelerators this process may see, found without importing torch.

NVIDIA cards come from NVML, filtered by CUDA_VISIBLE_DEVICES the way CUDA does; ROCm cards from a short-lived helper
process that asks torch. A torch build for CPUs alone can use neither, and then none are reported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from triptych.errors import ConfigError

__all__ = ["Accelerator", "discover_accelerators"]

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_HELPER_TIMEOUT_S = 60.0
_HELPER = """
import json, torch
count = torch.cuda.device_count()
print(json.dumps([[torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i)] for i in range(count)]))
"""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One visible device; `visible_name` is what the visible-devices variable of a child must say to get it alone."""

    visible_name: str
    name: str
    free_bytes: int | None = None
    total_bytes: int | None = None

    @property
    def label(self) -> str:
        """Name, and where it is listed if that is not obvious."""
        return f"{self.name} ({self.visible_name})"


def discover_accelerators(environ: Mapping[str, str]) -> tuple[tuple[Accelerator, ...], tuple[str, ...]]:
    """Visible accelerators in logical order, and warnings. Raises `ConfigError` for a bad CUDA_VISIBLE_DEVICES."""
    build = _torch_build()
    if build == "cpu":
        cards = _nvml_cards()
        return (), (f"{len(cards)} GPU(s) are not used: the installed torch is a CPU build",) if cards else ()
    if build.startswith("rocm"):
        return (_ask_torch(), ()) if Path("/dev/kfd").exists() else ((), ())
    return _visible(_nvml_cards(), environ.get(_VARIABLE)), ()


def _torch_build() -> str:
    """The local part of torch's version: `cpu`, `cu128`, `rocm6.4`, or nothing."""
    try:
        return version("torch").partition("+")[2]
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class _Card:
    uuid: str
    name: str
    free_bytes: int | None
    total_bytes: int | None


def _nvml_cards() -> tuple[_Card, ...]:
    import pynvml  # large, and a wrong configuration is told without it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(_card(handle) for handle in handles)
    finally:
        pynvml.nvmlShutdown()


def _card(handle: object) -> _Card:
    import pynvml

    free = total = None
    with suppress(pynvml.NVMLError):  # not every driver tells, unified-memory boards for one
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        free, total = int(memory.free), int(memory.total)
    return _Card(
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        name=str(pynvml.nvmlDeviceGetName(handle)),
        free_bytes=free,
        total_bytes=total,
    )


def _visible(cards: tuple[_Card, ...], variable: str | None) -> tuple[Accelerator, ...]:
    if variable is None or not cards:
        return tuple(_accelerator(str(index), card) for index, card in enumerate(cards))
    visible: list[Accelerator] = []
    taken: set[str] = set()
    for token in (part.strip() for part in variable.split(",")):
        if token in ("", "-1", "NoDevFiles"):  # CUDA stops reading here: the usual ways to hide every card
            break
        card = _named(token, cards)
        if card is None:
            raise ConfigError(
                "names a device that this machine does not have",
                where=_VARIABLE,
                found=token,
                wanted=f"0..{len(cards) - 1}, or the UUID of a card",
            )
        if card.uuid in taken and not token.startswith("MIG-"):
            raise ConfigError("names a device twice", where=_VARIABLE, found=variable, wanted="distinct devices")
        taken.add(card.uuid)
        visible.append(_accelerator(token, card))
    return tuple(visible)


def _named(token: str, cards: tuple[_Card, ...]) -> _Card | None:
    if token.isascii() and token.isdigit():
        return cards[int(token)] if int(token) < len(cards) else None
    if token.startswith("MIG-"):
        return _Card(uuid=token, name="MIG instance", free_bytes=None, total_bytes=None)
    matches = [card for card in cards if card.uuid.startswith(token)]
    return matches[0] if len(matches) == 1 else None


def _accelerator(token: str, card: _Card) -> Accelerator:
    return Accelerator(visible_name=token, name=card.name, free_bytes=card.free_bytes, total_bytes=card.total_bytes)


@cache
def _ask_torch() -> tuple[Accelerator, ...]:
    """What torch of this environment sees. Its numbers already honour the visible-devices variables."""
    command = [sys.executable, "-c", _HELPER]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_HELPER_TIMEOUT_S)
        rows = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"torch could not be asked for its devices: {error}", where="/dev/kfd") from error
    return tuple(
        Accelerator(visible_name=str(index), name=name, free_bytes=free, total_bytes=total)
        for index, (name, free, total) in enumerate(rows)
    )
