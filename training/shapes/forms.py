"""The forms of caption, their shares in training, and the disturbances that any of them may carry.

`sample_example` draws scene, caption, labels' raw material and demand in one go. A caption is held out of training
when its own text says so (`is_held_out`), so training and evaluation never meet, whatever their seeds; bare words
alone are always trained, since there are only a few dozen.
"""

from __future__ import annotations

import random
import re
import string
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from training.shapes.lexicon import (
    ONE_WORD_COLOR,
    ONE_WORD_SHAPE,
    SHAPE_WORDS,
    STRANGE_SENTENCES,
    STRANGE_WORDS,
    STRANGE_WORDS_HELD_OUT,
    STYLE_HELD_OUT,
    STYLE_PREFIXES,
    STYLE_SUFFIXES,
)
from training.shapes.scenes import BACKGROUNDS, Demand, Scene, Wanted, sample_scene
from training.shapes.wording import (
    Caption,
    Mention,
    Worded,
    close,
    mark,
    word_list,
    word_nested,
    word_related,
    word_single,
)

__all__ = ["FORMS", "Example", "held_out_example", "is_held_out", "sample_example", "training_example"]

NAMED_BACKGROUNDS: Final = 0.5
HELD_OUT_SHARE: Final = 16  # one caption of so many


@dataclass(frozen=True, slots=True)
class Example:
    """A scene, one caption of it, and what that caption demands."""

    form: str
    scene: Scene
    caption: Caption
    mentions: tuple[Mention, ...]
    demand: Demand


