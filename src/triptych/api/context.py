"""What every endpoint is built from: the orchestrator, the served names and the operator's limits.

`create_app` makes one `ApiContext` and hands it to each endpoint module's `routes(context)`; nothing else is shared.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

from triptych.api.access import ApiKeys
from triptych.api.idempotency import Answers, Endpoint, idempotent
from triptych.api.media import MediaReader
from triptych.api.results import Results
from triptych.config.parameters import Limits, SamplingDefaults, unsupported_parameters
from triptych.errors import ErrorCode, TriptychError
from triptych.jobs.video_jobs import VideoJobs
from triptych.messages import ModelInfo
from triptych.orchestrator.admission import COME_BACK_S
from triptych.orchestrator.orchestrator import Orchestrator

__all__ = ["ApiContext"]

_log = logging.getLogger(__name__)

_MAX_COMMAND_BYTES = 64 << 10


@dataclass(slots=True, kw_only=True)
class ApiContext:
    """Shared state of the endpoints, read-only for them; `max_body_size` in bytes."""

    orchestrator: Orchestrator
    jobs: VideoJobs
    served_model_names: tuple[str, ...]
    defaults: SamplingDefaults
    limits: Limits
    max_body_size: int
    chat_image_format: Literal["parts", "images"]
    started_at: int
    keys: ApiKeys
    log_prompts: bool
    public_url: str | None
    results: Results
    media: MediaReader
    _answers: Answers = field(default_factory=Answers, init=False)
    _announced: ModelInfo | None = field(default=None, init=False)

    def idempotent(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint, made to heed `Idempotency-Key`."""
        return idempotent(endpoint, self._answers, max_body_size=self.max_body_size)

    @property
    def max_command_size(self) -> int:
        """Bytes of a body that has a few numbers at most."""
        return min(self.max_body_size, _MAX_COMMAND_BYTES)

    @property
    def model_name(self) -> str:
        """The served name that answers show."""
        return self.served_model_names[0]

    def check_model(self, name: object) -> None:
        """Accept a request's `model`: absent or one of the served names. Raises `TriptychError`."""
        if name is None or name in self.served_model_names:
            return
        served = ", ".join(repr(served) for served in self.served_model_names)
        if not isinstance(name, str):
            raise TriptychError(ErrorCode.INVALID_VALUE, f"model must be a string; served: {served}", param="model")
        message = f"The model {name[:256]!r} does not exist; served: {served}"
        raise TriptychError(ErrorCode.MODEL_NOT_FOUND, message, param="model")

    def loaded_model(self) -> ModelInfo:
        """What the loaded pipeline takes. Raises `TriptychError` before the first replica is ready."""
        if (info := self.orchestrator.model) is None:
            raise self.unready()
        if info is not self._announced:
            self._announced = info
            calls = [call for call in (info, info.image, info.mask) if call is not None]
            unused = [set(unsupported_parameters(self.defaults, call)) for call in calls]
            if names := sorted(set.intersection(*unused)):
                _log.warning("default_sampling_params that %s does not take are not used: %s", info.pipeline, names)
        return info

    def unready(self) -> TriptychError:
        """Why no work is taken now, with a wait worth telling the client."""
        reason = ErrorCode(self.orchestrator.readiness().reason or ErrorCode.NOT_READY)
        messages = {
            ErrorCode.DRAINING: "the server is shutting down and takes no new work",
            ErrorCode.NO_REPLICA: "no replica lives at the moment",
        }
        message = messages.get(reason, "no replica is ready yet: the model is still loading")
        return TriptychError(reason, message, retry_after_s=COME_BACK_S)
