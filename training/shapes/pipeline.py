"""The model as diffusers loads it: put a pipeline together, write it in one piece, draw many captions at once, show a
sheet."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, PRXPixelPipeline, PRXTransformer2DModel
from PIL import Image, ImageDraw
from torch import nn

from training.shapes.drawing import SIDE, Picture
from training.shapes.encoder import WIDTH
from training.shapes.tokenizer import LENGTH

__all__ = ["GUIDANCE", "STEPS", "assemble", "draw", "load_pipeline", "new_transformer", "save_pipeline", "save_sheet"]

STEPS: Final = 20
GUIDANCE: Final = 3.0
CELL: Final = 128
LABEL_LINES: Final = 5
LABEL_WIDTH: Final = 21  # characters


def new_transformer(*, start: Path | None = None) -> Any:
    """The picture transformer, fresh (its blocks begin as the identity) or with the weights of a pipeline directory."""
    transformer = PRXTransformer2DModel(
        in_channels=3,
        patch_size=8,
        context_in_dim=WIDTH,
        hidden_size=192,
        mlp_ratio=2.0,
        num_heads=6,
        depth=5,
        axes_dim=[16, 16],
        bottleneck_size=128,
    )
    if start is not None:
        transformer.load_state_dict(PRXTransformer2DModel.from_pretrained(start, subfolder="transformer").state_dict())
        return transformer
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and ("modulation" in name or "adaLN" in name or name == "final_layer.linear"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return transformer


def assemble(transformer: Any, encoder: Any, tokenizer: Any) -> Any:
    """The pipeline around these modules."""
    pipeline = PRXPixelPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=2.0),
        text_encoder=encoder,
        tokenizer=tokenizer,
        default_sample_size=SIDE,
        prompt_max_tokens=LENGTH,
        noise_scale=1.0,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_pipeline(folder: Path) -> Any:
    """A pipeline directory."""
    pipeline = PRXPixelPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save_pipeline(pipeline: Any, folder: Path) -> None:
    """Write the pipeline's own files into `folder`, without the path it came from; other files there stay."""
    unfinished = folder.with_name(folder.name + ".writing")
    shutil.rmtree(unfinished, ignore_errors=True)
    pipeline.save_pretrained(unfinished)
    for file in unfinished.rglob("*.json"):
        settings = json.loads(file.read_text())
        if settings.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(settings, indent=2) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for part in unfinished.iterdir():
        target = folder / part.name
        if target.is_dir():
            shutil.rmtree(target)
        part.replace(target)
    unfinished.rmdir()


def draw(
    pipeline: Any,
    captions: Sequence[str],
    seeds: Sequence[int],
    *,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
) -> list[Picture]:
    """One picture per caption in a single batch, each from its own seed.

    The pipeline's call gives guidance two timesteps whatever the batch, so a hook spreads them over all rows.
    """
    shape = (1, 3, SIDE, SIDE)
    noise = torch.cat([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])

    def spread_timestep(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "timestep": kwargs["timestep"][:1].expand(len(kwargs["hidden_states"]))}

    hook = pipeline.transformer.register_forward_pre_hook(spread_timestep, with_kwargs=True)
    try:
        pixels = pipeline(
            list(captions),
            latents=noise,
            num_inference_steps=steps,
            guidance_scale=guidance,
            height=SIDE,
            width=SIDE,
            use_resolution_binning=False,
            output_type="np",
        ).images
    finally:
        hook.remove()
    return [np.clip(np.rint(picture * 255), 0, 255).astype(np.uint8) for picture in pixels]


def save_sheet(path: Path, pictures: Sequence[Picture], labels: Sequence[str], *, columns: int = 8) -> None:
    """A labelled contact sheet."""
    rows = -(-len(pictures) // columns)
    height = CELL + LABEL_LINES * 11 + 6
    sheet = Image.new("RGB", (columns * (CELL + 4), rows * height), "white")
    pen = ImageDraw.Draw(sheet)
    for k, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        x, y = k % columns * (CELL + 4), k // columns * height
        sheet.paste(Image.fromarray(picture).resize((CELL, CELL), Image.Resampling.NEAREST), (x, y))
        for line in range(LABEL_LINES):
            pen.text(
                (x + 2, y + CELL + 1 + line * 11), label[line * LABEL_WIDTH : (line + 1) * LABEL_WIDTH], fill="black"
            )
    sheet.save(path, optimize=True)
