"""Trees of tensors between ranks: their shape as a small message, their values as one block of bytes.

Nothing is pickled. `pack` takes arguments or outputs apart, `unpack` puts them together on another device; `rows` takes
some samples out of gathered arguments, `join` puts outputs of consecutive samples together again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from diffusers.utils.outputs import BaseOutput
from transformers.utils.generic import ModelOutput

from triptych.engine.collation import Samples

__all__ = ["Packed", "join", "pack", "rows", "unpack"]

_ALIGNMENT = 16  # a slice of bytes can be seen as any dtype when it begins at a multiple of its size


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """A tree without its values. `shape` is nested lists, each with its kind first; `size` in bytes."""

    shape: Any
    size: int


def pack(tree: Any, device: torch.device) -> tuple[Packed, torch.Tensor]:
    """Shape of a tree, and the bytes of its tensors. Raises TypeError for what cannot travel."""
    tensors: list[torch.Tensor] = []
    shape = _shape(tree, tensors)
    values = torch.zeros(sum(_room(tensor.nbytes) for tensor in tensors), dtype=torch.uint8, device=device)
    offset = 0
    for tensor in tensors:
        values[offset : offset + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
        offset += _room(tensor.nbytes)
    return Packed(shape, values.numel()), values


def _room(size: int) -> int:
    return size + -size % _ALIGNMENT


def _shape(tree: Any, tensors: list[torch.Tensor]) -> list[Any]:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return ["tensor", str(tree.dtype).removeprefix("torch."), list(tree.shape)]
    if isinstance(tree, Mapping):
        return ["dict", [[key, _shape(value, tensors)] for key, value in tree.items()]]
    if isinstance(tree, list | tuple):
        return [type(tree).__name__ if type(tree) is list else "tuple", [_shape(item, tensors) for item in tree]]
    if isinstance(tree, torch.dtype):
        return ["dtype", str(tree).removeprefix("torch.")]
    if isinstance(tree, torch.device):
        return ["device"]
    if tree is None or isinstance(tree, bool | int | float | str):
        return ["plain", tree]
    raise TypeError(f"a {type(tree).__name__} cannot travel to another rank")


def unpack(packed: Packed, values: torch.Tensor) -> Any:
    """The tree, on the device of `values`."""
    offset = 0

    def build(shape: Any) -> Any:
        nonlocal offset
        kind, *rest = shape
        if kind == "tensor":
            dtype = getattr(torch, rest[0])
            size = dtype.itemsize * torch.Size(rest[1]).numel()
            raw = values[offset : offset + size]
            offset += _room(size)
            return raw.view(dtype).reshape(rest[1])
        if kind == "dict":
            return {key: build(value) for key, value in rest[0]}
        if kind in ("list", "tuple"):
            items = [build(item) for item in rest[0]]
            return items if kind == "list" else tuple(items)
        if kind == "dtype":
            return getattr(torch, rest[0])
        return values.device if kind == "device" else rest[0]

    return build(packed.shape)


def rows(samples: Samples, start: int, stop: int) -> dict[str, Any]:
    """Keyword arguments for the samples from `start` to `stop`."""
    override, size = samples.override, samples.size

    def cut(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            own = value.ndim and value.shape[0] == size and name not in override.shared
            return value[start:stop] if own else value
        if isinstance(value, dict):
            return {key: cut(str(key), item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            if name in override.samples:
                return value[start:stop]
            return type(value)(cut(name, item) for item in value)
        return value

    return {name: cut(name, value) for name, value in samples.arguments.items()}


def join(first: Any, others: Sequence[Any], *, samples_in_lists: bool) -> Any:
    """One output for the samples of all; the others may hold plain mappings for what `first` holds as an output."""
    if isinstance(first, torch.Tensor):
        return torch.cat([first, *others])
    if isinstance(first, ModelOutput | BaseOutput):
        return type(first)(
            **{
                name: join(value, [other[name] for other in others], samples_in_lists=samples_in_lists)
                for name, value in first.items()
            }
        )
    if isinstance(first, list) and samples_in_lists:
        return [*first, *itertools.chain(*others)]
    if isinstance(first, list | tuple):
        columns = zip(*others, strict=True)
        return type(first)(
            join(item, list(column), samples_in_lists=samples_in_lists)
            for item, column in zip(first, columns, strict=True)
        )
    return first
