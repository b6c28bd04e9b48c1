"""The ways a loaded model can be called: with a prompt alone, with pictures beside it, with pictures and a mask.

A pipeline whose own call takes pictures serves them itself; for others diffusers knows a sibling class of the same
family, which is built around the very same model objects, so it costs no memory. A unit's inputs choose the mode.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from triptych.engine.failures import one_line
from triptych.engine.model_settings import ModelSettings
from triptych.engine.pipeline_interface import PipelineInterface
from triptych.engine.pipeline_view import ViewFactory
from triptych.errors import ErrorCode, TriptychError
from triptych.messages import MediaInput, ModelInfo

__all__ = ["Mode", "PipelineModes"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to call the model: the pipeline, what its call takes, and views of it for units."""

    pipe: Any
    interface: PipelineInterface
    views: ViewFactory

    @classmethod
    def of(cls, pipe: Any, settings: ModelSettings) -> Mode:
        """Describe a pipeline. Raises what `PipelineInterface` raises."""
        return cls(pipe, PipelineInterface(pipe, settings), ViewFactory(pipe))


class PipelineModes:
    """The loaded pipeline and its siblings. Raises what `PipelineInterface` raises of the loaded one."""

    def __init__(self, pipe: Any, settings: ModelSettings) -> None:
        self.loaded = Mode.of(pipe, settings)
        self._settings = settings
        parameters = inspect.signature(type(pipe).__call__).parameters
        masked = "mask_image" in parameters
        own = self.loaded if "image" in parameters else None
        self.takes_pictures_itself = own is not None
        self._image = None if masked else own or self._sibling(_with_picture)
        self._mask = own if masked else self._sibling(_with_mask)
        info = self.loaded.interface.info
        self.info: ModelInfo = msgspec.structs.replace(
            info,
            needs_image=own is not None and _needs_picture(pipe),
            image=self._info(self._image),
            mask=self._info(self._mask),
        )

    def of(self, inputs: Iterable[MediaInput]) -> Mode:
        """The mode that takes these inputs. Raises `TriptychError`."""
        kinds = {media.kind for media in inputs}
        mode = self._mask if "mask" in kinds else self._image if "image" in kinds else self.loaded
        if mode is None:
            param = "mask" if "mask" in kinds else "image"
            message = f"{self.info.pipeline} takes no input {'mask' if param == 'mask' else 'pictures'}"
            raise TriptychError(ErrorCode.UNSUPPORTED_PARAMETER, message, param=param)
        return mode

    def _sibling(self, build: Callable[[Any, dict[str, Any]], Any]) -> Mode | None:
        """A pipeline of the same family around the same models, with a scheduler of its own; None: there is none."""
        pipe = self.loaded.pipe
        schedulers = {
            name: copy.deepcopy(component)
            for name, component in pipe.components.items()
            if isinstance(component, SchedulerMixin)
        }
        try:
            sibling = build(pipe, schedulers)
            if sibling is None:
                return None
            sibling.set_progress_bar_config(disable=True)
            return Mode.of(sibling, self._settings_of(sibling))
        except (AttributeError, KeyError, NameError, TypeError, ValueError) as error:
            _log.debug("no sibling of %s takes pictures: %s", type(pipe).__name__, one_line(error))
            return None

    def _settings_of(self, sibling: Any) -> ModelSettings:
        """The settings of the checkpoint as far as the sibling's call takes them."""
        info, settings = self.loaded.interface.info, self._settings
        taken = inspect.signature(type(sibling).__call__).parameters
        sized = msgspec.structs.replace(
            settings.default_sampling_params, width=info.default_width, height=info.default_height
        )
        call_args = {name: value for name, value in settings.call_args.items() if name in taken}
        return msgspec.structs.replace(settings, call_args=call_args, default_sampling_params=sized)

    def _info(self, mode: Mode | None) -> ModelInfo | None:
        if mode is None:
            return None
        info, loaded = mode.interface.info, self.loaded.interface.info
        return msgspec.structs.replace(info, size_multiple=math.lcm(info.size_multiple, loaded.size_multiple))


def _auto_pipeline() -> Any:
    """diffusers' table of families; it imports every pipeline class, with warnings that `loading` turns off first."""
    return importlib.import_module("diffusers.pipelines.auto_pipeline")


def _with_picture(pipe: Any, schedulers: dict[str, Any]) -> Any:
    """Image to image, or for families of clips image to video."""
    auto = _auto_pipeline()
    names = [name for name, family in auto.AUTO_TEXT2VIDEO_PIPELINES_MAPPING.items() if family is type(pipe)]
    if not names:
        return auto.AutoPipelineForImage2Image.from_pipe(pipe, **schedulers)
    family = auto.AUTO_IMAGE2VIDEO_PIPELINES_MAPPING.get(names[0])
    return None if family is None else family(**(pipe.components | schedulers))


def _with_mask(pipe: Any, schedulers: dict[str, Any]) -> Any:
    return _auto_pipeline().AutoPipelineForInpainting.from_pipe(pipe, **schedulers)


def _needs_picture(pipe: Any) -> bool:
    """Whether a call with a prompt alone fails; a class that diffusers does not list may try."""
    if inspect.signature(type(pipe).__call__).parameters["image"].default is inspect.Parameter.empty:
        return True
    auto = _auto_pipeline()
    drawing = (auto.AUTO_TEXT2IMAGE_PIPELINES_MAPPING, auto.AUTO_TEXT2VIDEO_PIPELINES_MAPPING)
    editing = (
        auto.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
        auto.AUTO_INPAINT_PIPELINES_MAPPING,
        auto.AUTO_IMAGE2VIDEO_PIPELINES_MAPPING,
    )
    draws, edits = (any(type(pipe) in table.values() for table in tables) for tables in (drawing, editing))
    return getattr(pipe, "controlnet", None) is not None or (edits and not draws)
