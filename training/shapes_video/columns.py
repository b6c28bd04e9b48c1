"""The patterns that a column of 8 by 8 pixels through all frames is made of, and training in their terms.

A token of the clip transformer is such a column, 832 values in each of three colours. Its patterns are few: the
transformer trains on their coefficients, `[n, 3 * patterns, 1, 8, 8]`, which is the same as training on pixels whose
remainder is dropped, at a tenth of the values, since the patterns are orthonormal and so keep noise white. `unfold`
then builds the transformer of packed clips by multiplying the patterns into its first and its last layer.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from training.shapes.drawing import SIDE
from training.shapes_video.clips import FRAMES
from training.shapes_video.packing import COLORS, pack

__all__ = ["GRID", "PATTERNS", "VALUES", "columns_of", "find_patterns", "unfold"]

COLUMN: Final = 8  # pixels to a side
GRID: Final = SIDE // COLUMN
PATTERNS: Final = 80
VALUES: Final = FRAMES * COLUMN * COLUMN


def columns_of(shares: torch.Tensor) -> torch.Tensor:
    """`[n, frames, side, side]` as `[n, grid, grid, values]`."""
    n = len(shares)
    blocks = shares.reshape(n, FRAMES, GRID, COLUMN, GRID, COLUMN)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(n, GRID, GRID, VALUES)


def find_patterns(shares: torch.Tensor) -> torch.Tensor:
    """The even column, then the strongest patterns of these covered shares beside it: `[PATTERNS, values]`."""
    even = torch.full((1, VALUES), VALUES**-0.5)
    columns = columns_of(shares).flatten(0, 2)
    columns = columns - (columns @ even.T) @ even
    _, vectors = torch.linalg.eigh(columns.T @ columns)
    return torch.cat([even, vectors.flip(1).T[: PATTERNS - 1]])


def unfold(trained: Any, patterns: torch.Tensor, scale: torch.Tensor, target: Any) -> None:
    """Set the clip transformer `target` to do in packed pixels what `trained` does in coefficients over `scale`."""
    weights = trained.state_dict()
    count, width = len(patterns), weights["patch_embedding.weight"].shape[0]
    colored = torch.zeros(3, count, 3, FRAMES, COLUMN, COLUMN)
    for rgb in range(3):
        colored[rgb, :, rgb] = patterns.view(count, FRAMES, COLUMN, COLUMN)
    packed = pack(colored.flatten(0, 1))
    marks = torch.zeros_like(packed[0])
    marks[COLORS:] = packed[0, COLORS:]
    packed[:, COLORS:] = 0
    flat = packed.permute(0, 2, 3, 4, 1).flatten(1)  # as the last layer orders a token's values
    weights["patch_embedding.weight"] = torch.einsum(
        "wk,kctyx->wctyx", weights["patch_embedding.weight"].view(width, -1), packed
    )
    scaled = flat.T * scale
    weights["proj_out.weight"] = scaled @ weights["proj_out.weight"]
    weights["proj_out.bias"] = scaled @ weights["proj_out.bias"] + marks.permute(1, 2, 3, 0).flatten()
    target.load_state_dict(weights)
