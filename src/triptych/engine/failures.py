"""From an exception of a pipeline to the `Failure` its caller reads."""

from __future__ import annotations

import inspect
import logging
import re
import traceback
from typing import Any

import torch

from triptych.errors import ErrorCode, TriptychError
from triptych.messages import Address, Failure, SamplingParams

__all__ = ["failure_of", "is_out_of_memory", "one_line"]

_log = logging.getLogger(__name__)

_CPU_ALLOCATOR = "DefaultCPUAllocator"
# Functions of diffusers that raise a ValueError over what was asked for; of timesteps that is their number only.
_CHECKS = ("check_", "set_timesteps", "retrieve_timesteps")


def failure_of(error: Exception, address: Address, pipe: Any, *, in_one_step: bool = False) -> Failure:
    """Code, message and field at fault; what is not the caller's fault is logged with its stack.

    `in_one_step`: the unit ran in a single denoising step, and nobody knows yet whether its model can do that.
    """
    failure = _failure_of(error, address, pipe)
    if not in_one_step or failure.code is not ErrorCode.ENGINE_ERROR:
        return failure
    message = f"num_inference_steps: one denoising step may be too few for this model, try 2 or more: {failure.message}"
    return Failure(address, ErrorCode.INVALID_VALUE, message, "num_inference_steps")


def _failure_of(error: Exception, address: Address, pipe: Any) -> Failure:
    if isinstance(error, TriptychError):
        return Failure(address, error.code, error.message, error.param)
    if is_out_of_memory(error):
        return Failure(address, ErrorCode.OUT_OF_MEMORY, f"the device has too little free memory: {one_line(error)}")
    if isinstance(error, ValueError) and (check := _check(error, pipe)) is not None:
        return Failure(address, ErrorCode.INVALID_VALUE, str(error), _field_checked(check, str(error)))
    _log.error("unit %s/%d failed", address.request_id, address.unit, exc_info=error)
    return Failure(address, ErrorCode.ENGINE_ERROR, f"{type(pipe).__name__} failed: {one_line(error)}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or on CPU the host, had no memory left."""
    cpu = isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
    return cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)


def one_line(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:500]}" if lines else type(error).__name__


def _check(error: ValueError, pipe: Any) -> str | None:
    """Name of the function that raised it, if it checks what was asked for: as such, or the pipeline's call itself."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    name = frame.f_code.co_name
    checks = name.startswith(_CHECKS) or frame.f_code is inspect.unwrap(type(pipe).__call__).__code__
    return name if checks else None


def _field_checked(check: str, message: str) -> str | None:
    if "timesteps" in check:
        return "num_inference_steps"
    if "image" in check:
        return "image"
    words = re.findall(r"[a-z_0-9]+", message.lower())
    return next((word for word in words if word in SamplingParams.__struct_fields__), None)
