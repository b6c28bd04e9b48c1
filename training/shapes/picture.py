"""The picture transformer's training: noise levels and call as `PRXPixelPipeline` samples it."""

from __future__ import annotations

from typing import Final, cast

import torch

from training.shapes.denoiser import DenoiserTrainer

__all__ = ["PictureTrainer"]

NOT_MUON: Final = ("final_layer", "img_in", "txt_in", "modulation", "adaLN", "time_in")


class PictureTrainer(DenoiserTrainer):
    """Trains on pictures in -1..1."""

    part = "picture"

    def by_muon(self, name: str) -> bool:
        """All but the layers at the ends and those that tell the noise level."""
        return not any(part in name for part in NOT_MUON)

    def noise_levels(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Logit-normal, more of the noisy half."""
        return torch.sigmoid(torch.randn(count, generator=generator) + 0.6)

    def predict(
        self, noisy: torch.Tensor, sigma: torch.Tensor, states: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """One call of the transformer."""
        outcome = self.transformer(
            hidden_states=noisy,
            timestep=sigma,
            encoder_hidden_states=states,
            attention_mask=mask,
            return_dict=False,
        )
        return cast(torch.Tensor, outcome[0])
