"""Scenes of one to three plain shapes: what they contain, where it stands, and which words a checker may hold them to.

A `Scene` is drawn by `drawing.render`, worded by `wording`, and judged by `checker` against a `Demand`, the part of
the scene that the caption says. Lengths and positions are fractions of the picture's side, measured from the top
left.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "ARRANGEMENTS",
    "BACKGROUNDS",
    "COLORS",
    "PLACES",
    "SHAPES",
    "SIZES",
    "Arrangement",
    "Demand",
    "Item",
    "Rgb",
    "Scene",
    "Wanted",
    "color_distance",
    "sample_scene",
    "stands_out",
]

Rgb = tuple[int, int, int]
Arrangement = Literal["single", "row", "column", "inside"]

ARRANGEMENTS: Final[tuple[Arrangement, ...]] = ("single", "row", "column", "inside")
COLORS: Final[dict[str, Rgb]] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 215, 40),
    "orange": (245, 140, 30),
    "purple": (130, 50, 180),
    "pink": (250, 130, 190),
    "cyan": (40, 200, 220),
    "brown": (125, 75, 40),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
BACKGROUNDS: Final[dict[str, Rgb]] = {
    "white": (250, 250, 250),
    "gray": (165, 165, 165),
    "light blue": (175, 210, 240),
    "beige": (240, 225, 190),
    "light green": (185, 235, 190),
    "black": (20, 20, 20),
}
SHAPES: Final = ("circle", "square", "triangle", "star", "ring", "heart", "cross", "diamond")
SIZES: Final = ("small", "medium", "large")
PLACES: Final[dict[str, tuple[float, float]]] = {
    "center": (0.5, 0.5),
    "left": (0.22, 0.5),
    "right": (0.78, 0.5),
    "top": (0.5, 0.22),
    "bottom": (0.5, 0.78),
    "top left": (0.22, 0.22),
    "top right": (0.78, 0.22),
    "bottom left": (0.22, 0.78),
    "bottom right": (0.78, 0.78),
}

# Radii by the number of items that share the picture.
RADII: Final[dict[int, dict[str, tuple[float, float]]]] = {
    1: {"small": (0.12, 0.145), "medium": (0.18, 0.225), "large": (0.29, 0.34)},
    2: {"small": (0.105, 0.125), "medium": (0.145, 0.185), "large": (0.2, 0.225)},
    3: {"small": (0.1, 0.11), "medium": (0.118, 0.132), "large": (0.136, 0.144)},
}
# How large the outer shape of a nested pair is, the share of its radius that is free inside, and where its middle lies.
NESTS: Final[dict[str, tuple[float, float, float]]] = {
    "circle": (0.34, 0.5, 0.0),
    "square": (0.34, 0.5, 0.0),
    "triangle": (0.4, 0.36, 0.28),
    "star": (0.42, 0.34, 0.03),
    "ring": (0.4, 0.42, 0.0),
    "heart": (0.4, 0.4, -0.1),
    "cross": (0.42, 0.28, 0.0),
    "diamond": (0.4, 0.4, 0.0),
}
REACH: Final = 1.1  # no shape reaches further from its centre than this many radii
MARGIN: Final = 0.01


@dataclass(frozen=True, slots=True)
class Item:
    """One shape: centre and radius are fractions of the side."""

    shape: str
    color: str
    size: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture's contents; items run from left to right, from top to bottom, or from the inner to the outer one."""

    background: str
    arrangement: Arrangement
    items: tuple[Item, ...]
    place: str | None = None  # of a single item; None is the centre


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a caption says of one item; None is left open."""

    color: str | None = None
    shape: str | None = None
    place: str | None = None
    size: str | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """What a caption says of the picture, items in the order of `Scene.items`."""

    arrangement: Arrangement
    wanted: tuple[Wanted, ...]
    background: str | None = None


def color_distance(first: Rgb, second: Rgb) -> float:
    """Euclidean distance of two colours whose channels are scaled to 0..1."""
    return float(sum(((a - b) / 255) ** 2 for a, b in zip(first, second, strict=True)) ** 0.5)


def stands_out(color: str, background: str) -> bool:
    """Whether an item of this colour is plainly visible on this background."""
    return color_distance(COLORS[color], BACKGROUNDS[background]) > 0.36


def sample_scene(
    rng: random.Random, arrangement: Arrangement, count: int, *, groups: tuple[int, ...] = (), named_background: bool
) -> Scene:
    """A random scene of `count` items; `groups` are runs of equal items, `named_background` frees the background.

    An unnamed background is white, or gray under white items.
    """
    runs = groups or (1,) * count
    while True:
        looks = [_sample_look(rng) for _ in runs]
        background = rng.choice(list(BACKGROUNDS)) if named_background else "white"
        if not named_background and any(color == "white" for _, color, _ in looks):
            background = "gray"
        visible = all(stands_out(color, background) for _, color, _ in looks)
        if visible and len({look[:2] for look in looks}) == len(looks) and _may_nest(arrangement, looks):
            break
    expanded = [look for look, run in zip(looks, runs, strict=True) for _ in range(run)]
    place = rng.choice(list(PLACES)) if arrangement == "single" and rng.random() < 0.6 else None
    if arrangement == "single":
        items = _lay_single(rng, expanded[0], place or "center")
    elif arrangement == "inside":
        items = _lay_inside(rng, expanded)
    elif count == 2:
        items = _lay_pair(rng, expanded, arrangement, equal=len(runs) == 1)
    else:
        items = _lay_three(rng, expanded, equal=len(runs) == 1)
    return Scene(background, arrangement, items, place)


Look = tuple[str, str, str]  # shape, colour, size


def _sample_look(rng: random.Random) -> Look:
    size = rng.choices(["medium", "small", "large"], [0.6, 0.2, 0.2])[0]
    return rng.choice(SHAPES), rng.choice(list(COLORS)), size


def _may_nest(arrangement: Arrangement, looks: list[Look]) -> bool:
    if arrangement != "inside":
        return True
    (_, inner, _), (_, outer, _) = looks
    return color_distance(COLORS[inner], COLORS[outer]) > 0.45


def _within(value: float, radius: float) -> float:
    """The coordinate moved so that an item of this radius stays in the picture."""
    limit = REACH * radius + MARGIN
    return min(max(value, limit), 1 - limit)


def _lay_single(rng: random.Random, look: Look, place: str) -> tuple[Item, ...]:
    shape, color, size = look
    radius = rng.uniform(*RADII[1][size])
    x, y = (_within(p, radius) if p != 0.5 else p for p in PLACES[place])
    return (Item(shape, color, size, x + rng.uniform(-0.025, 0.025), y + rng.uniform(-0.025, 0.025), radius),)


def _lay_pair(rng: random.Random, looks: list[Look], arrangement: Arrangement, *, equal: bool) -> tuple[Item, ...]:
    first, second = (rng.uniform(*RADII[2][size]) for _, _, size in looks)
    if equal:
        second = first
    least = REACH * (first + second) + 0.03
    most = 1 - REACH * (first + second) - 0.02  # between the centres
    gap = rng.uniform(least, max(least, min(most, least + 0.14)))
    low, high = REACH * first + MARGIN, 1 - gap - REACH * second - MARGIN
    along = min(max(0.5 - gap / 2 + rng.uniform(-0.06, 0.06), low), high)
    across = 0.5 + rng.uniform(-0.06, 0.06)
    offset = 0.0 if equal else rng.uniform(-0.04, 0.04)
    places = [(along, across, first), (along + gap, across + offset, second)]
    if arrangement == "column":
        places = [(y, x, radius) for x, y, radius in places]
    return _items(looks, places)


def _lay_three(rng: random.Random, looks: list[Look], *, equal: bool) -> tuple[Item, ...]:
    radii = [rng.uniform(*RADII[3][size]) for _, _, size in looks]
    if equal:
        radii = radii[:1] * 3
    across = 0.5 + rng.uniform(-0.04, 0.04)
    shift = rng.uniform(-0.008, 0.008)
    places = []
    for x, radius in zip((0.175, 0.5, 0.825), radii, strict=True):
        places.append((x + shift, across if equal else across + rng.uniform(-0.02, 0.02), radius))
    return _items(looks, places)


def _lay_inside(rng: random.Random, looks: list[Look]) -> tuple[Item, ...]:
    outer_radius, room, middle = NESTS[looks[1][0]]
    outer_radius *= rng.uniform(0.97, 1.05)
    inner_radius = min(0.15, room * outer_radius) * rng.uniform(0.92, 1.0)
    x, y = 0.5 + rng.uniform(-0.02, 0.02), 0.5 + rng.uniform(-0.02, 0.02)
    looks = [(looks[0][0], looks[0][1], "small"), (looks[1][0], looks[1][1], "large")]
    return _items(looks, [(x, y + middle * outer_radius, inner_radius), (x, y, outer_radius)])


def _items(looks: list[Look], places: list[tuple[float, float, float]]) -> tuple[Item, ...]:
    return tuple(Item(*look, *place) for look, place in zip(looks, places, strict=True))
