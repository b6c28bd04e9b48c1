"""What one step of a scheduler says about the finished picture: its own prediction of the clean latents.

Schedulers return that prediction, keep it, or can be asked for it by their formula; where no way is known the next
latents serve, which show the picture under its remaining noise.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["SchedulerStep"]

_RETURNED = ("pred_original_sample", "denoised")
_KEPT = ("dpmsolver++", "sde-dpmsolver++", "data_prediction")  # algorithms whose `model_outputs` are clean latents


@dataclass(frozen=True, slots=True)
class SchedulerStep:
    """One call of `scheduler.step` and what it returned."""

    scheduler: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any

    def clean_latents(self) -> torch.Tensor:
        """Predicted clean latents in the layout that the pipeline steps in; not to be written to."""
        if (returned := self._returned()) is not None:
            return returned
        scheduler, config = self.scheduler, self.scheduler.config
        if config.get("predict_x0") or config.get("algorithm_type") in _KEPT:
            kept: torch.Tensor = scheduler.model_outputs[-1]
            return kept
        step = inspect.signature(scheduler.step).bind(*self.args, **self.kwargs).arguments
        sample: torch.Tensor = step["sample"].float()
        output: torch.Tensor = step["model_output"].float()
        if type(scheduler).__name__.startswith("FlowMatch"):
            noise_share: torch.Tensor = scheduler.sigmas[scheduler.step_index - 1]
            return sample - noise_share.to(sample.device) * output
        if hasattr(scheduler, "alphas_cumprod") and not hasattr(scheduler, "sigmas") and _predicts_noise(config):
            signal_share: torch.Tensor = scheduler.alphas_cumprod[int(step["timestep"])].to(sample.device)
            return (sample - (1 - signal_share).sqrt() * output) / signal_share.sqrt()
        following: torch.Tensor = self.result[0] if isinstance(self.result, tuple) else self.result.prev_sample
        return following

    def _returned(self) -> torch.Tensor | None:
        if isinstance(self.result, tuple):
            return self.result[1] if len(self.result) > 1 else None
        return next((value for name in _RETURNED if (value := getattr(self.result, name, None)) is not None), None)


def _predicts_noise(config: Mapping[str, Any]) -> bool:
    return str(config.get("prediction_type", "epsilon")) == "epsilon"
