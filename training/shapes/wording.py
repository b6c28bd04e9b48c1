"""Word a scene: every form of caption that the model learns, with the span of each item's phrase and of the background.

Phrases carry private marks while the sentence is put together; `Caption.from_marked` takes them out and keeps the
spans. A mention names one item or a run of equal ones; what it leaves unsaid is left open in the `Demand`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

from training.shapes.lexicon import (
    BACKGROUND_WORDS,
    COUNT_WORDS,
    FILLERS,
    PLACE_WORDS,
    PLURALS,
    PREFIXES,
    RELATION_WORDS,
    RELATION_WORDS_IT,
    SHAPE_WORDS,
    SIZE_WORDS,
)
from training.shapes.scenes import Demand, Item, Scene, Wanted

__all__ = [
    "BACKGROUND",
    "Caption",
    "Mention",
    "Span",
    "Worded",
    "close",
    "word_list",
    "word_nested",
    "word_related",
    "word_single",
]

BACKGROUND: Final = 9  # owner of the background's span
OPEN: Final = 0xE000  # + owner
CLOSE: Final = "\ue00f"
OPPOSITE: Final = {"above": "below", "below": "above", "left of": "right of", "right of": "left of"}


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start` to `end` of a caption speak of mention `owner`, or of the background."""

    start: int
    end: int
    owner: int


@dataclass(frozen=True, slots=True)
class Caption:
    """The text a visitor would type, and what its parts speak of."""

    text: str
    spans: tuple[Span, ...]

    @classmethod
    def from_marked(cls, marked: str) -> Caption:
        """Take the marks out of a worded sentence."""
        text, spans = "", []
        owner, start = 0, 0
        for char in marked:
            if OPEN <= ord(char) <= OPEN + BACKGROUND:
                owner, start = ord(char) - OPEN, len(text)
            elif char == CLOSE:
                spans.append(Span(start, len(text), owner))
            else:
                text += char
        return cls(text, tuple(spans))


@dataclass(frozen=True, slots=True)
class Mention:
    """One phrase: a run of `count` equal items from `first` on, and which of their looks it says."""

    first: int
    count: int = 1
    says_color: bool = True
    says_shape: bool = True
    says_size: bool = True


@dataclass(frozen=True, slots=True)
class Worded:
    """A marked sentence, its mentions by owner, and what it demands of the picture."""

    marked: str
    mentions: tuple[Mention, ...]
    demand: Demand


def mark(text: str, owner: int) -> str:
    """The text between the marks of its owner."""
    return f"{chr(OPEN + owner)}{text}{CLOSE}"


def _article(rng: random.Random, text: str, *, bare: bool) -> str:
    if bare:
        return text
    indefinite = "an " if text[0] in "aeiou" else "a "
    return rng.choices([indefinite, "one ", "the ", "a single "], [0.84, 0.07, 0.06, 0.03])[0] + text


def _plural(noun: str) -> str:
    return PLURALS.get(noun, noun + "s")


def phrase(rng: random.Random, owner: int, item: Item, mention: Mention, *, bare: bool = False) -> str:
    """The wording of one mention between its marks, with a filler now and then."""
    noun = (
        rng.choice(SHAPE_WORDS[item.shape]) if mention.says_shape else rng.choice(("shape", "thing", "one", "object"))
    )
    size = rng.choice(SIZE_WORDS[item.size]) if mention.says_size and item.size in SIZE_WORDS else ""
    if not size and mention.says_size and rng.random() < 0.03:
        size = "medium"
    color = item.color if mention.says_color else ""
    filler = rng.choice(FILLERS) if rng.random() < 0.06 else ""
    if mention.count > 1:
        words = [rng.choice(COUNT_WORDS[mention.count]), filler, size, color, _plural(noun)]
        return mark(" ".join(word for word in words if word), owner)
    comma = "," if size and color and rng.random() < 0.08 else ""
    tail = ""
    if color and not bare and rng.random() < 0.18:
        color, tail, comma = "", rng.choice((f" that is {color}", f" in {color}")), ""
    words = [filler, size + comma, color, noun]
    return mark(_article(rng, " ".join(word for word in words if word) + tail, bare=bare), owner)