def is_held_out(text: str) -> bool:
    """Whether a caption belongs to the evaluation; letters and digits alone decide, and one word never does."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return len(words) > 1 and zlib.crc32(" ".join(words).encode()) % HELD_OUT_SHARE == 0


# ---------------------------------------------------------------------------------------------------------- plain forms
def _named(rng: random.Random) -> bool:
    return rng.random() < NAMED_BACKGROUNDS


def _single(rng: random.Random) -> tuple[Scene, Worded]:
    named = _named(rng)
    scene = sample_scene(rng, "single", 1, named_background=named)
    return scene, word_single(rng, scene, named=named)


def _pair(rng: random.Random) -> tuple[Scene, Worded]:
    named = _named(rng)
    scene = sample_scene(rng, rng.choice(("row", "column")), 2, named_background=named)
    return scene, word_related(rng, scene, named=named)


def _list_of(*groups: int) -> Callable[[random.Random], tuple[Scene, Worded]]:
    def draw(rng: random.Random) -> tuple[Scene, Worded]:
        named = rng.random() < NAMED_BACKGROUNDS * 0.7
        scene = sample_scene(rng, "row", sum(groups), groups=groups, named_background=named)
        return scene, word_list(rng, scene, named=named, groups=groups)

    return draw


def _mixed_counts(rng: random.Random) -> tuple[Scene, Worded]:
    return _list_of(*rng.choice(((1, 2), (2, 1))))(rng)


def _nested(rng: random.Random) -> tuple[Scene, Worded]:
    named = rng.random() < NAMED_BACKGROUNDS * 0.7
    scene = sample_scene(rng, "inside", 2, named_background=named)
    return scene, word_nested(rng, scene, named=named)


def _plain_single(rng: random.Random) -> Scene:
    """A medium item in the centre of an unnamed background."""
    while True:
        scene = sample_scene(rng, "single", 1, named_background=False)
        if scene.place is None and scene.items[0].size == "medium":
            return scene


def _word(rng: random.Random) -> tuple[Scene, Worded]:
    """`red`, `a star`, `something blue`: one word says one thing, the rest is free."""
    scene = _plain_single(rng)
    item = scene.items[0]
    if rng.random() < 0.5:
        mention = Mention(0, says_shape=False)
        text = rng.choice(ONE_WORD_COLOR).format(item.color)
    else:
        while item.color == "white":
            scene = _plain_single(rng)
            item = scene.items[0]
        mention = Mention(0, says_color=False)
        noun = rng.choice(SHAPE_WORDS[item.shape])
        text = rng.choice(ONE_WORD_SHAPE).format(noun)
    color, shape = (item.color, None) if mention.says_color else (None, item.shape)
    return scene, Worded(mark(text, 0), (mention,), Demand("single", (Wanted(color, shape),), None))


# -------------------------------------------------------------------------------------------------------- strange words
def _made_up(rng: random.Random) -> str:
    """A word of random syllables."""
    ends = ("", "n", "r", "l", "s", "x", "t")
    syllables = [
        rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice(ends) for _ in range(rng.randint(1, 3))
    ]
    return "".join(syllables) if len(syllables) > 1 else syllables[0] + rng.choice("kmpt")


def _strange_word(rng: random.Random, *, held_out: bool) -> str:
    if held_out:
        return rng.choice(STRANGE_WORDS_HELD_OUT)
    return rng.choice(STRANGE_WORDS) if rng.random() < 0.55 else _made_up(rng)


def _strange(rng: random.Random, *, held_out: bool = False) -> tuple[Scene, Worded]:
    """`a cat`: nothing the model knows; any one item, cleanly drawn. A known colour or background comes true."""
    scene = _plain_single(rng)
    item = scene.items[0]
    sentence = rng.choice(STRANGE_SENTENCES)
    text = sentence.format(*(_strange_word(rng, held_out=held_out) for _ in range(sentence.count("{}"))))
    mention = Mention(0, says_color=False, says_shape=False)
    wanted = Wanted()
    draw = rng.random()
    if draw < 0.25:
        mention = Mention(0, says_shape=False)
        wanted = Wanted(color=item.color)
        return scene, Worded(
            mark(f"a {item.color} {_strange_word(rng, held_out=held_out)}", 0),
            (mention,),
            Demand("single", (wanted,), None),
        )
    worded = Worded(mark(text, 0), (mention,), Demand("single", (wanted,), None))
    if draw < 0.4 and item.color not in BACKGROUNDS:
        visible = [name for name in BACKGROUNDS if name != "gray"]
        scene = replace(scene, background=rng.choice(visible))
        named = close(rng, scene, worded.marked, (mention,), named=True, bare=False, prefix=False)
        return scene, replace(
            worded, marked=named.marked, demand=replace(worded.demand, background=named.demand.background)
        )
    return scene, worded


# --------------------------------------------------------------------------------------------------------- disturbances
def add_style(rng: random.Random, marked: str, *, held_out: bool = False) -> str:
    """Style words around the sentence, which change nothing."""
    suffixes = STYLE_SUFFIXES + (STYLE_HELD_OUT * 2 if held_out else ())
    known = marked[:1] >= chr(0xE000)
    prefixed = known and rng.random() < 0.6
    if prefixed:
        marked = f"{rng.choice(STYLE_PREFIXES)} {marked}"
    count = rng.choice((0, 1, 1, 2, 3) if prefixed else (1, 2, 3))
    return "".join([marked.rstrip("."), *(f", {suffix}" for suffix in rng.sample(suffixes, count))])


def add_strange_words(rng: random.Random, marked: str, *, held_out: bool = False) -> str:
    """Words without meaning in front, behind or between; the rest still comes true."""
    word = _strange_word(rng, held_out=held_out)
    draw = rng.random()
    if draw < 0.25:
        return f"{word} {marked}"
    if draw < 0.5:
        return f"{marked.rstrip('.')} {rng.choice(('', 'and', 'for my', 'like a', 'with', 'near the'))} {word}".replace(
            "  ", " "
        )
    if draw < 0.65:
        return f"{marked}, {word} {_strange_word(rng, held_out=held_out)}"
    gaps = [m.start() for m in re.finditer(" ", marked)]
    at = rng.choice(gaps) if gaps else len(marked)
    return f"{marked[:at]} {word}{marked[at:]}"


def add_typo(rng: random.Random, marked: str) -> str:
    """One letter of one word of at least four dropped, doubled, replaced or swapped with the next."""
    words = list(re.finditer(r"[A-Za-z]{4,}", marked))
    if not words:
        return marked
    word = rng.choice(words)
    text = word.group()
    k = rng.randrange(1, len(text))
    kind = rng.randrange(4)
    if kind == 0:
        text = text[:k] + text[k + 1 :]
    elif kind == 1:
        text = text[:k] + text[k] + text[k:]
    elif kind == 2:
        text = text[:k] + rng.choice(string.ascii_lowercase) + text[k + 1 :]
    else:
        text = text[: k - 1] + text[k] + text[k - 1] + text[k + 1 :]
    return marked[: word.start()] + text + marked[word.end() :]


def add_punctuation(rng: random.Random, marked: str) -> str:
    """Marks, dashes and quotes in odd places; capitals, which the tokenizer lowers."""
    draw = rng.random()
    if draw < 0.5:
        marked = marked.rstrip(".") + rng.choice(("!", "!!", "?", "...", ".", " .", ";", ")"))
    elif draw < 0.65:
        marked = f'"{marked}"'
    elif draw < 0.8:
        gaps = [m.start() for m in re.finditer(" ", marked)]
        if gaps:
            at = rng.choice(gaps)
            marked = marked[:at] + rng.choice((",", ";", " -", ":", "  ")) + marked[at:]
    else:
        marked = marked.replace(",", "")
    if rng.random() < 0.5:
        return rng.choice((marked.upper(), marked.title(), marked.capitalize()))
    return marked


# ------------------------------------------------------------------------------------------------------------ the whole
FormDraw = Callable[[random.Random], tuple[Scene, Worded]]
PLAIN: Final[dict[str, tuple[float, FormDraw]]] = {  # form: share in training, how to draw it
    "single": (0.12, _single),
    "pair": (0.17, _pair),
    "and": (0.08, _list_of(1, 1)),
    "two of the same": (0.05, _list_of(2)),
    "three of the same": (0.06, _list_of(3)),
    "mixed counts": (0.08, _mixed_counts),
    "three in a row": (0.12, _list_of(1, 1, 1)),
    "inside": (0.24, _nested),
    "one word": (0.035, _word),
    "strange": (0.045, _strange),
}
DISTURBED: Final = ("style words", "strange words", "capitals and punctuation", "typo")
FORMS: Final = (*PLAIN, *DISTURBED)


def _finish(form: str, scene: Scene, worded: Worded) -> Example:
    return Example(form, scene, Caption.from_marked(worded.marked), worded.mentions, worded.demand)


def sample_example(rng: random.Random) -> Example:
    """One example of the training mixture, held out or not."""
    form = rng.choices(list(PLAIN), [share for share, _ in PLAIN.values()])[0]
    scene, worded = PLAIN[form][1](rng)
    marked = worded.marked
    if form != "one word":
        for chance, disturb in ((0.16, add_style), (0.22, add_strange_words), (0.12, add_typo)):
            if rng.random() < chance:
                marked = disturb(rng, marked)
    if rng.random() < 0.1:
        marked = add_punctuation(rng, marked)
    return _finish(form, scene, replace(worded, marked=marked))


def training_example(rng: random.Random) -> Example:
    """One example that the evaluation never asks for."""
    while True:
        example = sample_example(rng)
        if not is_held_out(example.caption.text):
            return example


def held_out_example(rng: random.Random, form: str) -> Example:
    """One example of a form whose caption is not trained; of the one-word captions half are bare words, which are."""
    while True:
        example = _evaluation_example(rng, form)
        bare_word = form == "one word" and len(example.caption.text.replace("a ", "").split()) == 1
        if is_held_out(example.caption.text) or (bare_word and rng.random() < 0.15):
            return example


def _evaluation_example(rng: random.Random, form: str) -> Example:
    if form == "strange":
        return _finish(form, *_strange(rng, held_out=True))
    if form in PLAIN:
        return _finish(form, *PLAIN[form][1](rng))
    base = rng.choices(("single", "pair", "and", "two of the same", "three in a row", "inside"), (4, 3, 2, 1, 1, 1))[0]
    scene, worded = PLAIN[base][1](rng)
    if form == "style words":
        marked = add_style(rng, worded.marked, held_out=True)
    elif form == "strange words":
        marked = add_strange_words(rng, worded.marked, held_out=True)
    elif form == "typo":
        marked = add_typo(rng, worded.marked)
    else:
        marked = add_punctuation(rng, worded.marked)
    return _finish(form, scene, replace(worded, marked=marked))
