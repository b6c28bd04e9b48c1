"""The requests of a run and when each is due.

A dataset makes `BenchRequest`s; `arrival_offsets` says when each is sent, counted from the start of the run;
`with_slo_targets` gives each its latency target from the times of the warm-up requests.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

__all__ = ["BenchRequest", "InputImage", "arrival_offsets", "with_slo_targets"]


@dataclass(frozen=True, slots=True)
class InputImage:
    """An encoded picture that travels with a request."""

    name: str
    mime: str
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One request. Sizes in pixels, `timestamp_s` from a trace, `slo_ms` a latency target. None: the server decides."""

    prompt: str
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    fps: int | None = None
    num_inference_steps: int | None = None
    seed: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    images: tuple[InputImage, ...] = ()
    timestamp_s: float | None = None
    slo_ms: float | None = None

    def parameters(self) -> dict[str, Any]:
        """The common parameters that are set, under their names on the wire; without prompt and pictures."""
        names = (
            "negative_prompt",
            "width",
            "height",
            "num_frames",
            "fps",
            "num_inference_steps",
            "seed",
            "guidance_scale",
            "true_cfg_scale",
        )
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def arrival_offsets(requests: Sequence[BenchRequest], *, request_rate: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is due; the first is due at 0.

    Timestamps of a trace are kept (relative to the first). Otherwise a Poisson process of `request_rate` per second,
    the same for the same seed; an infinite rate means all at once.
    """
    stamps = [request.timestamp_s for request in requests if request.timestamp_s is not None]
    if stamps and len(stamps) == len(requests):
        first = min(stamps)
        return [stamp - first for stamp in stamps]
    if math.isinf(request_rate):
        return [0.0] * len(requests)
    rng = random.Random(seed)
    gaps = (rng.expovariate(request_rate) for _ in requests[1:])
    return list(accumulate(gaps, initial=0.0))[: len(requests)]


def with_slo_targets(
    requests: Sequence[BenchRequest], warmups: Sequence[tuple[BenchRequest, float]], *, scale: float
) -> list[BenchRequest]:
    """Requests with `slo_ms` filled in where a trace gave none.

    The target is `scale` times the expected latency: the median warm-up latency (seconds) per unit of work times the
    request's work, where work is pixels x frames x steps. Where only some requests name a size, the others get none.
    """
    sized = any(request.width is not None for request in requests)
    unit_ms = [
        1e3 * latency_s / work for request, latency_s in warmups if (work := _work(request, sized=sized)) is not None
    ]
    if not unit_ms:
        return list(requests)
    base_ms = statistics.median(unit_ms)
    return [
        request
        if request.slo_ms is not None or (work := _work(request, sized=sized)) is None
        else replace(request, slo_ms=base_ms * work * scale)
        for request in requests
    ]


def _work(request: BenchRequest, *, sized: bool) -> float | None:
    if sized and (request.width is None or request.height is None):
        return None
    area = (request.width or 1) * (request.height or 1) if sized else 1
    return float(area * (request.num_frames or 1) * (request.num_inference_steps or 1))
