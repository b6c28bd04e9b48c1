"""A core with a hand-driven clock, and short words for what happens to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triptych.errors import ErrorCode, TriptychError
from triptych.messages import Aborted, Address, Failure, GenerationRequest, ModelInfo, Output, Progress, SamplingParams
from triptych.orchestrator.core import Core
from triptych.orchestrator.cost import CostModel
from triptych.orchestrator.effects import Dispatch, Effect, Finish, Publish, SendAbort
from triptych.orchestrator.routing import create_policy

MODEL = ModelInfo(pipeline="TestPipeline", kind="image", parameters=("prompt",))


def make_request(request_id: str = "a", **fields: Any) -> GenerationRequest:
    params = SamplingParams(prompt="a red circle", seed=fields.pop("seed", 7))
    return GenerationRequest(**{"id": request_id, "model": "m", "params": params, "timeout_s": 600.0} | fields)


def output_of(address: Address, *, inference_s: float = 1.0) -> Output:
    return Output(address, "image/png", 64, 64, inference_s, 20, 1.0, 100.0)


class CoreDriver:
    """Keeps the clock and every effect; `take` gives the new ones."""

    def __init__(
        self,
        *,
        slots: Sequence[int] = (),
        routing: str = "round_robin",
        max_queue_size: int = 1024,
        max_input_bytes: int = 2**30,
    ) -> None:
        self.now = 1000.0
        self.core = Core(
            policy=create_policy(routing, CostModel()),
            max_queue_size=max_queue_size,
            max_input_bytes=max_input_bytes,
            no_replica_timeout_s=30.0,
        )
        self.incarnations: dict[int, int] = {}
        self.sent: list[Dispatch] = []
        for replica_id, count in enumerate(slots):
            self.ready(replica_id, count)

    def take(self) -> list[Effect]:
        effects = list(self.core.effects)
        self.core.effects.clear()
        self.sent += [effect for effect in effects if isinstance(effect, Dispatch)]
        return effects

    def ready(self, replica_id: int, slots: int = 1) -> list[Effect]:
        self.incarnations[replica_id] = self.incarnations.get(replica_id, 0) + 1
        self.core.replica_ready(replica_id, self.incarnations[replica_id], slots, self.now)
        return self.take()

    def lost(self, replica_id: int) -> list[Effect]:
        self.core.replica_lost(replica_id, self.incarnations[replica_id], self.now)
        return self.take()

    def submit(self, request_id: str = "a", *, outlasts_outages: bool = False, **fields: Any) -> list[Effect]:
        self.core.submit(make_request(request_id, **fields), self.now, outlasts_outages=outlasts_outages)
        return self.take()

    def refused(self, request_id: str = "a", **fields: Any) -> TriptychError:
        try:
            self.core.submit(make_request(request_id, **fields), self.now)
        except TriptychError as error:
            assert not self.core.effects
            assert request_id not in self.core.live
            return error
        raise AssertionError("the request was accepted")

    def say(self, message: Any, *, frames: Sequence[bytes] = (), replica_id: int | None = None) -> list[Effect]:
        self.core.message(self.where(message.address) if replica_id is None else replica_id, message, frames, self.now)
        return self.take()

    def output(self, address: Address, *, inference_s: float = 1.0) -> list[Effect]:
        return self.say(output_of(address, inference_s=inference_s), frames=[b"png"])

    def failure(self, address: Address, code: str = "engine_error") -> list[Effect]:
        return self.say(Failure(address, code, "it broke"))

    def aborted(self, address: Address) -> list[Effect]:
        return self.say(Aborted(address))

    def progress(self, address: Address, step: int = 0) -> list[Effect]:
        return self.say(Progress(address, step, 20))

    def abort(self, request_id: str, code: ErrorCode = ErrorCode.REQUEST_ABORTED) -> list[Effect]:
        self.core.abort(request_id, TriptychError(code, "stop"), self.now)
        return self.take()

    def update(self, request_id: str, *, priority: int | None = None, timeout_s: float | None = None) -> list[Effect]:
        self.core.update(request_id, priority=priority, timeout_s=timeout_s, now=self.now)
        return self.take()

    def pass_time(self, seconds: float) -> list[Effect]:
        self.now += seconds
        self.core.expire(self.now)
        return self.take()

    def where(self, address: Address) -> int:
        return next(effect.replica_id for effect in reversed(self.sent) if effect.message.address == address)

    def address(self, request_id: str = "a", unit: int = 0) -> Address:
        """Of the latest dispatch of a unit."""
        dispatches = (effect.message.address for effect in reversed(self.sent))
        return next(address for address in dispatches if (address.request_id, address.unit) == (request_id, unit))


def dispatches(effects: Sequence[Effect]) -> list[tuple[int, str, int]]:
    """(replica, request, unit) of every dispatch."""
    return [
        (effect.replica_id, effect.message.address.request_id, effect.message.address.unit)
        for effect in effects
        if isinstance(effect, Dispatch)
    ]


def aborts(effects: Sequence[Effect]) -> list[tuple[int, Address]]:
    return [(effect.replica_id, effect.address) for effect in effects if isinstance(effect, SendAbort)]


def ends(effects: Sequence[Effect]) -> list[tuple[str, str | None]]:
    """(request, error code) of every end."""
    return [
        (effect.request_id, effect.error.code if effect.error else None)
        for effect in effects
        if isinstance(effect, Finish)
    ]


def events(effects: Sequence[Effect]) -> list[Any]:
    return [effect.event for effect in effects if isinstance(effect, Publish)]
