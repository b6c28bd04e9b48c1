"""What decides how long a unit takes: its amount of work, and how time scales with it over amounts seen so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triptych.messages import SamplingParams

__all__ = ["Scaling", "Work", "work_of"]

_DEFAULT_PIXELS = 1024 * 1024  # only the ratio between units matters, and a model without sizes has one


class Work(NamedTuple):
    """Pixels per frame, frames, denoising steps, and forwards per step (guidance branches; 0: the pipeline's own)."""

    pixels: int
    frames: int
    steps: int
    branches: int

    @property
    def features(self) -> tuple[float, float, float, float]:
        """What time may grow with: nothing, forwards, decoded volume, denoised volume."""
        forwards = self.steps * (self.branches or 2)
        volume = self.pixels * self.frames
        return (1.0, forwards, volume, volume * forwards)


def work_of(params: SamplingParams) -> Work:
    """Amount of work of a unit with these parameters. An image-to-image `strength` runs that part of the steps."""
    steps = params.num_inference_steps or 1
    if params.strength is not None:
        steps = max(1, round(steps * params.strength))
    guidance, true_cfg = params.guidance_scale, params.true_cfg_scale
    branches = 0
    if guidance is not None or true_cfg is not None:
        guided = (guidance is not None and guidance > 1) or (
            true_cfg is not None and true_cfg > 1 and params.negative_prompt is not None
        )
        branches = 2 if guided else 1
    pixels = params.width * params.height if params.width and params.height else _DEFAULT_PIXELS
    return Work(pixels, params.num_frames or 1, steps, branches)


_PRIOR = (0.05, 0.05, 0.05, 0.85)
_PRIOR_WEIGHT = 0.05
_SWEEPS = 100


class Scaling:
    """Seconds as a sum of non-negative parts, one per feature, fitted to relative errors over known amounts of work.

    The shares of the parts are drawn weakly towards mostly denoising, which is what decides while a single amount is
    known. Fitted by coordinate descent on the 4 x 4 normal equations: well posed for any points, and no part can turn
    negative and make an extrapolation absurd.
    """

    def __init__(self, points: Sequence[tuple[Work, float]]) -> None:
        rows = [[feature / seconds for feature in work.features] for work, seconds in points]
        size = len(_PRIOR)
        means = [sum(row[part] for row in rows) / len(rows) for part in range(size)]
        rows = [[value / mean for value, mean in zip(row, means, strict=True)] for row in rows]
        gram = [[sum(row[a] * row[b] for row in rows) for b in range(size)] for a in range(size)]
        target = [sum(row[part] for row in rows) + _PRIOR_WEIGHT * _PRIOR[part] for part in range(size)]
        shares = list(_PRIOR)
        for _ in range(_SWEEPS):
            for part in range(size):
                others = sum(gram[part][b] * shares[b] for b in range(size) if b != part)
                shares[part] = max(0.0, (target[part] - others) / (gram[part][part] + _PRIOR_WEIGHT))
        self._coefficients = [share / mean for share, mean in zip(shares, means, strict=True)]

    def seconds(self, work: Work) -> float:
        """Expected seconds for any amount of work."""
        return sum(c * feature for c, feature in zip(self._coefficients, work.features, strict=True))
