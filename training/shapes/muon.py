"""Muon in fp32: momentum whose matrices are made orthogonal by Newton-Schulz iterations.

`torch.optim.Muon` iterates in bfloat16 always, which a processor without such instructions does fifty times slower.
Algorithm and constants: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, cast

import torch

__all__ = ["Muon"]

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
ITERATIONS: Final = 5


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Roughly the nearest semi-orthogonal matrix of each of `[n, rows, columns]`."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return cast(torch.Tensor, x.mT if tall else x)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized; for two-dimensional parameters only."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; equal shapes are iterated together."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[torch.nn.Parameter, torch.Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                by_shape[parameter.shape].append((parameter, parameter.grad.lerp(momentum, group["momentum"])))
            for shape, entries in by_shape.items():
                directions = orthogonalize(torch.stack([direction for _, direction in entries]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for (parameter, _), direction in zip(entries, directions, strict=True):
                    parameter.add_(direction, alpha=-group["lr"] * scale)
