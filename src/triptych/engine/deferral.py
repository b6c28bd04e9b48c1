"""Results that are not computed yet: how two forwards that a pipeline calls in turn become one.

Some pipelines call their model for the prompt and then, with the same latents, for the negative prompt. The first call
gets a `Deferred` at once; when the second call comes, both run as one forward. A pipeline that looks at the first
result before makes it run then and there, so nothing depends on the second call coming.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["Deferred"]

_SLICES = (torch.Tensor.__getitem__,)


class Deferred(torch.Tensor):
    """Stands for a tensor that `compute` returns; any use but slicing computes it."""

    _compute: Callable[[], torch.Tensor]

    @staticmethod
    def of(compute: Callable[[], torch.Tensor]) -> Deferred:
        """A placeholder; `compute` is called at each use and should remember its result."""
        placeholder = torch.empty(0).as_subclass(Deferred)
        placeholder._compute = compute
        return placeholder

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _SLICES and isinstance(args[0], cls):
            source, index = args[0]._compute, _computed(args[1])
            return cls.of(lambda: source()[index])
        return func(*_computed(tuple(args)), **_computed(dict(kwargs or {})))


def _computed(tree: Any) -> Any:
    if isinstance(tree, Deferred):
        return tree._compute()
    if isinstance(tree, dict):
        return {key: _computed(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_computed(value) for value in tree)
    return tree
