"""Runs the forwards of calls that fit together as one, and each alone whenever that is in doubt.

The first merged forward of each kind is checked against separate ones; a model that differs is never merged again. A
merged forward that fails is repeated call by call, so an error or missing memory meets only the unit it belongs to.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Container, Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.weak import WeakIdKeyDictionary

from triptych.engine.collation import Samples, Unmergeable, gather, merge, split, tensors_of
from triptych.engine.failures import is_out_of_memory, one_line
from triptych.engine.overrides import Override

if TYPE_CHECKING:
    from triptych.engine.hub import Task

__all__ = ["Call", "Merger", "Model", "Phase"]

Phase = Literal["encode", "step", "decode"]

_log = logging.getLogger(__name__)

# Largest difference between a merged and a separate forward, as a share of the largest value.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One forward (or `encode`, `decode`) of a pipeline's component, as the hub found it."""

    name: str
    phase: Phase
    forward: Callable[..., Any]
    signature: inspect.Signature
    override: Override


class Call:
    """A forward that a task waits for; once `settled`, `value` or `error` says how it went."""

    __slots__ = ("_samples", "args", "error", "kwargs", "model", "settled", "task", "value")

    def __init__(self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any], task: Task) -> None:
        self.model = model
        self.args = args
        self.kwargs = kwargs
        self.task = task
        self.settled = False
        self.value: Any = None
        self.error: Exception | None = None
        self._samples: Samples | Unmergeable | None = None

    def samples(self, digest: Callable[[torch.Tensor], Hashable]) -> Samples | None:
        """Its arguments as samples, found once; None if it must run alone."""
        if self._samples is None:
            try:
                self._samples = gather(
                    self.model.signature, self.args, self.kwargs, override=self.model.override, digest=digest
                )
            except Exception as error:  # noqa: BLE001 - whatever is odd about them: in doubt alone
                _log.debug("a call of %s runs alone: %s", self.model.name, error)
                self._samples = Unmergeable(str(error))
        return None if isinstance(self._samples, Unmergeable) else self._samples

    def settle(self, value: Any = None, error: Exception | None = None) -> None:
        """Keep the outcome and let go of the arguments."""
        self.settled, self.value, self.error = True, value, error
        self.args, self.kwargs, self._samples = (), {}, None