def _background_phrase(rng: random.Random, scene: Scene, *, named: bool) -> str:
    """`white background` and the like, or nothing; an unnamed white one is said now and then all the same."""
    if named:
        name = rng.choice(BACKGROUND_WORDS[scene.background])
        return f"{'plain ' if rng.random() < 0.1 else ''}{name} background"
    if scene.background == "white" and rng.random() < 0.3:
        return rng.choice(("white background", "plain background"))
    return ""


def _with_background(rng: random.Random, body: str, background: str, *, bare: bool) -> str:
    article = "" if bare else rng.choice(("a ", "a ", "a ", "the "))
    background = mark(background, BACKGROUND)
    draw = rng.random()
    if draw < 0.12:
        return f"on {article}{background}{rng.choice((',', ''))} {body}"
    if bare or draw < 0.2:
        return f"{body}, {background}"
    return f"{body} {rng.choice(('on', 'on', 'on', 'against', 'with'))} {article}{background}"


def _wanted(scene: Scene, mentions: tuple[Mention, ...]) -> tuple[Wanted, ...]:
    wanted = []
    for mention in sorted(mentions, key=lambda m: m.first):
        for item in scene.items[mention.first : mention.first + mention.count]:
            checked_size = item.size if mention.says_size and item.size != "medium" and len(scene.items) == 1 else None
            wanted.append(
                Wanted(
                    color=item.color if mention.says_color else None,
                    shape=item.shape if mention.says_shape else None,
                    place=scene.place,
                    size=checked_size,
                )
            )
    return tuple(wanted)


def close(
    rng: random.Random,
    scene: Scene,
    body: str,
    mentions: tuple[Mention, ...],
    *,
    named: bool,
    bare: bool,
    prefix: bool = True,
) -> Worded:
    """Finish a sentence: background, a request in front, a full stop; and derive its demand."""
    background = _background_phrase(rng, scene, named=named)
    if background:
        body = _with_background(rng, body, background, bare=bare)
    starts_with_item = body[:1] >= chr(OPEN)
    if prefix and starts_with_item and rng.random() < 0.3:
        body = f"{rng.choice(PREFIXES)} {body}"
    if rng.random() < 0.06:
        body += "."
    told = scene.background if background and background != "plain background" else None
    return Worded(body, mentions, Demand(scene.arrangement, _wanted(scene, mentions), told))


def _drops_color(rng: random.Random, scene: Scene, first: int, share: float) -> bool:
    """Whether to leave a colour unsaid; never that of a white item, whose background would be unexplained."""
    return scene.items[first].color != "white" and rng.random() < share


def word_single(rng: random.Random, scene: Scene, *, named: bool) -> Worded:
    """`a small red circle in the top left corner on a gray background`."""
    bare = rng.random() < 0.12
    mention = Mention(0, says_color=not _drops_color(rng, scene, 0, 0.05))
    body = phrase(rng, 0, scene.items[0], mention, bare=bare)
    if scene.place:
        place = mark(rng.choice(PLACE_WORDS[scene.place]), 0)
        if rng.random() < 0.15:
            body = f"{place}{rng.choice((',', ''))} {rng.choice(('there is ', '', ''))}{body}"
        else:
            body = f"{body}{', ' if bare or rng.random() < 0.1 else ' '}{place}"
    return close(rng, scene, body, (mention,), named=named, bare=bare)


