"""Tells a hung replica from a slow one: pure bookkeeping over heartbeats, `now` as an argument.

A replica is busy with a phase (load, encode, step, decode) until its heartbeat shows another phase or a higher count
of forwards. How long such stretches last is learned per phase, over all replicas of a stage; a stretch of many times
the longest ever seen is a hang. Larger pictures than any seen before may take longer, with the square of their size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triptych.messages import HEARTBEAT_INTERVAL_S, Address

__all__ = ["PACED_LIMITS", "PhaseLimit", "PhaseTimes", "ServedTime", "Watch", "WatchdogLimits"]

_IDLE = "idle"


@dataclass(frozen=True, slots=True)
class PhaseLimit:
    """No stretch shorter than `floor_s` is a hang; nor than `first_s` while none has been measured. Seconds."""

    floor_s: float
    first_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogLimits:
    """When a replica counts as hung; all times in seconds.

    A phase may last `factor` times the longest stretch seen. The defaults suit large models on CPUs, where the first
    step can take many minutes; they cost time only when a replica hangs before anything was measured. `idle` holds
    while units are in the replica and no model runs: their outputs are being encoded.
    """

    load: PhaseLimit = PhaseLimit(300.0, 3600.0)
    encode: PhaseLimit = PhaseLimit(60.0, 1800.0)
    step: PhaseLimit = PhaseLimit(30.0, 1800.0)
    decode: PhaseLimit = PhaseLimit(60.0, 1800.0)
    idle: PhaseLimit = PhaseLimit(600.0, 1800.0)
    factor: float = 10.0
    stopped_after_s: float = 3.0  # silence after which a process that the kernel shows as stopped is given up
    silence_s: float = 30.0  # silence of a loaded replica that is not stopped: some C code may hold the interpreter
    leave_s: float = 10.0  # from the end of the last unit to the exit of a replica that was asked to leave

    def of(self, phase: str) -> PhaseLimit:
        """Limits of a phase; a plug-in's own word is treated as `decode`."""
        known = {"load": self.load, "encode": self.encode, "step": self.step, _IDLE: self.idle}
        return known.get(phase, self.decode)


PACED_LIMITS = WatchdogLimits(step=PhaseLimit(3.0, 3.0))
"""For engines that show progress at least every half second, however long a step is."""


class ServedTime:
    """Seconds in which the event loop turned: a clock that stands still while the loop does.

    The loop calls `tick` every `interval_s`; of a longer pause only twice that counts.
    """

    def __init__(self, now: float, *, interval_s: float) -> None:
        self._most_s = 2 * interval_s
        self._at = now
        self._total_s = 0.0

    def tick(self, now: float) -> float:
        """The loop runs; returns `read`."""
        self._total_s = self.read(now)
        self._at = now
        return self._total_s

    def read(self, now: float) -> float:
        """Seconds served so far."""
        return self._total_s + min(max(0.0, now - self._at), self._most_s)


class PhaseTimes:
    """What all replicas of a stage taught about the length of phases; work is pixels times frames."""

    def __init__(self, limits: WatchdogLimits) -> None:
        self.limits = limits
        self._seen: dict[str, tuple[float, float]] = {}  # phase -> slowest stretch in seconds, largest work

    def learn(self, phase: str, seconds: float, work: float) -> None:
        """A stretch of this phase has ended."""
        slowest_s, largest = self._seen.get(phase, (0.0, 0.0))
        self._seen[phase] = max(slowest_s, seconds), max(largest, work)

    def bound_s(self, phase: str, work: float) -> float:
        """How long a stretch may last."""
        limit = self.limits.of(phase)
        if phase not in self._seen:
            return limit.first_s
        slowest_s, largest = self._seen[phase]
        growth = work / largest if work > largest > 0 else 1.0
        return max(limit.floor_s, self.limits.factor * slowest_s * growth**2)


class Watch:
    """One incarnation, watched from the start of its process. Times are readings of `ServedTime`."""

    def __init__(self, times: PhaseTimes, now: float) -> None:
        self._times = times
        self._steps = 0
        self._phase = "load"
        self._loaded = False
        self._leaving = False
        self._units: dict[Address, float] = {}
        self._heard_at = self._changed_at = now

    def heard(self, steps: int, phase: str, now: float) -> None:
        """A heartbeat."""
        self._heard_at = now
        if not self._loaded:
            phase = self._phase
        if (steps, phase) != (self._steps, self._phase):
            self._changed(now)
            self._steps, self._phase = steps, phase

    def ready(self, now: float) -> None:
        """The load is over."""
        self._changed(now)
        self._heard_at, self._phase, self._loaded = now, _IDLE, True

    def sent(self, address: Address, work: float, now: float) -> None:
        """A unit is on its way to the replica."""
        if self._busy_with() is None:
            self._changed_at = now
        self._units[address] = work

    def ended(self, address: Address, now: float) -> None:
        """A unit is out of the replica."""
        if address in self._units:
            self._changed(now)
            del self._units[address]

    def leave(self, now: float) -> None:
        """The replica was asked to finish what it has and to exit."""
        self._leaving = True
        if self._busy_with() is None:
            self._changed_at = now

    def verdict(self, now: float, *, is_stopped: Callable[[], bool]) -> str | None:
        """Why the replica must be replaced, or None. `is_stopped` tells whether the kernel holds it (SIGSTOP)."""
        limits = self._times.limits
        silent_s, still_s = now - self._heard_at, now - self._changed_at
        if silent_s >= limits.stopped_after_s and is_stopped():
            return f"hung: stopped by a signal and silent for {silent_s:.0f} s"
        if self._loaded and silent_s >= limits.silence_s:
            return f"hung: no heartbeat for {silent_s:.0f} s"
        phase = self._busy_with()
        if phase is None:
            if self._leaving and still_s >= limits.leave_s:
                return f"hung: did not leave within {limits.leave_s:g} s of its last unit"
            return None
        bound_s = self._times.bound_s(phase, max(self._units.values(), default=0.0))
        if still_s < bound_s:
            return None
        return f"hung: no progress in phase {phase} for {still_s:.0f} s (limit {bound_s:.0f} s)"

    def _busy_with(self) -> str | None:
        return None if self._phase == _IDLE and not self._units else self._phase

    def _changed(self, now: float) -> None:
        # A stretch is seen up to one interval too long. Of several units the smallest may have moved: only its size
        # is known to be served in this time.
        if (phase := self._busy_with()) is not None:
            seconds = max(0.0, now - self._changed_at - HEARTBEAT_INTERVAL_S)
            self._times.learn(phase, seconds, min(self._units.values(), default=0.0))
        self._changed_at = now