class Merger:
    """Which calls fit together, and their forwards. `max_pixels` bounds samples x pixels x frames of a merged one."""

    def __init__(self, *, max_pixels: int | None = None) -> None:
        self.forwards = 0
        self._max_pixels = max_pixels
        self._limits: dict[Model, int] = {}
        self._checked: dict[Hashable, set[str]] = {}  # with the numbers per sample that differed in a check
        self._switched_off: set[Model] = set()
        self._digests: MutableMapping[torch.Tensor, tuple[int, int]] = WeakIdKeyDictionary()

    def companions(self, seed: Call, candidates: Sequence[Call]) -> list[Call]:
        """`seed` and those of the candidates that may share its forward, first come first."""
        group = [
            call
            for call in candidates
            if call.model is seed.model and call.task.group == seed.task.group and not call.task.alone
        ]
        if not group or seed.task.alone or seed.model in self._switched_off:
            return [seed]
        if (first := seed.samples(self._digest)) is None:
            return [seed]
        chosen, pixels = [seed], first.size * seed.task.pixels
        limit = self._limits.get(seed.model, self._max_pixels)
        for call in group:
            samples = call.samples(self._digest)
            if samples is None or samples.key != first.key:
                continue
            pixels += samples.size * call.task.pixels
            if limit is not None and pixels > limit:
                break
            chosen.append(call)
        return chosen

    def run(self, calls: Sequence[Call]) -> bool:
        """Settle all calls; returns whether one forward served them together."""
        if len(calls) > 1 and self._run_merged(calls):
            return True
        for call in calls:
            if not call.settled:
                call.settle(*self._alone(call))
        return False

    def _run_merged(self, calls: Sequence[Call]) -> bool:
        kind = _kind(calls)
        checked = self._checked.get(kind)
        unseen = _differing_numbers(calls, seen=checked or ())
        outputs, failure = self._merged(calls)
        if failure is None and checked is not None and not unseen:
            for call, value in zip(calls, outputs, strict=True):
                call.settle(value)
            return True
        if failure is not None and is_out_of_memory(failure):
            self._lower_limit(calls)
            return False
        separate = [self._alone(call) for call in calls]
        for call, (value, error) in zip(calls, separate, strict=True):
            call.settle(value, error)
        if any(error is not None for _, error in separate):
            return False  # the call itself is at fault: no verdict on merging
        model = calls[0].model
        try:
            problem = one_line(failure) if failure else _difference(outputs, [value for value, _ in separate])
        except Exception as error:  # noqa: BLE001 - the calls have their values; the next ones are checked instead
            if is_out_of_memory(error):
                return False
            problem = one_line(error)
        if problem is None:
            self._checked.setdefault(kind, set()).update(unseen)
        else:
            self._switched_off.add(model)
            _log.warning("forwards of %s are not merged: %s", model.name, problem)
        return False

    def _merged(self, calls: Sequence[Call]) -> tuple[list[Any], Exception | None]:
        batch = [call.samples(self._digest) for call in calls]
        samples = [one for one in batch if one is not None]
        self.forwards += 1
        try:
            output = calls[0].model.forward(**merge(samples))
            in_lists = bool(calls[0].model.override.samples)
            return split(output, [one.size for one in samples], samples_in_lists=in_lists), None
        except Exception as error:  # noqa: BLE001 - repeated call by call
            return [], error.with_traceback(None)  # its frames hold tensors that the repetition needs room for

    def _alone(self, call: Call) -> tuple[Any, Exception | None]:
        self.forwards += 1
        try:
            return call.model.forward(*call.args, **call.kwargs), None
        except Exception as error:  # noqa: BLE001 - raised where the pipeline called the model
            # The frames of the failed forward hold memory that the next calls need.
            return None, error.with_traceback(None) if is_out_of_memory(error) else error

    def _lower_limit(self, calls: Sequence[Call]) -> None:
        model = calls[0].model
        pixels = sum(samples.size * call.task.pixels for call in calls if (samples := call.samples(self._digest)))
        self._limits[model] = pixels // 2
        _log.warning("%d calls of %s do not fit into memory together; repeated one by one", len(calls), model.name)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _digest(self, tensor: torch.Tensor) -> Hashable:
        """Hash of the values; pipelines pass the same tensor at each step, so it is mostly at hand."""
        known = self._digests.get(tensor)
        if known is None or known[0] != tensor._version:
            values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            known = self._digests[tensor] = (tensor._version, hash(values.numpy().tobytes()))
        return known[1]


def _kind(calls: Sequence[Call]) -> Hashable:
    """What a check of one merged forward tells about others: the arguments that it has, and how they differ."""
    first = calls[0]._samples
    assert isinstance(first, Samples)
    given = tuple(name for name, value in first.arguments.items() if value is not None)
    traits = [call._samples for call in calls]
    uneven = len({one.size for one in traits if isinstance(one, Samples)}) > 1
    ragged = len({tuple(one.lengths.values()) for one in traits if isinstance(one, Samples)}) > 1
    return (calls[0].model, given, uneven, ragged)


def _differing_numbers(calls: Sequence[Call], *, seen: Container[str]) -> set[str]:
    """Arguments that hold one number a sample, such as the timestep, and not the same one for all; less those `seen`.

    A model that takes the first number for all passes every check in which they are equal.
    """
    batch = [call._samples for call in calls if isinstance(call._samples, Samples)]
    found: set[str] = set()
    for name in batch[0].arguments:
        rows = [one.arguments[name] for one in batch]
        if name in seen or not all(isinstance(value, torch.Tensor) for value in rows):
            continue
        per_sample = all(value.shape[:1] == (one.size,) for value, one in zip(rows, batch, strict=True))
        if per_sample and (rows[0].ndim == 1 or name in batch[0].override.scalars):
            joined = torch.cat(rows)
            if bool((joined != joined[:1]).any()):
                found.add(name)
    return found


def _difference(merged: Sequence[Any], separate: Sequence[Any]) -> str | None:
    """How far merged outputs are from separate ones, or None if they are equal up to rounding."""
    found, wanted = list(tensors_of(merged)), list(tensors_of(separate))
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in wanted]:
        return "merged outputs have other shapes than separate ones"
    for one, other in zip(found, wanted, strict=True):
        if not other.numel():
            continue
        tolerance = _TOLERANCE.get(other.dtype, 0.0)
        one, other = one.double(), other.double()
        largest = other.nan_to_num(0, 0, 0).abs().max().item()
        if not torch.allclose(one, other, rtol=0, atol=tolerance * largest, equal_nan=True):
            share = (one - other).abs().max().item() / (largest or math.nan)
            return f"a merged output differs from a separate one by {share:.1e} of the largest value"
    return None
