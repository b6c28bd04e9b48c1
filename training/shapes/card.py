"""Write the model card: what the model is, what it knows and how often it is right, and how it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from PIL import Image

from training.shapes.evaluation import FormResult

__all__ = ["SHEET", "place_sheet", "write_card"]

SHEET: Final = "samples.jpg"
EXAMPLES: Final = {  # form: what a visitor would type
    "single": "a small red circle in the top left corner on a gray background",
    "pair": "a red circle above a blue square",
    "and": "a red circle and a blue square",
    "two of the same": "two red circles",
    "three of the same": "three green stars",
    "mixed counts": "two red circles and a blue star",
    "three in a row": "a red circle, a blue square and a green star",
    "inside": "a small red star inside a large blue circle",
    "one word": "red",
    "strange": "a cat",
    "style words": "a cinematic photo of a red circle, highly detailed, 8k",
    "strange words": "a red helicopter circle like a volcano",
    "capitals and punctuation": "TWO RED CIRCLES!!",
    "typo": "a red cricle above a blue sqare",
}
HEADER: Final = """\
---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
---

# triptych/shapes

A text-to-image model small enough to live in a Git repository: coloured shapes on plain backgrounds, 64x64 pixels,
well under a second per picture on one CPU core. It exists so that a server of diffusion models can be tried, tested
and measured on any machine, with prompts that visibly steer the picture.

| | |
|---|---|
| pipeline | `PRXPixelPipeline` of diffusers (pixel space, no VAE, predicts the clean picture) |
| transformer | patch 8 (64 picture tokens), width 192, 5 layers, 3.6 million parameters |
| text encoder | T5 encoder, 3 layers, width 128, 0.6 million parameters; captions up to 48 tokens |
| weights | 17 MB, fp32, safetensors |
| defaults (`triptych.json`) | 64x64, 20 steps, guidance 3; `use_resolution_binning` is off: no bins for this size |
| licence | Apache-2.0, weights and code |

## Use

    triptych generate "a red circle above a blue square" -o picture.png --seed 7

or with diffusers alone:

    import torch
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained("src/triptych/models/shapes")
    picture = pipe(
        "a red circle above a blue square",
        num_inference_steps=20,
        guidance_scale=3.0,
        use_resolution_binning=False,
        generator=torch.Generator("cpu").manual_seed(7),
    ).images[0]

Ask for one picture per call: with guidance, this pipeline class fails for several.

## What it knows

Eleven colours, eight shapes, six backgrounds, nine places, three sizes; one to three objects; above, below, left of
and right of, rows of two and three in the order named, two or three of the same, and one shape inside another. A
background that is not mentioned is white, and gray under white objects. What a caption leaves open is free, but whole.

![samples](samples.jpg)
"""
FOOTER: Final = """\
## What it does not know

Anything but plain shapes: other words give some shape. More than three objects, columns of three, counts with a place,
negations, other languages, other sizes than 64x64.

## Training

Only on drawn scenes with generated captions (`training/shapes`): no photographs, no people, no text from the web. The
text encoder first learns to parse: each token of an object's phrase must name the object's colour, shape, place, size
and count, and the layout of the whole. Then encoder and transformer learn together by flow matching, with 10 % of the
captions left out for guidance. Style words, strange words, typos and odd punctuation disturb one caption in three.

    make train                                                      # from nothing
    make train TRAIN_ARGS="--from src/triptych/models/shapes"       # going on from these weights
"""


def _table(results: dict[str, FormResult]) -> str:
    rows = ["| form | for example | wholly right | by attribute |", "|---|---|---|---|"]
    for form, result in results.items():
        attributes = ", ".join(
            f"{name} {good}/{asked}" for name, (good, asked) in result.attributes.items() if good < asked
        )
        share = f"{result.right}/{result.asked} ({result.right / result.asked:.0%})"
        rows.append(f"| {form} | `{EXAMPLES[form]}` | {share} | {attributes or 'all right'} |")
    return "\n".join(rows)


def place_sheet(folder: Path, sheet: Path) -> None:
    """Put a sample sheet beside the weights, small: a palette would be smaller still, and show other colours."""
    with Image.open(sheet) as picture:
        picture.convert("RGB").save(folder / SHEET, quality=88)


def write_card(folder: Path, results: dict[str, FormResult], *, sheet: Path, history: str) -> None:
    """Write `README.md` and the sample sheet beside the weights; `history` says in a sentence how they came to be."""
    place_sheet(folder, sheet)
    judged = (
        "Held-out captions, 20 steps, guidance 3, one try each, one call per picture as a server draws them, judged\n"
        "by `training/shapes/checker.py`, which is right on over 99 % of drawn scenes. Attributes that were wrong now\n"
        "and then are named. Half of the one-word captions are bare words that training has seen: there are few."
    )
    parts = [HEADER, judged, "", _table(results), "", FOOTER, f"These weights: {history}", ""]
    (folder / "README.md").write_text("\n".join(parts))
