"""The model as diffusers loads it: put a `WanPipeline` together, and draw clips with it as a server does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline

from training.shapes.drawing import SIDE
from training.shapes_video.autoencoder import new_autoencoder
from training.shapes_video.clip_model import TIMESTEPS
from training.shapes_video.clips import FRAMES, Video
from training.shapes_video.dataset import LENGTH

__all__ = ["GUIDANCE", "STEPS", "assemble_clip_pipeline", "draw_clip", "load_clip_pipeline"]

STEPS: Final = 16
GUIDANCE: Final = 2.0
SHIFT: Final = 4.0


def assemble_clip_pipeline(transformer: Any, encoder: Any, tokenizer: Any) -> Any:
    """The pipeline around these modules, with the autoencoder that packs."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="sample", use_flow_sigmas=True, num_train_timesteps=TIMESTEPS, flow_shift=SHIFT
    )
    pipeline = WanPipeline(
        tokenizer=tokenizer, text_encoder=encoder, vae=new_autoencoder(), transformer=transformer, scheduler=scheduler
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_clip_pipeline(folder: Path) -> Any:
    """A pipeline directory."""
    pipeline = WanPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw_clip(pipeline: Any, caption: str, seed: int, *, steps: int = STEPS, guidance: float = GUIDANCE) -> Video:
    """One clip in one call."""
    pixels = pipeline(
        caption,
        negative_prompt="",
        num_frames=FRAMES,
        height=SIDE,
        width=SIDE,
        num_inference_steps=steps,
        guidance_scale=guidance,
        max_sequence_length=LENGTH,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).frames[0]
    return np.asarray(np.clip(np.rint(pixels * 255), 0, 255), np.uint8)
