"""Tells a hung replica from a slow one: pure bookkeeping over heartbeats, `now` as an argument.

A replica is busy with a phase (load, encode, step, decode) until its heartbeat shows another phase or a higher count
of forwards. How long such stretches last is learned per phase, over all replicas of a stage; a stretch of many times
the longest ever seen is a hang. Larger pictures than any seen before may take longer, with the square of their size;
what the cost model expects of a step is allowed for, and before anything was measured the warm-up is what is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triptych.messages import HEARTBEAT_INTERVAL_S, Address, WarmUp

__all__ = ["PACED_LIMITS", "PhaseLimit", "PhaseTimes", "ServedTime", "Watch", "WatchdogLimits"]

_IDLE = "idle"
_SMALL_ATTENTION = 1 / 8  # most that attention, which grows with the square, takes of a step of the warm-up picture


@dataclass(frozen=True, slots=True)
class PhaseLimit:
    """No stretch shorter than `floor_s` is a hang; nor than `first_s` while nothing is known. Seconds.

    `grows` says whether a larger picture takes longer.
    """

    floor_s: float
    first_s: float
    grows: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogLimits:
    """When a replica counts as hung; all times in seconds.

    A phase may last `factor` times the longest stretch seen. The defaults suit large models on CPUs, where the first
    step can take many minutes; they cost time only when a replica hangs before anything is known. `idle` holds
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


PACED_LIMITS = WatchdogLimits(step=PhaseLimit(3.0, 3.0, grows=False))
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
        self._warm_up: WarmUp | None = None

    def warmed_up(self, warm_up: WarmUp) -> None:
        """A replica has made its first picture; of several the slowest counts."""
        if self._warm_up is None or warm_up.seconds > self._warm_up.seconds:
            self._warm_up = warm_up

    def learn(self, phase: str, seconds: float, work: float) -> None:
        """A stretch of this phase has ended."""
        slowest_s, largest = self._seen.get(phase, (0.0, 0.0))
        self._seen[phase] = max(slowest_s, seconds), max(largest, work)

    def bound_s(self, phase: str, work: float, *, expected_step_s: float | None = None) -> float:
        """How long a stretch may last; `expected_step_s` is what the cost model expects of a step of this work."""
        limit, factor = self.limits.of(phase), self.limits.factor
        if phase != "step" or not limit.grows:
            expected_step_s = None
        if phase in self._seen:
            longest_s = self._longest_s(phase, work if limit.grows else 0.0, expected_step_s)
            return max(limit.floor_s, factor * longest_s)
        first_s = self._first_s(phase, work)
        if first_s is None:
            return limit.first_s
        return min(limit.first_s, max(limit.floor_s, factor * max(first_s, expected_step_s or 0.0)))

    def _longest_s(self, phase: str, work: float, expected_step_s: float | None) -> float:
        """The longest stretch to be expected after some were seen."""
        slowest_s, largest = self._seen[phase]
        if not work > largest > 0:
            return max(slowest_s, expected_step_s or 0.0)
        growth = work / largest
        once_s = 0.0 if self._warm_up is None else self._warm_up.seconds  # kernels are chosen anew for a new size
        if expected_step_s is not None:  # exact where heartbeats are not, but grown only with the work
            return once_s + max(slowest_s, expected_step_s * growth)
        return once_s + (slowest_s + HEARTBEAT_INTERVAL_S) * growth**2

    def _first_s(self, phase: str, work: float) -> float | None:
        """The longest stretch to be expected by the warm-up alone; None if it says nothing."""
        warm_up = self._warm_up
        if warm_up is None or phase in ("load", _IDLE):
            return None
        growth = max(1.0, work / warm_up.work)
        part_s = warm_up.step_s if phase == "step" else warm_up.decode_s  # pictures are encoded as they are decoded
        return warm_up.seconds + part_s * growth * (1 + growth * _SMALL_ATTENTION)


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

    def ready(self, now: float, warm_up: WarmUp | None = None) -> None:
        """The load is over, with the first picture if one was made."""
        self._changed(now)
        if warm_up is not None:
            self._times.warmed_up(warm_up)
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

    def verdict(
        self, now: float, *, is_stopped: Callable[[], bool], expected_step_s: float | None = None
    ) -> str | None:
        """Why the replica must be replaced, or None. `is_stopped` tells whether the kernel holds it (SIGSTOP).

        `expected_step_s` is what a cost model expects of the longest step that runs there.
        """
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
        work = max(self._units.values(), default=0.0)
        bound_s = self._times.bound_s(phase, work, expected_step_s=expected_step_s)
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
