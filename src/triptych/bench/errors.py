"""What ends a measurement before there is anything to report.

Kept apart from the load generator and the server launcher, so that the command line can name these failures without
importing an HTTP client.
"""

from __future__ import annotations

__all__ = ["ServerStartError", "ServerUnreachable"]


class ServerUnreachable(Exception):
    """Nothing answers at the base URL; the message is one readable line."""


class ServerStartError(Exception):
    """The server did not come up; the message ends with the tail of its log."""
