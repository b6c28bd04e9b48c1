"""Word a clip: the shape's phrase, its motion and its background, with the span of each.

What is unsaid is fixed as far as the checker can tell: no motion is standing still, no background is white (gray
under a white shape). Style words that mean nothing here surround some captions.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final

from training.shapes.forms import is_held_out
from training.shapes.lexicon import STYLE_SUFFIXES
from training.shapes.wording import Caption, Mention, close, mark, phrase
from training.shapes_video.clips import Clip, Path, sample_clip

__all__ = ["Example", "held_out_example", "training_example"]

MOTION_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "right": (
        "moving to the right",
        "moving right",
        "moves to the right",
        "moves right",
        "moving from left to right",
        "sliding to the right",
        "going right",
        "that moves to the right",
        "going to the right",
    ),
    "left": (
        "moving to the left",
        "moving left",
        "moves to the left",
        "moves left",
        "moving from right to left",
        "sliding to the left",
        "going left",
        "that moves to the left",
        "going to the left",
    ),
    "up": (
        "moving up",
        "moves up",
        "rising",
        "going up",
        "moving upwards",
        "moving from bottom to top",
        "rises",
        "that moves up",
        "moving to the top",
    ),
    "down": (
        "moving down",
        "moves down",
        "falling",
        "going down",
        "moving downwards",
        "moving from top to bottom",
        "falls",
        "that moves down",
        "moving to the bottom",
    ),
    "grow": ("growing", "grows", "getting bigger", "getting larger", "that grows", "becoming bigger", "gets bigger"),
    "shrink": (
        "shrinking",
        "shrinks",
        "getting smaller",
        "that shrinks",
        "becoming smaller",
        "gets smaller",
    ),
    "still": ("standing still", "that does not move", "staying still", "not moving", "", ""),
}
PREFIXES: Final = (
    "a video of",
    "a clip of",
    "an animation of",
    "show me",
    "a movie of",
    "make a video of",
    "a short video of",
    "animate",
    "please",
    "a cinematic video of",
    "draw",
)
ARTICLE: Final = re.compile("^([\ue000])(?:an?|the|one|a single) ")


@dataclass(frozen=True, slots=True)
class Example:
    """A clip and one caption of it; `says_color` False leaves the colour open."""

    clip: Clip
    caption: Caption
    says_color: bool
    says_background: bool


def _draw(rng: random.Random, path: Path | None) -> Example:
    clip = sample_clip(rng, path)
    bare = rng.random() < 0.1
    mention = Mention(0, says_color=clip.color == "white" or rng.random() > 0.04, says_size=False)
    body = phrase(rng, 0, clip.scene.items[0], mention, bare=bare)
    motion = rng.choice(MOTION_WORDS[clip.path.motion])
    if re.fullmatch("[a-z]+ing", motion) and rng.random() < 0.25:
        body = ARTICLE.sub(rf"\1a {motion} ", body)  # `a growing red star`
    elif motion:
        body = f"{body}{', ' if bare and rng.random() < 0.3 else ' '}{mark(motion, 0)}"
    worded = close(rng, clip.scene, body, (mention,), named=clip.named, bare=bare, prefix=False)
    marked = worded.marked
    if marked.startswith("\ue000") and rng.random() < 0.4:
        marked = f"{rng.choice(PREFIXES)} {marked}"
    if rng.random() < 0.06:
        marked = f"{marked}, {rng.choice(STYLE_SUFFIXES)}"
    return Example(clip, Caption.from_marked(marked), mention.says_color, worded.demand.background is not None)


def training_example(rng: random.Random, path: Path | None = None) -> Example:
    """A caption that the evaluation never asks, of a random clip or of this path."""
    return next(example for example in iter(lambda: _draw(rng, path), None) if not is_held_out(example.caption.text))


def held_out_example(rng: random.Random) -> Example:
    """A caption that no training has seen."""
    return next(example for example in iter(lambda: _draw(rng, None), None) if is_held_out(example.caption.text))
