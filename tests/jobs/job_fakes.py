"""Jobs as tests make them, and an orchestrator whose requests end when the test says so."""

from __future__ import annotations

from typing import Any

from triptych.errors import ErrorCode, TriptychError
from triptych.jobs.job import Job, new_job_id
from triptych.messages import GenerationRequest, MediaInput, ModelInfo, OutputSpec, SamplingParams
from triptych.orchestrator.events import UnitMetrics, UnitOutput, UnitProgress
from triptych.orchestrator.stream import EventStream

CLIP = b"\0\0\0\x18ftypisom" + bytes(range(256))
METRICS = UnitMetrics(0, 0.25, 1.5, 2, 1.0, 10.0, 1)
VIDEO_MODEL = ModelInfo(pipeline="WanPipeline", kind="video", parameters=("num_frames",))


def a_request(**fields: Any) -> GenerationRequest:
    values: dict[str, Any] = {
        "id": f"req_{new_job_id()}",
        "model": "clips",
        "params": SamplingParams(prompt="a red circle", seed=7, width=64, height=32, num_frames=9, fps=8),
        "timeout_s": 600.0,
        "output": OutputSpec("mp4"),
    }
    return GenerationRequest(**values | fields)


def with_pictures(*pixels: bytes) -> GenerationRequest:
    inputs = tuple(MediaInput("image", "RGB", 1, len(data) // 3, number) for number, data in enumerate(pixels))
    return a_request(inputs=inputs, frames=pixels)


def a_job(**fields: Any) -> Job:
    return Job(**{"id": new_job_id(), "request": a_request(), "created_at": 1000.0} | fields)


def an_output(data: bytes = CLIP) -> UnitOutput:
    return UnitOutput(
        unit=0, seed=7, mime="video/mp4", data=data, width=64, height=32, num_frames=9, fps=8, metrics=METRICS
    )


class FakeGenerator:
    """Takes requests as the orchestrator does; `progress`, `finish` and `fail` say how they go."""

    def __init__(self, info: ModelInfo = VIDEO_MODEL) -> None:
        self.info = info
        self.requests: dict[str, GenerationRequest] = {}
        self.timeouts: dict[str, float] = {}
        self.outlasting: set[str] = set()
        self.aborted: list[str] = []
        self.refusals: list[TriptychError] = []
        self._streams: dict[str, EventStream] = {}

    def submit(self, request: GenerationRequest, *, outlasts_outages: bool) -> EventStream:
        if self.refusals:
            raise self.refusals.pop(0)
        if outlasts_outages:
            self.outlasting.add(request.id)
        self.requests[request.id] = request
        self.timeouts[request.id] = request.timeout_s
        stream = self._streams[request.id] = EventStream(request.id, self.abort)
        return stream

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.fail(request_id, ErrorCode.REQUEST_ABORTED)

    def update(self, request_id: str, *, timeout_s: float) -> None:
        self.timeouts[request_id] = timeout_s

    async def serving(self) -> ModelInfo:
        return self.info

    def progress(self, request_id: str, step: int, steps: int) -> None:
        self._streams[request_id].push(UnitProgress(0, step, steps))

    def finish(self, request_id: str, data: bytes = CLIP) -> None:
        stream = self._streams.pop(request_id)
        stream.push(an_output(data))
        stream.end(None)

    def fail(self, request_id: str, code: ErrorCode, message: str = "it failed") -> None:
        if (stream := self._streams.pop(request_id, None)) is None:
            raise TriptychError(ErrorCode.REQUEST_NOT_FOUND, "there is no such request")
        stream.end(TriptychError(code, message))
