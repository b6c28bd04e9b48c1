"""Several calls of one forward made one call, and its output cut up again: pure functions over trees of tensors.

`gather` binds the arguments of a call and finds its `key`: calls with equal keys fit together. `merge` joins their
arguments, `split` cuts the output. Whatever is not understood raises `Unmergeable`, and the call runs alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.utils.outputs import BaseOutput
from torch.nn import functional
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from triptych.engine.overrides import Override

__all__ = ["Digest", "Samples", "Unmergeable", "gather", "merge", "split", "tensors_of"]

Digest = Callable[[torch.Tensor], Hashable]
"""Stands for the values of a tensor: equal for equal ones."""

_Plain = bool | int | float | str | torch.dtype | torch.device


class Unmergeable(Exception):
    """A call that must run alone; the message says why."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The arguments of one call by name. `size` samples; `lengths` of its text arguments that may be padded."""

    arguments: Mapping[str, Any]
    override: Override
    size: int
    lengths: Mapping[str, int]
    key: Hashable


def gather(
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    override: Override,
    digest: Digest,
) -> Samples:
    """The samples of one call. Raises `Unmergeable`."""
    arguments = _by_name(signature, args, kwargs)
    for name in override.ignored:
        if name in arguments:
            arguments[name] = None
    size = _size(arguments, override)
    for name in override.scalars:
        if name in arguments:
            arguments[name] = _per_sample(arguments[name], size)
    lengths = {
        name: value.shape[1]
        for name in override.padded
        if isinstance(value := arguments.get(name), torch.Tensor) and value.ndim > 2 and value.shape[0] == size
    }
    masks = {override.padded[name] for name in lengths}
    trait = _Trait(override, size, digest)
    key: list[Hashable] = []
    for name, value in arguments.items():
        if name in lengths:
            key.append(("text", value.dtype, tuple(value.shape[2:])))
        elif name in masks:
            key.append(_mask(name, value, size))
        elif name in override.scalars and isinstance(value, torch.Tensor) and value.shape[:1] == (size,):
            key.append(("scalar", value.device, tuple(value.shape[1:])))
        else:
            key.append(trait.of(name, value))
    return Samples(arguments, override, size, lengths, (tuple(arguments), tuple(key)))


