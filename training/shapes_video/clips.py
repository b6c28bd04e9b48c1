"""Clips of one plain shape that moves, grows, shrinks or stays: what they show, and their ground truth in pixels.

A `Clip` is drawn by `render`, worded by `captions`, and judged by `checker`. Lengths are fractions of the side.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from training.shapes.drawing import SIDE, Mask, coverage
from training.shapes.scenes import BACKGROUNDS, COLORS, SHAPES, Item, Scene, stands_out

__all__ = ["FRAMES", "MOTIONS", "Clip", "Path", "Video", "coverages", "render", "sample_clip", "sample_path"]

FRAMES: Final = 13
MOTIONS: Final[dict[str, tuple[int, int]]] = {  # direction across and down
    "right": (1, 0),
    "left": (-1, 0),
    "up": (0, -1),
    "down": (0, 1),
    "grow": (0, 0),
    "shrink": (0, 0),
    "still": (0, 0),
}
SHARES: Final = (1.2, 1.2, 1.2, 1.2, 1.0, 1.0, 0.6)
RADIUS: Final = (0.172, 0.188)  # of a shape that keeps its size
WAY: Final = (0.25, 0.26)  # from the middle to either end
SMALL: Final = (0.115, 0.125)  # where growing starts
LARGE: Final = (0.305, 0.32)  # where it ends
OFF_CENTER: Final = 0.01
Video = npt.NDArray[np.uint8]  # [frames, side, side, 3]


@dataclass(frozen=True, slots=True)
class Path:
    """What a clip shows but for its colours: a shape, its motion, and centre and radius in every frame."""

    shape: str
    motion: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    radius: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Clip:
    """A path in colours; `background` is white (gray under white) unless `named`, that is said in the caption."""

    path: Path
    color: str
    background: str
    named: bool

    @property
    def scene(self) -> Scene:
        """The middle frame."""
        middle, path = FRAMES // 2, self.path
        item = Item(path.shape, self.color, "medium", path.x[middle], path.y[middle], path.radius[middle])
        return Scene(self.background, "single", (item,))


def sample_path(rng: random.Random) -> Path:
    """A random shape on a random way."""
    motion = rng.choices(list(MOTIONS), SHARES)[0]
    across, down = MOTIONS[motion]
    way = rng.uniform(*WAY)
    x, y = (0.5 + rng.uniform(-OFF_CENTER, OFF_CENTER) for _ in range(2))
    first = last = rng.uniform(*RADIUS)
    if motion in ("grow", "shrink"):
        first, last = rng.uniform(*SMALL), rng.uniform(*LARGE)
        if motion == "shrink":
            first, last = last, first
    xs = np.linspace(x - across * way, x + across * way, FRAMES)
    ys = np.linspace(y - down * way, y + down * way, FRAMES)
    radii = np.linspace(first, last, FRAMES)
    return Path(rng.choice(SHAPES), motion, tuple(xs.tolist()), tuple(ys.tolist()), tuple(radii.tolist()))


def sample_clip(rng: random.Random, path: Path | None = None) -> Clip:
    """A random clip, or random colours for this path; the shape stands out from its background."""
    path = path or sample_path(rng)
    while True:
        color, named = rng.choice(list(COLORS)), rng.random() < 0.55
        background = rng.choice(list(BACKGROUNDS)) if named else "gray" if color == "white" else "white"
        if stands_out(color, background):
            return Clip(path, color, background, named)


def coverages(path: Path, *, side: int = SIDE) -> Mask:
    """Share of every pixel that the shape covers, `[frames, side, side]`."""
    frames: list[Mask] = []
    for k, (x, y, radius) in enumerate(zip(path.x, path.y, path.radius, strict=True)):
        same = k > 0 and path.motion == "still"
        frames.append(frames[0] if same else coverage(Item(path.shape, "", "medium", x, y, radius), side=side))
    return np.stack(frames)


def render(clip: Clip, *, side: int = SIDE) -> Video:
    """The clip in its exact colours."""
    color, background = (np.asarray(rgb, np.float32) for rgb in (COLORS[clip.color], BACKGROUNDS[clip.background]))
    pixels = background + (color - background) * coverages(clip.path, side=side)[..., None]
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
