"""Judge a picture from its pixels: background, and colour, shape, place, size, order, number and nesting of its items.

`look` says what it sees, `check` holds that against a `Demand`. It knows nothing of the model: on drawn scenes it is
right on nearly all, which its tests measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from training.shapes.drawing import Mask, Picture, coverage
from training.shapes.scenes import BACKGROUNDS, COLORS, SHAPES, Demand, Item, Rgb, Wanted

__all__ = ["Seen", "Sighting", "check", "look"]

Bools = npt.NDArray[np.bool_]
Pixels = npt.NDArray[np.float32]  # channels in 0..1

VISIBLE: Final = 0.17  # distance from the background's colour
SMALLEST: Final = 0.004  # of the picture's area; less is a speck
TEMPLATE_SIDE: Final = 32
FREE_FIT: Final = 0.72  # where any shape will do, below this a blob is none at all
NAMED_FIT: Final = 0.6  # where a shape is named, being the best of all templates counts for more
SMALL_FIT: Final = 0.5  # for items of few pixels, where every edge pixel counts
SMALL_RADIUS: Final = 0.16
LARGE_RADIUS: Final = 0.27
TRUE_COLOR: Final = 0.25  # further from every named colour, it is none of them
EIGHT: Final = np.ones((3, 3), bool)


@dataclass(frozen=True, slots=True)
class Seen:
    """One item in a picture; lengths in shares of the side, `fit` the overlap with its shape's template."""

    color: str
    shape: str
    x: float
    y: float
    radius: float
    fit: float
    color_error: float
    area: int
    region: Bools  # with holes filled

    def whole(self, *, shape_named: bool) -> bool:
        """Whether it is a clean shape in a known colour."""
        least = SMALL_FIT if self.radius <= SMALL_RADIUS else NAMED_FIT if shape_named else FREE_FIT
        return self.fit >= least and self.color_error <= TRUE_COLOR

    def holds(self, other: Seen) -> bool:
        """Whether the other one lies within this one's outline."""
        side = len(self.region)
        row, column = min(int(other.y * side), side - 1), min(int(other.x * side), side - 1)
        return other.area < self.area and bool(self.region[row, column])


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a picture shows, largest item first."""

    background: str
    items: tuple[Seen, ...]


def _nearest(rgb: Pixels, table: dict[str, Rgb]) -> tuple[str, float]:
    distances = {name: float(np.linalg.norm(rgb - np.asarray(color) / 255)) for name, color in table.items()}
    name = min(distances, key=distances.__getitem__)
    return name, distances[name]


def _resize(mask: Mask, side: int) -> Mask:
    """Bilinear resize of a mask to a square."""

    def axis(length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Mask]:
        at = np.clip((np.arange(side) + 0.5) * length / side - 0.5, 0, length - 1)
        low = np.minimum(at.astype(np.int64), max(length - 2, 0))
        return low, np.minimum(low + 1, length - 1), (at - low).astype(np.float32)

    top, bottom, down = axis(mask.shape[0])
    left, right, across = axis(mask.shape[1])
    rows = mask[top] * (1 - down)[:, None] + mask[bottom] * down[:, None]
    return np.asarray(rows[:, left] * (1 - across) + rows[:, right] * across, np.float32)


def _crop(mask: Mask) -> Mask:
    """The part of a mask that its inside spans; empty where there is none."""
    inside = mask > 0.5
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    if not len(rows):
        return mask[:0, :0]
    return mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


@cache
def _templates() -> dict[str, tuple[Mask, float]]:
    """Every shape in its own bounding box, and that box's width over height."""
    found = {}
    for shape in SHAPES:
        box = _crop((coverage(Item(shape, "red", "large", 0.5, 0.5, 0.4), side=256) > 0.5).astype(np.float32))
        found[shape] = (_resize(box, TEMPLATE_SIDE), box.shape[1] / box.shape[0])
    return found


