"""A fake orchestrator that answers at once, and a client that speaks to the app without a socket."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec

from triptych.api.app import create_app
from triptych.api.results import Results
from triptych.config.settings import ServeSettings
from triptych.errors import ErrorCode, TriptychError
from triptych.messages import GenerationRequest, ModelInfo
from triptych.orchestrator.events import (
    Readiness,
    ReplicaView,
    RequestView,
    UnitMetrics,
    UnitOutput,
    UnitState,
    UnitView,
)
from triptych.replicas.state import ReplicaState

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
IMAGE_MODEL = ModelInfo(
    pipeline="QwenImagePipeline",
    kind="image",
    parameters=("width", "height", "num_inference_steps", "negative_prompt", "true_cfg_scale", "guidance_scale"),
    extra_parameters=("max_sequence_length",),
    size_multiple=16,
    default_width=256,
    default_height=128,
    default_num_inference_steps=20,
)
_WITH_PICTURE = msgspec.structs.replace(
    IMAGE_MODEL,
    pipeline="QwenImageImg2ImgPipeline",
    parameters=(*IMAGE_MODEL.parameters, "strength"),
    default_strength=0.6,
    max_images=16,
)
EDIT_MODEL = msgspec.structs.replace(IMAGE_MODEL, image=_WITH_PICTURE, mask=_WITH_PICTURE)
VIDEO_MODEL = ModelInfo(
    pipeline="WanPipeline",
    kind="video",
    parameters=("width", "height", "num_inference_steps", "negative_prompt", "guidance_scale", "num_frames"),
    size_multiple=16,
    default_width=64,
    default_height=64,
    frame_multiple=4,
    default_num_frames=13,
    default_fps=16,
)
NAMES = ("Qwen/Qwen-Image", "alias")


class FakeStream:
    def __init__(self, orchestrator: FakeOrchestrator, request: GenerationRequest) -> None:
        self._orchestrator = orchestrator
        self._request = request
        self.request_id = request.id
        self._aborted = asyncio.Event()
        self._script: Iterator[Any] | None = None
        self.closed = False

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Any:
        if self._script is None:
            outputs = self._orchestrator.make_outputs(self._request)
            self._script = iter([*self._orchestrator.happens, *outputs])
        if self._orchestrator.hold is not None and not self._orchestrator.hold.is_set():
            await self._orchestrator.hold.wait()
        happened = next(self._script, None)
        if happened is None:
            raise StopAsyncIteration
        if isinstance(happened, Exception):
            raise happened
        return happened

    async def outputs(self) -> list[UnitOutput]:
        if self._orchestrator.hold is not None:
            waits = [asyncio.ensure_future(e.wait()) for e in (self._orchestrator.hold, self._aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if self._aborted.is_set():
            raise TriptychError(ErrorCode.REQUEST_ABORTED, "the request was aborted")
        if self._orchestrator.end_error is not None:
            raise self._orchestrator.end_error
        return self._orchestrator.make_outputs(self._request)

    def close(self) -> None:
        self.closed = True
        self._aborted.set()


class FakeOrchestrator:
    def __init__(self, model: ModelInfo | None = IMAGE_MODEL) -> None:
        self.model = model
        self.hold: asyncio.Event | None = None
        self.submitted: list[GenerationRequest] = []
        self.streams: list[FakeStream] = []
        self.arrived = asyncio.Event()
        self.submit_error: Exception | None = None
        self.end_error: Exception | None = None
        self.happens: list[Any] = []  # events of a stream before its outputs, or the error that ends it
        self.ready = Readiness(ready=True)
        self.views: dict[str, RequestView] = {}
        self.payload = PNG
        self.operations: list[tuple[str, int]] = []

    def submit(self, request: GenerationRequest) -> FakeStream:
        if self.submit_error is not None:
            raise self.submit_error
        self.submitted.append(request)
        self.views[request.id] = view_of(request)
        self.streams.append(FakeStream(self, request))
        self.arrived.set()
        return self.streams[-1]

    def make_outputs(self, request: GenerationRequest) -> list[UnitOutput]:
        video = request.output.format == "mp4"
        return [
            UnitOutput(
                unit=unit,
                seed=request.params.seed + unit,
                mime="video/mp4" if video else f"image/{request.output.format}",
                data=bytearray(self.payload),
                width=request.params.width or 0,
                height=request.params.height or 0,
                num_frames=request.params.num_frames or 1,
                fps=request.params.fps or 0,
                metrics=UnitMetrics(unit % 2, 0.25, 1.5, request.params.num_inference_steps or 0, 1.0, 10.0, 1),
            )
            for unit in range(request.n)
        ]

    def find(self, request_id: str, *, owner: str | None = None) -> RequestView:
        visible = [view for view in self.views.values() if owner is None or view.owner == owner]
        matches = [view for view in visible if request_id in (view.id, view.client_request_id)]
        if len(matches) > 1:
            raise TriptychError(ErrorCode.CONFLICT, f"several requests match {request_id!r}")
        if not matches:
            raise TriptychError(ErrorCode.REQUEST_NOT_FOUND, f"no request {request_id!r}")
        return matches[0]

    def live_requests(self, *, owner: str | None = None) -> list[RequestView]:
        live = [view for view in self.views.values() if view.finished_at is None]
        return [view for view in live if owner is None or view.owner == owner]

    def abort(self, request_id: str) -> None:
        self.views[request_id] = replace(self.views[request_id], status="aborted", finished_at=time.time())

    def update(self, request_id: str, *, priority: int | None = None, timeout_s: float | None = None) -> None:
        view = self.views[request_id]
        if view.finished_at is not None:
            raise TriptychError(ErrorCode.CONFLICT, f"request {request_id} is finished")
        self.views[request_id] = replace(
            view,
            priority=view.priority if priority is None else priority,
            timeout_s=view.timeout_s if timeout_s is None else timeout_s,
        )

    def drain_replica(self, replica_id: int) -> ReplicaView:
        self.operations.append(("drain", replica_id))
        return self.replicas()[0]

    def restart_replica(self, replica_id: int) -> ReplicaView:
        self.operations.append(("restart", replica_id))
        return self.replicas()[0]

    def resize(self, count: int) -> list[ReplicaView]:
        self.operations.append(("resize", count))
        return self.replicas()

    def readiness(self) -> Readiness:
        return self.ready

    def replicas(self) -> list[ReplicaView]:
        return [
            ReplicaView(
                id=0,
                stage_id=0,
                state=ReplicaState.READY,
                pid=1234,
                pids=(1234,),
                devices=("0",),
                slots=1,
                in_flight=0,
                completed=12,
                restarts=0,
            )
        ]


def view_of(request: GenerationRequest) -> RequestView:
    unit = UnitView(0, UnitState.RUNNING, 1, 2, 20, None, 0.5)
    return RequestView(
        id=request.id,
        client_request_id=request.client_request_id,
        model=request.model,
        owner=request.owner,
        created_at=1.5,
        finished_at=None,
        status="running",
        priority=request.priority,
        timeout_s=request.timeout_s,
        units=(unit,),
    )


def make_app(orchestrator: Any, *, jobs: Any = None, defaults: dict[str, Any] | None = None, **settings: Any) -> Any:
    """The app; without `jobs` its video routes cannot be used."""
    asked = ServeSettings(**settings)
    results = Results(Path(os.environ["XDG_DATA_HOME"], "results"))  # of all tests
    return create_app(orchestrator, jobs, results, asked, served_model_names=NAMES, defaults=defaults or {})


def client_of(app: Any, *, key: str | None = None) -> httpx.AsyncClient:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test", headers=headers)
