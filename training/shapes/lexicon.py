"""The words of the captions: synonyms, plurals, relations, style words without meaning, and words the model never
learns.

`STRANGE_WORDS_HELD_OUT` and `STYLE_HELD_OUT` appear in no training caption; the evaluation takes its unknown words
from them.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "BACKGROUND_WORDS",
    "COUNT_WORDS",
    "FILLERS",
    "ONE_WORD_COLOR",
    "ONE_WORD_SHAPE",
    "PLACE_WORDS",
    "PLURALS",
    "PREFIXES",
    "RELATION_WORDS",
    "RELATION_WORDS_IT",
    "SHAPE_WORDS",
    "SIZE_WORDS",
    "STRANGE_SENTENCES",
    "STRANGE_WORDS",
    "STRANGE_WORDS_HELD_OUT",
    "STYLE_HELD_OUT",
    "STYLE_PREFIXES",
    "STYLE_SUFFIXES",
]

Words = tuple[str, ...]


def _words(text: str) -> Words:
    return tuple(text.split())


def _phrases(text: str) -> Words:
    return tuple(phrase.strip() for phrase in text.split("|"))


SHAPE_WORDS: Final[dict[str, Words]] = {
    "circle": ("circle",) * 8 + ("disc", "dot", "round circle"),
    "square": ("square",) * 8 + ("box",),
    "triangle": ("triangle",),
    "star": ("star",),
    "ring": ("ring",) * 8 + ("hoop",),
    "heart": ("heart",),
    "cross": ("cross",) * 8 + ("plus sign",),
    "diamond": ("diamond",) * 8 + ("rhombus",),
}
PLURALS: Final = {"box": "boxes", "cross": "crosses", "rhombus": "rhombuses"}  # the others take an s
SIZE_WORDS: Final[dict[str, Words]] = {
    "small": ("small", "small", "little", "tiny"),
    "large": ("big", "large", "large", "huge"),
}
COUNT_WORDS: Final[dict[int, Words]] = {
    2: ("two", "two", "two", "two", "2", "a pair of", "a couple of"),
    3: ("three", "three", "three", "three", "3"),
}
# The first of the two items stands so to the second.
RELATION_WORDS: Final[dict[str, Words]] = {
    "above": ("above", "above", "above", "over", "on top of"),
    "below": ("below", "below", "under", "beneath", "underneath"),
    "left of": ("left of", "to the left of", "to the left of", "on the left of"),
    "right of": ("right of", "to the right of", "to the right of", "on the right of"),
}
RELATION_WORDS_IT: Final[dict[str, Words]] = {
    "above": ("above it", "over it"),
    "below": ("below it", "under it", "beneath it"),
    "left of": ("to the left of it", "on its left", "to its left"),
    "right of": ("to the right of it", "on its right", "to its right"),
}


def _place_words() -> dict[str, Words]:
    words = {
        "center": _phrases("in the center|in the middle|in the centre|at the center"),
        "left": _phrases("on the left|on the left side|at the left"),
        "right": _phrases("on the right|on the right side|at the right"),
        "top": _phrases("at the top|near the top|on the top"),
        "bottom": _phrases("at the bottom|near the bottom|on the bottom"),
    }
    for v in ("top", "bottom"):
        for h in ("left", "right"):
            words[f"{v} {h}"] = _phrases(f"in the {v} {h} corner|in the {v} {h}|at the {v} {h}|in the {v}-{h} corner")
    return words


PLACE_WORDS: Final = _place_words()
BACKGROUND_WORDS: Final[dict[str, Words]] = {
    "white": ("white",),
    "gray": ("gray", "grey"),
    "light blue": ("light blue", "light blue", "pale blue"),
    "beige": ("beige",),
    "light green": ("light green", "light green", "pale green"),
    "black": ("black",),
}
FILLERS: Final = _words(
    "nice cute simple beautiful shiny bright flat solid plain pretty perfect lovely clean filled minimal"
)
PREFIXES: Final = _phrases(
    "a picture of|an image of|a drawing of|draw|show me|please draw|there is|a photo of|an illustration of|create|"
    "i want|generate an image of|paint|please|a painting of|a sketch of|make|can you draw|give me|just|only"
)
STYLE_PREFIXES: Final = _phrases(
    "a cinematic photo of|an oil painting of|a watercolor painting of|a professional photograph of|a 3d render of|"
    "a highly detailed illustration of|concept art of|digital art of|a pencil drawing of|a stunning picture of|"
    "a macro shot of|a minimalist poster of|a vector illustration of|an abstract painting of|a close up of|"
    "a realistic photo of|an icon of|a logo with|please generate|please make a picture of|a beautiful photo of|"
    "a surreal image of|pixel art of|a dramatic scene with|a portrait of"
)
STYLE_SUFFIXES: Final = _phrases(
    "highly detailed|8k|4k|cinematic|cinematic lighting|masterpiece|best quality|trending on artstation|photorealistic|"
    "ultra realistic|sharp focus|octane render|unreal engine|dramatic lighting|studio lighting|vector art|minimalist|"
    "oil on canvas|in the style of van gogh|watercolor|digital painting|concept art|hdr|bokeh|high resolution|"
    "award winning|volumetric light|intricate details|soft shadows|flat design|thank you|thanks|please|no text|"
    "vintage|for kids|"
    "high quality|detailed|by a famous artist|film grain|35mm|golden hour|depth of field|very cool|epic"
)
STYLE_HELD_OUT: Final = _phrases(
    "art deco|isometric|low poly|charcoal|long exposure|by monet|uhd|super sharp|hand drawn|dslr|pastel mood|anime"
)
STRANGE_WORDS: Final = _words(
    "dog house tree car man woman child bird fish horse boat ship plane flower mountain river sea beach city "
    "street road bridge table chair lamp book phone computer robot dragon castle king queen knight wizard apple "
    "banana orange-juice bread cake pizza coffee tea bottle cup glass spoon plate hat shoe shirt dress coat bag "
    "umbrella clock watch key door window wall floor garden forest field desert snow rain storm cloud sky moon "
    "sun planet rocket train bus truck bicycle wheel engine guitar piano drum music dance song football tennis "
    "chess game toy doll teddy elephant lion tiger bear wolf fox rabbit mouse snake frog spider butterfly bee ant "
    "whale shark dolphin penguin owl eagle chicken cow pig sheep goat farm village church tower statue paint "
    "brush paper pencil letter word number happy sad angry running jumping sleeping flying sitting eating old "
    "young fast slow wooden metal golden silver glowing broken ancient modern magic wild quiet loud ein eine "
    "roter rote blauer blaue kreis stern une un rouge bleu carre etoile el rojo azul circulo estrella gatto casa"
)
STRANGE_WORDS_HELD_OUT: Final = _words(
    "cat kitten camel sofa violin helicopter sandwich astronaut lighthouse volcano bicycle-shop turtle carpet "
    "candle mushroom pirate hammer cactus suitcase dinosaur samurai teapot zebra waterfall pumpkin skeleton "
    "laptop basket feather jungle quartz banjo ninja hund katze maison perro grün fleur blurry frozen dancing "
    "velvet rusty"
)
ONE_WORD_COLOR: Final = ("{}",) * 6 + _phrases(
    "a {} shape|something {}|{} shape|a {} thing|anything {}|{} object|a {} object|just {}"
)
ONE_WORD_SHAPE: Final = (
    ("{}",) * 4
    + ("a {}",) * 3
    + _phrases("one {}|the {}|draw a {}|a picture of a {}|just a {}|please draw a {}|some {}|a single {}")
)
STRANGE_SENTENCES: Final = _phrases(
    "{}|a {}|a {}|the {}|a {} {}|a {} and a {}|a {} on a {}|a {} with a {}|{} {}|a {} {} in the {}|a photo of a {}|"
    "draw a {}|a picture of a {} {}|{} {} {}|an {} {}|my {}|two {}s|a {} near the {}"
)