def _best_shape(shares: Mask) -> tuple[float, str]:
    """How well the best template fits, and its name."""
    box = _crop(shares)
    if not box.size:
        return 0.0, SHAPES[0]
    square, aspect = _resize(box, TEMPLATE_SIDE), box.shape[1] / box.shape[0]
    fits = []
    for shape, (template, wanted) in _templates().items():
        overlap = np.minimum(square, template).sum() / np.maximum(square, template).sum()
        fits.append((float(overlap - 0.3 * abs(np.log(aspect / wanted))), shape))
    return max(fits)


def _measure(
    pixels: Pixels, part: Bools, around: Pixels, *, solid: Bools | None = None, color: Pixels | None = None
) -> Seen | None:
    """The item of these pixels on a ground of this colour; `solid` pixels count as covered whatever their colour."""
    distance = np.linalg.norm(pixels - around, axis=-1)
    if color is None:
        core = part & (distance >= np.quantile(distance[part], 0.5))
        color = np.median(pixels[core], axis=0)
    full = max(float(np.linalg.norm(color - around)), 1e-3)
    shares = np.where(part, np.clip(distance / full, 0, 1), 0).astype(np.float32)
    if solid is not None:
        shares[solid] = 1
    box = _crop(shares)
    if not box.size:
        return None
    fit, shape = _best_shape(shares)
    rows, columns = np.nonzero(shares > 0.5)
    side = len(pixels)
    name, error = _nearest(color, COLORS)
    return Seen(
        color=name,
        shape=shape,
        x=float(columns.min() + columns.max() + 1) / 2 / side,
        y=float(rows.min() + rows.max() + 1) / 2 / side,
        radius=max(box.shape) / 2 / side,
        fit=fit,
        color_error=error,
        area=int(part.sum()),
        region=np.asarray(ndimage.binary_fill_holes(part), bool),
    )


def _parts(mask: Bools, smallest: float) -> list[Bools]:
    labels, count = ndimage.label(mask, EIGHT)
    return [part for part in (labels == k for k in range(1, count + 1)) if part.sum() >= smallest]


def _with_nested(pixels: Pixels, part: Bools, ground: Pixels, smallest: float) -> list[Seen]:
    """The item of a connected part, and those of another colour that lie inside it."""
    region = np.asarray(ndimage.binary_fill_holes(part), bool)
    rim = part & ndimage.binary_erosion(region) & ~ndimage.binary_erosion(region, iterations=3)
    if not rim.any():
        rim = part
    color = np.median(pixels[rim], axis=0)
    foreign = (np.linalg.norm(pixels - color, axis=-1) > 0.25) & (np.linalg.norm(pixels - ground, axis=-1) > VISIBLE)
    foreign &= part & ndimage.binary_erosion(region, iterations=2)
    inner_parts = _parts(np.asarray(ndimage.binary_opening(foreign, EIGHT), bool), smallest)
    inner = []
    for core in inner_parts:
        whole = np.asarray(ndimage.binary_dilation(core, EIGHT, iterations=2) & foreign, bool)
        inner.append(_measure(pixels, whole, color))
    if not inner_parts:
        return [seen for seen in (_measure(pixels, part, ground),) if seen]
    covered = np.asarray(ndimage.binary_dilation(np.any(inner_parts, axis=0), EIGHT, iterations=2) & region, bool)
    filled = _measure(pixels, part, ground, solid=covered, color=color)
    hollow = _measure(pixels, np.asarray(part & ~covered, bool), ground, color=color)
    outer = max((seen for seen in (filled, hollow) if seen), key=lambda seen: seen.fit, default=None)
    return [seen for seen in (outer, *inner) if seen]


