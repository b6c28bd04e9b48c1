"""The further processes of a replica with several devices: forked by the leader, ended with it.

The leader forks its followers before it loads anything: then there are neither threads nor a CUDA context that a fork
would break, and a follower costs no import. Its parent is the leader itself, so the kernel's parent-death signal is
enough to end a follower, even a stopped one. A follower that dies takes the leader with it, and so the whole replica:
a rank that is missing would be waited for for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import setproctitle

__all__ = ["Follower", "Followers", "fork_ranks"]

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_EXIT_FAILED = 1


class Follower:
    """One follower as its leader sees it: its pid, and a channel that carries whole messages."""

    def __init__(self, rank: int, pid: int, channel: Connection) -> None:
        self.rank = rank
        self.pid = pid
        self.channel = channel
        self.pidfd = os.pidfd_open(pid)


class Followers(tuple[Follower, ...]):
    """All followers of a leader, in the order of their ranks."""

    closing = False

    def watch(self) -> None:
        """End this process as soon as one of them ends; runs on a thread of its own."""
        poll = select.poll()
        by_descriptor = {follower.pidfd: follower for follower in self}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        ended = by_descriptor[poll.poll()[0][0]]
        if not self.closing:
            _log.error("rank %d (pid %d) has died, and the replica ends with it", ended.rank, ended.pid)
            os._exit(_EXIT_FAILED)

    def close(self) -> None:
        """Let them end, while this process lives on (for tests and embedding)."""
        self.closing = True
        for follower in self:
            follower.channel.close()
        for follower in self:
            os.waitpid(follower.pid, 0)
            os.close(follower.pidfd)


def fork_ranks(count: int, title: str, serve: Callable[[int, Connection], None]) -> Followers:
    """Fork ranks 1 to `count`; each runs `serve(rank, channel)` and ends with it. Call it before threads start."""
    forked: list[Follower] = []
    leader = os.getpid()
    for rank in range(1, count + 1):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _follow(leader, rank, theirs, title, serve)
        theirs.close()
        forked.append(Follower(rank, pid, Connection(ours.detach())))
    followers = Followers(forked)
    if followers:
        threading.Thread(target=followers.watch, name="followers", daemon=True).start()
    return followers


def _follow(
    leader: int, rank: int, channel: socket.socket, title: str, serve: Callable[[int, Connection], None]
) -> None:
    status = _EXIT_FAILED
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == leader:  # else it died before the line above
            # As in the leader: signals to the process group are the server's affair.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            kept = channel.detach()
            # The leader's socket to the server above all: that must see its end when the leader ends.
            _close_all_but(kept)
            setproctitle.setproctitle(f"{title} rank {rank}")
            serve(rank, Connection(kept))
            status = 0
    except EOFError:  # the leader has closed the channel, or ended
        status = 0
    except Exception:  # noqa: BLE001 - whatever it is, this process ends with it
        _log.exception("rank %d cannot go on", rank)
    finally:
        os._exit(status)


def _close_all_but(kept: int) -> None:
    for entry in list(Path("/proc/self/fd").iterdir()):
        if (number := int(entry.name)) > 2 and number != kept:
            with contextlib.suppress(OSError):  # the one that the listing had opened
                os.close(number)
