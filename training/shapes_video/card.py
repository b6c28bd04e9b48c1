"""Write the clip model's card: what it is, what it knows and how often it is right, and how it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from training.shapes.card import place_sheet
from training.shapes.evaluation import FormResult
from training.shapes_video.evaluation import total

__all__ = ["write_clip_card"]

HEADER: Final = """\
---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
---

# triptych/shapes-video

A text-to-video model small enough to live in a Git repository: one coloured shape on a plain background that moves,
grows, shrinks or stays, 13 frames of 64x64 pixels. It exists so that a server of diffusion models can be tried, tested
and measured with moving pictures on any machine.

| | |
|---|---|
| pipeline | `WanPipeline` of diffusers (predicts the clean clip) |
| transformer | 64 tokens, each a column of 8x8 pixels through all frames; width 192, 4 layers, 3.4 million parameters |
| text encoder | UMT5 encoder, 3 layers, width 128, 0.6 million parameters; captions up to 32 tokens |
| autoencoder | 0.3 million parameters that are set, not trained: it packs and unpacks pixels without loss |
| weights | 17 MB, fp32, safetensors |
| defaults (`triptych.json`) | 13 frames of 64x64 at 8 frames a second, 16 steps, guidance 2 |
| licence | Apache-2.0, weights and code |

## Use

    triptych generate --model triptych/shapes-video "a red star moving to the right" -o clip.mp4 --seed 7

or with diffusers alone:

    import torch
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained("src/triptych/models/shapes-video")
    frames = pipe(
        "a red star moving to the right",
        negative_prompt="",
        num_frames=13,
        height=64,
        width=64,
        max_sequence_length=32,
        num_inference_steps=16,
        guidance_scale=2.0,
        generator=torch.Generator("cpu").manual_seed(7),
    ).frames[0]

Other sizes and other numbers of frames do not work: the transformer's tokens span all 13 frames.

## What it knows

Eleven colours, eight shapes, six backgrounds; moving right, left, up and down, growing, shrinking, and standing still
where no motion is said. A background that is not mentioned is white, and gray under a white shape. Seeds change little:
a caption says nearly everything that is seen.

![samples](samples.jpg)
"""
FOOTER: Final = """\
## What it does not know

More than one shape, speeds, turns, places, sizes, typos, and anything but plain shapes. For no motion it knows
"standing still", "staying still", "not moving", "that does not move" and silence, but not "stays". The autoencoder
decodes what the transformer makes, whose latents carry two marks beside the colours; latents of its own encoder lack
the marks, so it cannot decode what it encoded.

## Training

Only on drawn clips with generated captions (`training/shapes_video`): no videos, no people, no text from the web. The
text encoder first learns to parse: each token of the shape's phrase must name colour, shape, motion and background.
Then encoder and transformer learn together by flow matching, with 10 % of the captions left out for guidance; the
transformer trains on the coefficients of 80 patterns per column and colour, which are then multiplied into its first
and last layer.

    make train-video                                                      # from nothing
    make train-video TRAIN_ARGS="--from src/triptych/models/shapes"       # with the picture model's encoder to begin
"""


def _row(name: str, result: FormResult) -> str:
    attributes = ", ".join(f"{part} {good}/{asked}" for part, (good, asked) in result.attributes.items())
    return f"| {name} | {result.right}/{result.asked} | {attributes} |"


def write_clip_card(folder: Path, results: dict[str, FormResult], *, sheet: Path, history: str) -> None:
    """Write `README.md` and the sample sheet beside the weights; `history` says in a sentence how they came to be."""
    place_sheet(folder, sheet)
    judged = (
        "Held-out captions, 16 steps, guidance 2, one try each, judged by `training/shapes_video/checker.py`, which\n"
        "is right on over 99 % of drawn clips: motion from the first frame to the last, the rest in the middle frame;\n"
        "count is one single shape in the first, the middle and the last frame. A connected part is one shape,\n"
        "whatever colours are in it: the way pictures are read, where a rim of another colour is a shape of its own,\n"
        "is far stricter on edges that are softer than drawn ones."
    )
    rows = ["| motion | wholly right | by attribute |", "|---|---|---|", *(_row(*entry) for entry in results.items())]
    rows.append(_row("all", total(results)))
    parts = [HEADER, judged, "", *rows, "", FOOTER, f"These weights: {history}", ""]
    (folder / "README.md").write_text("\n".join(parts))