def _by_name(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= dict(sorted(value.items()))
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            if value != ():
                raise Unmergeable(f"argument {name} has no keyword")
        else:
            arguments[name] = value
    return arguments


def _size(arguments: Mapping[str, Any], override: Override) -> int:
    value = arguments.get(override.batch_from or next(iter(arguments), ""))
    if isinstance(value, torch.Tensor) and value.ndim:
        return int(value.shape[0])
    if isinstance(value, list) and value:
        return len(value)
    raise Unmergeable("the number of samples is unknown")


def _per_sample(value: Any, size: int) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = torch.tensor(value)
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return value.reshape(1).expand(size)
    return value


def _mask(name: str, value: Any, size: int) -> Hashable:
    if value is None or (isinstance(value, torch.Tensor) and value.ndim == 2 and value.shape[0] == size):
        return "mask"
    raise Unmergeable(f"mask {name} does not hold one row per sample")


@dataclass(frozen=True, slots=True)
class _Trait:
    """What of an argument must be equal for calls to fit together."""

    override: Override
    size: int
    digest: Digest

    def of(self, name: str, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            if value.ndim and value.shape[0] == self.size and name not in self.override.shared:
                return ("rows", value.dtype, value.device, tuple(value.shape[1:]))
            return ("same", value.dtype, value.device, tuple(value.shape), self.digest(value))
        if value is None or isinstance(value, _Plain):
            return (type(value), value)
        if isinstance(value, dict):
            return ("dict", tuple((key, self.of(str(key), item)) for key, item in value.items()))
        if isinstance(value, list | tuple):
            return self._of_items(name, value)
        raise Unmergeable(f"argument {name} is a {type(value).__name__}")

    def _of_items(self, name: str, value: Sequence[Any]) -> Hashable:
        if name in self.override.samples:
            return self._of_samples(name, value)
        items = tuple(self.of(name, item) for item in value)
        if isinstance(value, list) and len(value) == self.size and not any(True for _ in tensors_of(value)):
            raise Unmergeable(f"list {name} may hold one entry per sample or not")
        return (type(value), items)

    def _of_samples(self, name: str, value: Sequence[Any]) -> Hashable:
        if len(value) != self.size:
            raise Unmergeable(f"list {name} holds {len(value)} entries for {self.size} samples")
        if all(isinstance(item, torch.Tensor) for item in value):
            return ("samples", frozenset((item.dtype, item.device, item.ndim) for item in value))
        whole = replace(self, size=-1)
        entries = [whole.of("", item) for item in value]
        if any(entry != entries[0] for entry in entries):
            raise Unmergeable(f"entries of list {name} differ")
        return ("entries", entries[0])


def merge(batch: Sequence[Samples]) -> dict[str, Any]:
    """Keyword arguments of one call for all, in their order. The keys must be equal."""
    first = batch[0]
    masks = {first.override.padded[name]: name for name in first.lengths}
    joined: dict[str, Any] = {}
    for name in first.arguments:
        values = [samples.arguments[name] for samples in batch]
        if name in first.lengths:
            joined[name] = _joined_text(name, values)
        elif name in masks:
            joined[name] = _joined_mask(values, [(samples.size, samples.lengths[masks[name]]) for samples in batch])
        else:
            joined[name] = _join(name, values, first)
    device = next((value.device for value in tensors_of(list(joined.values()))), None)
    for name in masks:
        if joined[name] is not None:
            joined[name] = joined[name].to(device)
    return joined


def _joined_text(name: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    longest = max(value.shape[1] for value in values)
    return torch.cat([_pad(value, longest) for value in values])


def _pad(value: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - value.shape[1]
    return functional.pad(value, (0, 0) * (value.ndim - 2) + (0, missing)) if missing else value


def _joined_mask(masks: Sequence[torch.Tensor | None], shapes: Sequence[tuple[int, int]]) -> torch.Tensor | None:
    longest = max(length for _, length in shapes)
    given = [mask for mask in masks if mask is not None]
    if not given and all(length == longest for _, length in shapes):
        return None
    dtype, device = (given[0].dtype, given[0].device) if given else (torch.bool, None)
    rows = []
    for mask, shape in zip(masks, shapes, strict=True):
        valid = torch.ones(shape, dtype=dtype, device=device) if mask is None else mask
        rows.append(_pad(valid, longest))
    return torch.cat(rows)


def _join(name: str, values: Sequence[Any], first: Samples) -> Any:
    value = values[0]
    if isinstance(value, torch.Tensor):
        rows = value.ndim and value.shape[0] == first.size and name not in first.override.shared
        return torch.cat(list(values)) if rows else value
    if isinstance(value, dict):
        return {key: _join(str(key), [other[key] for other in values], first) for key in value}
    if isinstance(value, list | tuple):
        if name in first.override.samples:
            return [item for other in values for item in other]
        return type(value)(_join(name, list(items), first) for items in zip(*values, strict=True))
    return value


def split(output: Any, sizes: Sequence[int], *, samples_in_lists: bool) -> list[Any]:
    """The output of a merged call, cut into those of `sizes` samples each. Raises `Unmergeable`.

    With `samples_in_lists` a list holds one entry per sample; all other sequences are cut entry by entry. Caches of
    text models are dropped: they serve for generating text only.
    """
    cut = functools.partial(split, sizes=sizes, samples_in_lists=samples_in_lists)
    if isinstance(output, torch.Tensor):
        if not output.ndim or output.shape[0] != sum(sizes):
            raise Unmergeable(f"the output has shape {tuple(output.shape)} for {sum(sizes)} samples")
        return list(torch.split(output, list(sizes)))
    if output is None or isinstance(output, _Plain | Cache):
        return [None if isinstance(output, Cache) else output] * len(sizes)
    if isinstance(output, DiagonalGaussianDistribution):
        return [type(output)(rows, output.deterministic) for rows in cut(output.parameters)]
    if isinstance(output, ModelOutput | BaseOutput):
        fields = {name: cut(value) for name, value in output.items()}
        return [type(output)(**{name: parts[i] for name, parts in fields.items()}) for i in range(len(sizes))]
    if isinstance(output, list) and samples_in_lists:
        if len(output) != sum(sizes):
            raise Unmergeable(f"the output lists {len(output)} entries for {sum(sizes)} samples")
        entries = iter(output)
        return [[next(entries) for _ in range(size)] for size in sizes]
    if type(output) in (list, tuple):
        columns = [cut(item) for item in output]
        return [type(output)(column[i] for column in columns) for i in range(len(sizes))]
    raise Unmergeable(f"the output holds a {type(output).__name__}")


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors of an argument or output, in a fixed order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, DiagonalGaussianDistribution):
        yield tree.parameters
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_of(value)
