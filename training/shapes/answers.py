"""What a parser would answer for every token of a caption: the targets of the encoder's auxiliary loss.

Every token says its role (nothing, an item, or a background's name). Tokens of an item's phrase also say the item's
colour, shape, place, size and count, and how the whole picture is laid out; what the caption leaves open has a class
of its own.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from training.shapes.forms import Example
from training.shapes.scenes import BACKGROUNDS, COLORS, PLACES, SHAPES, SIZES, Scene
from training.shapes.wording import BACKGROUND, Mention

__all__ = ["HEADS", "IGNORED", "token_answers"]

IGNORED: Final = -100
LAYOUTS: Final = ("single", "row of two", "row of three", "column", "inside")
ROLES: Final = ("nothing", "item", *BACKGROUNDS)
HEADS: Final[dict[str, int]] = {  # answer: number of classes
    "color": len(COLORS) + 1,
    "shape": len(SHAPES) + 1,
    "place": len(PLACES),
    "size": len(SIZES),
    "count": 3,
    "layout": len(LAYOUTS),
    "role": len(ROLES),
}
UNSAID_COLOR: Final = len(COLORS)
UNSAID_SHAPE: Final = len(SHAPES)


def _layout(scene: Scene) -> int:
    if scene.arrangement == "row":
        return LAYOUTS.index("row of two" if len(scene.items) == 2 else "row of three")
    return LAYOUTS.index(scene.arrangement)


def _place(scene: Scene, mention: Mention) -> str:
    if scene.arrangement == "single":
        return scene.place or "center"
    if scene.arrangement == "inside" or mention.count == len(scene.items):
        return "center"
    if scene.arrangement == "column":
        return ("top", "bottom")[mention.first]
    if len(scene.items) == 3 and mention.count == 1 and mention.first == 1:
        return "center"
    return "left" if mention.first == 0 else "right"


def _item_answers(scene: Scene, mention: Mention) -> list[int]:
    item = scene.items[mention.first]
    return [
        list(COLORS).index(item.color) if mention.says_color else UNSAID_COLOR,
        SHAPES.index(item.shape) if mention.says_shape else UNSAID_SHAPE,
        list(PLACES).index(_place(scene, mention)),
        SIZES.index(item.size),
        mention.count - 1,
        _layout(scene),
        ROLES.index("item"),
    ]


def token_answers(example: Example, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
    """Class per token and head, `[tokens, heads]`; `offsets` are each token's start and end, empty for padding."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    real = ends > starts
    answers = np.full((len(offsets), len(HEADS)), IGNORED, np.int8)
    answers[real, -1] = ROLES.index("nothing")
    for span in example.caption.spans:
        inside = real & (starts >= span.start - 1) & (ends <= span.end)  # a token may begin with the blank before it
        if span.owner == BACKGROUND:
            answers[inside, -1] = ROLES.index(example.scene.background)
        else:
            answers[inside] = _item_answers(example.scene, example.mentions[span.owner])
    return answers
