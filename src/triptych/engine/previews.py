"""Partial pictures of one unit: after the planned steps its predicted clean latents are decoded and handed on.

It runs inside the unit's own task, so the VAE's forward is one of the hub's like any other, and an abort takes effect
there too. Nothing of the run itself is written to. A picture that cannot be made ends the previews, not the unit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from triptych.engine.denoised import SchedulerStep
from triptych.engine.latents import picture_of
from triptych.engine.pixels import pixels_of
from triptych.engine.preview_plan import preview_steps
from triptych.engine.progress import ProgressReporter

__all__ = ["PreviewMaker"]

_log = logging.getLogger(__name__)

OnPicture = Callable[[npt.NDArray[np.uint8], int, int], None]


class PreviewMaker:
    """Makes up to `count` pictures of one unit and calls `on_picture(pixels, index, step)` with each."""

    def __init__(
        self, count: int, progress: ProgressReporter, on_picture: OnPicture, *, size: tuple[int, int], num_frames: int
    ) -> None:
        self._count = count
        self._progress = progress
        self._on_picture = on_picture
        self._width, self._height = size
        self._num_frames = num_frames
        self._made = 0
        self._last_step = 0

    def on_step(self, made: SchedulerStep) -> None:
        """The unit's scheduler has made one step, and progress knows of it."""
        step = self._progress.step
        if not any(self._last_step < planned <= step for planned in preview_steps(self._progress.steps, self._count)):
            return
        self._last_step = step
        pipe: Any = self._progress.pipe
        try:
            picture = picture_of(
                pipe, made.clean_latents(), width=self._width, height=self._height, num_frames=self._num_frames
            )
            pixels = pixels_of(picture)
        except Exception as error:  # noqa: BLE001 - the unit itself may well end as it should
            _log.warning("no previews of %s: %s: %s", type(pipe).__name__, type(error).__name__, error)
            self._count = 0
            return
        self._on_picture(pixels, self._made, step)
        self._made += 1
