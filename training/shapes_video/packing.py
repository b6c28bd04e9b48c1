"""Clips as latents without loss: two frames and two by two pixels become the channels of one latent place.

A clip `[n, 3, 13, 64, 64]` in -1..1 becomes `[n, 26, 7, 32, 32]`: 24 colour values and two marks, of columns and of
rows, that let the decoder tell even places from odd ones. The first latent frame holds the first frame alone, as Wan
has it, and zeros for the second.
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["CHANNELS", "COLORS", "MARKS", "pack", "unpack"]

COLORS: Final = 24  # of which the first 12 are the earlier frame's
MARKS: Final = 2
CHANNELS: Final = COLORS + MARKS


def pack(clips: torch.Tensor) -> torch.Tensor:
    """The latents of clips with an odd number of frames and even sides."""
    n, _, frames, height, width = clips.shape
    paired = torch.cat([clips[:, :, :1], torch.zeros_like(clips[:, :, :1]), clips[:, :, 1:]], 2)
    blocks = paired.view(n, 3, (frames + 1) // 2, 2, height // 2, 2, width // 2, 2)
    colors = blocks.permute(0, 3, 5, 7, 1, 2, 4, 6).reshape(n, COLORS, (frames + 1) // 2, height // 2, width // 2)
    marks = torch.ones(n, MARKS, (frames + 1) // 2, height // 2, width // 2)
    marks[:, 0, ..., 1::2] = -1
    marks[:, 1, ..., 1::2, :] = -1
    return torch.cat([colors, marks], 1)


def unpack(latents: torch.Tensor) -> torch.Tensor:
    """The clips of latents, as the autoencoder decodes them."""
    n, _, pairs, rows, columns = latents.shape
    blocks = latents[:, :COLORS].reshape(n, 2, 2, 2, 3, pairs, rows, columns)
    clips = blocks.permute(0, 4, 5, 1, 6, 2, 7, 3).reshape(n, 3, 2 * pairs, 2 * rows, 2 * columns)
    return torch.cat([clips[:, :, :1], clips[:, :, 2:]], 2)
