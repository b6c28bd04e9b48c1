"""What the contract is tested against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Where a server is, and a key that lets a caller in."""

    url: str
    key: str