def word_related(rng: random.Random, scene: Scene, *, named: bool) -> Worded:
    """`a red circle above a blue square`, from either side, in several constructions."""
    bare = rng.random() < 0.12
    relation = "above" if scene.arrangement == "column" else "left of"
    mentions = tuple(Mention(k, says_color=not _drops_color(rng, scene, k, 0.02)) for k in (0, 1))
    if rng.random() < 0.5:
        mentions, relation = mentions[::-1], OPPOSITE[relation]
    a, b = (phrase(rng, owner, scene.items[m.first], m, bare=bare) for owner, m in enumerate(mentions))
    word = rng.choice(RELATION_WORDS[relation])
    draw = rng.random()
    if draw < 0.74:
        body = f"{a} {word} {b}"
    elif draw < 0.82:
        body = f"{a} {rng.choice(('is', 'placed', 'sits', 'that is', 'located'))} {word} {b}"
    elif draw < 0.93:
        body = f"{b} {rng.choice(('with', 'and'))} {a} {rng.choice(RELATION_WORDS_IT[relation])}"
    else:
        body = f"{word} {b}{rng.choice((',', ' there is', ' is'))} {a}"
    return close(rng, scene, body, mentions, named=named, bare=bare)


def word_list(rng: random.Random, scene: Scene, *, named: bool, groups: tuple[int, ...]) -> Worded:
    """`a red circle and a blue square`, `two red circles`, `a ring, a star and a heart`: named from left to right."""
    bare = rng.random() < 0.15
    mentions, first = [], 0
    for count in groups:
        mentions.append(Mention(first, count, says_color=not _drops_color(rng, scene, first, 0.06)))
        first += count
    parts = [phrase(rng, k, scene.items[m.first], m, bare=bare) for k, m in enumerate(mentions)]
    row = rng.choice((" in a row", " side by side", " next to each other")) if rng.random() < 0.1 else ""
    if len(parts) == 1:
        body = parts[0] + row
    elif len(parts) == 2:
        joints = [" and "] * 6 + [", "] + ([" "] if bare else [])
        if groups == (1, 1):
            joints += [" next to ", " beside ", " and then "]
        joint = rng.choice(joints)
        body = joint.join(parts) + (row if joint == " and " else "")
    else:
        body = _join_three(rng, parts, bare=bare, row=row)
    return close(rng, scene, body, tuple(mentions), named=named, bare=bare)


def _join_three(rng: random.Random, parts: list[str], *, bare: bool, row: str) -> str:
    a, b, c = parts
    sentences = [f"{a}, {b} and {c}{row}"] * 5 + [f"{a}, {b}, and {c}{row}"] * 2 + [f"{a} and {b} and {c}{row}"]
    sentences += [f"{a}, {b}, {c}{row}", f"from left to right {a}, {b}, {c}", f"{a} next to {b} next to {c}"]
    sentences += [f"{b} between {a} and {c}"] * 2
    if bare:
        sentences += [f"{a} {b} {c}", f"{a}, {b}, {c}"]
    return rng.choice(sentences)


def word_nested(rng: random.Random, scene: Scene, *, named: bool) -> Worded:
    """`a small red star inside a large blue circle`, from either side."""
    bare = rng.random() < 0.1
    sized = rng.random() < 0.6
    one_sized = rng.random() < 0.3
    inner = Mention(0, says_size=sized, says_color=not _drops_color(rng, scene, 0, 0.03))
    outer = Mention(1, says_size=sized and not one_sized, says_color=not _drops_color(rng, scene, 1, 0.03))
    draw = rng.random()
    if draw < 0.62:
        word = rng.choice(("inside", "inside", "inside", "in", "within", "inside of", "in the middle of"))
        a, b = phrase(rng, 0, scene.items[0], inner, bare=bare), phrase(rng, 1, scene.items[1], outer, bare=bare)
        body = f"{a} {rng.choice(('', '', '', 'is ', 'that is ', 'placed '))}{word} {b}"
        return close(rng, scene, body, (inner, outer), named=named, bare=bare)
    a, b = phrase(rng, 1, scene.items[0], inner, bare=bare), phrase(rng, 0, scene.items[1], outer, bare=bare)
    if draw < 0.82:
        body = f"{b} with {a} {rng.choice(('inside', 'inside it', 'in it', 'in the middle', 'within'))}"
    else:
        body = f"{b} {rng.choice(('containing', 'around', 'surrounding', 'that contains'))} {a}"
    return close(rng, scene, body, (replace(outer), replace(inner)), named=named, bare=bare)
