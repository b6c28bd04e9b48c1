"""Draw scenes with antialiased edges: every shape is a signed distance, and a pixel's share of it follows from that.

`render` makes the training pictures and the ground truth of the checker's tests; `coverage` also makes its templates.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from training.shapes.scenes import BACKGROUNDS, COLORS, Item, Scene

__all__ = ["SIDE", "Mask", "Picture", "coverage", "render"]

SIDE: Final = 64
Picture = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.float32]
Point = tuple[float, float]


def _star() -> list[Point]:
    arms = []
    for k in range(10):
        reach = 1.08 if k % 2 == 0 else 0.46
        arms.append((reach * math.sin(k * math.pi / 5), 0.06 - reach * math.cos(k * math.pi / 5)))
    return arms


def _heart() -> list[Point]:
    outline = []
    for t in np.linspace(0, 2 * math.pi, 28, endpoint=False):
        curve = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        outline.append((16 * math.sin(t) ** 3 / 17, -(curve + 2.5) / 16))
    return outline


def _cross() -> list[Point]:
    arm = 0.32
    quarter = [(-arm, -1.0), (arm, -1.0), (arm, -arm)]
    points = []
    for turns in range(4):
        for x, y in quarter:
            for _ in range(turns):
                x, y = -y, x
            points.append((x, y))
    return points


POLYGONS: Final[dict[str, list[Point]]] = {
    "triangle": [(0, -0.95), (1, 0.8), (-1, 0.8)],
    "star": _star(),
    "heart": _heart(),
    "cross": _cross(),
    "diamond": [(0, -1.1), (0.85, 0), (0, 1.1), (-0.85, 0)],
}


def _polygon_distance(x: Mask, y: Mask, points: list[Point]) -> Mask:
    """Signed distance to a closed polygon, negative inside."""
    nearest = np.full(x.shape, 1e9, np.float32)
    sign = np.ones(x.shape, np.float32)
    for (ax, ay), (bx, by) in zip(points, points[-1:] + points[:-1], strict=True):
        ex, ey, wx, wy = bx - ax, by - ay, x - ax, y - ay
        along = np.clip((wx * ex + wy * ey) / (ex * ex + ey * ey), 0, 1)
        nearest = np.minimum(nearest, (wx - ex * along) ** 2 + (wy - ey * along) ** 2)
        below, under, left = y >= ay, y < by, ex * wy > ey * wx
        sign = np.where((below & under & left) | (~below & ~under & ~left), -sign, sign)
    return np.asarray(sign * np.sqrt(nearest), np.float32)


def _distance(shape: str, x: Mask, y: Mask) -> Mask:
    """Signed distance to the unit shape."""
    if shape == "circle":
        return np.asarray(np.hypot(x, y) - 1, np.float32)
    if shape == "ring":
        return np.asarray(np.abs(np.hypot(x, y) - 0.78) - 0.24, np.float32)
    if shape == "square":
        return np.asarray(np.maximum(np.abs(x), np.abs(y)) - 0.88, np.float32)
    return _polygon_distance(x, y, POLYGONS[shape])


def coverage(item: Item, *, side: int = SIDE) -> Mask:
    """Share of every pixel that the item covers, `[side, side]` in 0..1."""
    grid = (np.arange(side, dtype=np.float32) + 0.5) / side
    x, y = (
        axis.astype(np.float32) for axis in np.meshgrid((grid - item.x) / item.radius, (grid - item.y) / item.radius)
    )
    near = (np.abs(x) < 1.4) & (np.abs(y) < 1.4)
    shares = np.zeros((side, side), np.float32)
    shares[near] = np.clip(0.5 - _distance(item.shape, x[near], y[near]) * item.radius * side, 0, 1)
    return shares


def render(scene: Scene, *, side: int = SIDE, noise: np.random.Generator | None = None) -> Picture:
    """The scene as `[side, side, 3]`; with `noise` every colour is a little off, as no two reds are the same."""

    def tint(rgb: tuple[int, int, int]) -> npt.NDArray[np.float32]:
        shift = noise.integers(-5, 6, 3) if noise is not None else np.zeros(3)
        return np.asarray(np.asarray(rgb) + shift, np.float32)

    canvas = np.broadcast_to(tint(BACKGROUNDS[scene.background]), (side, side, 3)).copy()
    outer_first = reversed(scene.items) if scene.arrangement == "inside" else scene.items
    for item in outer_first:
        share = coverage(item, side=side)[..., None]
        canvas = canvas * (1 - share) + tint(COLORS[item.color]) * share
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8)
