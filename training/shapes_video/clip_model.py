"""The clip transformer and its training: noise levels and call as `WanPipeline` samples it.

A token is a column of 8 by 8 pixels through all 13 frames, trained in the coefficients of `columns`. So large a token
shows through much noise, hence the high noise levels.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import nn

from training.shapes.denoiser import DenoiserTrainer
from training.shapes.encoder import WIDTH, ParseHead
from training.shapes_video.columns import PATTERNS
from training.shapes_video.dataset import LENGTH, ClipDataset
from training.shapes_video.packing import CHANNELS

__all__ = ["ClipTrainer", "new_clip_transformer", "new_column_transformer", "output_scale"]

LOWEST_SIGMA: Final = 0.15  # the sampler's last step starts above it
TIMESTEPS: Final = 1000
EVEN: Final = 6.0  # scale of the even column, which carries the background


def _transformer(channels: int, patch: tuple[int, int, int]) -> Any:
    return WanTransformer3DModel(
        patch_size=patch,
        num_attention_heads=6,
        attention_head_dim=32,
        in_channels=channels,
        out_channels=channels,
        text_dim=WIDTH,
        freq_dim=64,
        ffn_dim=512,
        num_layers=4,
        rope_max_seq_len=64,
    )


def new_clip_transformer() -> Any:
    """The transformer of packed clips."""
    return _transformer(CHANNELS, (7, 4, 4))


def new_column_transformer() -> Any:
    """The transformer of coefficients, which predicts nothing at first."""
    transformer = _transformer(3 * PATTERNS, (1, 1, 1))
    nn.init.normal_(transformer.patch_embedding.weight, std=0.02)
    nn.init.zeros_(transformer.proj_out.weight)
    nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def output_scale(dataset: ClipDataset) -> torch.Tensor:
    """What the transformer's outputs are in units of, one per channel: strong patterns move with one learning rate."""
    scale = 0.3 * dataset.strengths()
    scale[0] = EVEN
    return scale.repeat(3)


class ClipTrainer(DenoiserTrainer):
    """Trains on the coefficients of clips."""

    part = "clip"

    def __init__(self, transformer: Any, encoder: Any, head: ParseHead, *, scale: torch.Tensor, **options: Any) -> None:
        super().__init__(transformer, encoder, head, **options)
        self._scale = scale.view(1, -1, 1, 1, 1)

    def by_muon(self, name: str) -> bool:
        """The blocks' matrices."""
        return name.startswith("blocks")

    def noise_levels(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Logit-normal about 0.8, and the noisiest levels, which decide what is seen, once more evenly."""
        sigma = torch.sigmoid(1.2 * torch.randn(count, generator=generator) + 1.5)
        start = 0.95 + 0.05 * torch.rand(count, generator=generator)
        return torch.where(torch.rand(count, generator=generator) < 0.2, start, sigma).clamp_min(LOWEST_SIGMA)

    def predict(
        self, noisy: torch.Tensor, sigma: torch.Tensor, states: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """One call of the transformer, which sees `LENGTH` tokens, padded with zeros as the pipeline pads."""
        outcome = self.transformer(
            hidden_states=noisy,
            timestep=sigma * TIMESTEPS,
            encoder_hidden_states=F.pad(states * mask[..., None], (0, 0, 0, LENGTH - mask.shape[1])),
            return_dict=False,
        )
        return cast(torch.Tensor, outcome[0]) * self._scale