def look(picture: Picture, *, nested: bool = True) -> Sighting:
    """What is in the picture; without `nested`, a connected part is one item, whatever colours are inside."""
    pixels: Pixels = (np.asarray(picture)[..., :3] / 255).astype(np.float32)
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    ground: Pixels = np.median(edge, axis=0).astype(np.float32)
    smallest = SMALLEST * pixels.shape[0] * pixels.shape[1]
    items: list[Seen] = []
    for part in _parts(np.linalg.norm(pixels - ground, axis=-1) > VISIBLE, smallest):
        if nested:
            items += _with_nested(pixels, part, ground, smallest)
        elif (seen := _measure(pixels, part, ground)) is not None:
            items.append(seen)
    return Sighting(_nearest(ground, BACKGROUNDS)[0], tuple(sorted(items, key=lambda seen: -seen.area)))


def _place_of(seen: Seen) -> str:
    off = 0.06 if seen.radius > LARGE_RADIUS else 0.11  # a large item has little room to leave the centre
    vertical = "top" if seen.y < 0.5 - off else "bottom" if seen.y > 0.5 + off else ""
    horizontal = "left" if seen.x < 0.5 - off else "right" if seen.x > 0.5 + off else ""
    return f"{vertical} {horizontal}".strip() or "center"


def _arranged(order: tuple[Seen, ...], arrangement: str) -> bool:
    """Whether the items stand in this order from left to right, from top to bottom, or from the inner to the outer."""
    for a, b in pairwise(order):
        across, down = b.x - a.x, b.y - a.y
        if arrangement == "row" and not across > abs(down):
            return False
        if arrangement == "column" and not down > abs(across):
            return False
        if arrangement == "inside" and not b.holds(a):
            return False
    return True


def _colors_right(order: tuple[Seen, ...], wanted: tuple[Wanted, ...]) -> bool:
    return all(w.color in (None, seen.color) for seen, w in zip(order, wanted, strict=True))


def _shapes_right(order: tuple[Seen, ...], wanted: tuple[Wanted, ...]) -> bool:
    return all(w.shape in (None, seen.shape) for seen, w in zip(order, wanted, strict=True))


def _best_order(items: tuple[Seen, ...], demand: Demand) -> tuple[Seen, ...] | None:
    """The largest items in the order that answers the demand best; None where there are too few."""
    number = len(demand.wanted)

    def score(order: tuple[Seen, ...]) -> float:
        pairs = list(zip(order, demand.wanted, strict=True))
        colors = sum(w.color in (None, seen.color) for seen, w in pairs)
        shapes = sum(w.shape in (None, seen.shape) for seen, w in pairs)
        return 1.1 * colors + shapes + 0.5 * _arranged(order, demand.arrangement)

    return max(permutations(items[: number + 1], number), key=score, default=None)


def check(picture: Picture, demand: Demand) -> dict[str, bool]:
    """Right or not, by attribute the demand speaks of; `all` says whether everything is right."""
    sighting = look(picture)
    wanted = demand.wanted
    order = _best_order(sighting.items, demand)
    verdict = {"count": len(sighting.items) == len(wanted)}
    verdict["whole"] = order is not None and all(
        seen.whole(shape_named=w.shape is not None) for seen, w in zip(order, wanted, strict=True)
    )
    if demand.background:
        verdict["background"] = sighting.background == demand.background
    if any(w.color for w in wanted):
        verdict["color"] = order is not None and _colors_right(order, wanted)
    if any(w.shape for w in wanted):
        verdict["shape"] = order is not None and _shapes_right(order, wanted)
    if len(wanted) > 1:
        verdict["order"] = order is not None and _arranged(order, demand.arrangement)
    elif wanted[0].place:
        verdict["place"] = order is not None and _place_of(order[0]) == wanted[0].place
    if len(wanted) == 1 and wanted[0].size:
        limit = {"small": (0.0, 0.17), "medium": (0.15, 0.26), "large": (0.23, 1.0)}[wanted[0].size]
        verdict["size"] = order is not None and limit[0] < order[0].radius < limit[1]
    verdict["all"] = all(verdict.values())
    return verdict
