"""The simulated engine keeps the engine contract: pictures, cost model, slots, progress, abort, faults."""

from __future__ import annotations

import contextlib
import io
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import av
import pytest
from PIL import Image

from triptych.engine.base import EngineStartError
from triptych.engine.simulated import SimulatedEngine
from triptych.messages import (
    Abort,
    Aborted,
    Address,
    Failure,
    FromReplica,
    Generate,
    Output,
    OutputSpec,
    Preview,
    Progress,
    ReplicaSpec,
    SamplingParams,
    Update,
)
from triptych.wire import Frame

WAIT_S = 20


class Harness:
    """An engine that runs on a thread of its own, and what it said."""

    def __init__(self, simulated: dict[str, Any], slots: int = 1) -> None:
        self.said: queue.Queue[tuple[FromReplica, list[bytes]]] = queue.Queue()
        self.engine = SimulatedEngine(
            ReplicaSpec(
                replica_id=0,
                stage_id=0,
                engine="simulated",
                model="m",
                device_kind="none",
                devices=("0",),
                cpu_threads=1,
                max_num_seqs=slots,
                engine_args={"simulated": simulated},
            ),
            self._emit,
        )
        self.engine.load()
        self.thread = threading.Thread(target=self.engine.run, daemon=True)
        self.thread.start()

    def _emit(self, message: FromReplica, frames: Sequence[Frame]) -> None:
        self.said.put((message, [bytes(frame) for frame in frames]))

    def generate(
        self,
        unit: int = 0,
        prompt: str = "a cat",
        output: OutputSpec | None = None,
        previews: int = 0,
        **params: Any,
    ) -> Address:
        address = Address("r", unit, 0, 1)
        sampling = SamplingParams(**{"prompt": prompt, "seed": 7, "width": 16, "height": 8, **params})
        self.engine.submit(Generate(address, sampling, output or OutputSpec(), previews=previews), ())
        return address

    def hear(self) -> tuple[FromReplica, list[bytes]]:
        return self.said.get(timeout=WAIT_S)

    def hear_end(self) -> tuple[FromReplica, list[bytes]]:
        while True:
            message, frames = self.hear()
            if not isinstance(message, Progress):
                return message, frames


Start = Callable[..., Harness]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Harness] = []

    def make(slots: int = 1, **simulated: Any) -> Harness:
        started.append(Harness(simulated, slots))
        return started[-1]

    yield make
    for harness in started:
        harness.engine.stop()


@pytest.mark.parametrize(
    ("section", "output", "kind"),
    [
        ({"seconds_per_request": 0}, OutputSpec("webp"), "WEBP"),
        ({"seconds_per_request": 0.4}, OutputSpec(), "PNG"),
        ({"seconds_per_request": 0, "kind": "video"}, OutputSpec("mp4"), "JPEG"),
    ],
)
def test_partial_pictures_come_in_order_before_the_result(
    start: Start, section: dict[str, Any], output: OutputSpec, kind: str
) -> None:
    harness = start(**section)
    harness.generate(output=output, previews=3, num_inference_steps=8)
    shown = []
    while isinstance((heard := harness.hear_end())[0], Preview):
        shown.append(heard)
    assert isinstance(heard[0], Output)
    assert [(preview.index, preview.step) for preview, _ in shown] == [(0, 2), (1, 4), (2, 6)]
    assert {(Image.open(io.BytesIO(data)).format, preview.width, preview.height) for preview, (data,) in shown} == {
        (kind, 16, 8)
    }


def test_a_picture_has_the_asked_size_and_names_prompt_and_seed(start: Start) -> None:
    harness = start(seconds_per_request=0)
    harness.generate(prompt="zwölf 🐈 \n", seed=2**63 - 1, width=40, height=24)
    message, [data] = harness.hear_end()
    assert isinstance(message, Output)
    assert (message.mime, message.width, message.height) == ("image/png", 40, 24)
    assert message.peak_memory_mb > 1
    picture = Image.open(io.BytesIO(data))
    picture.load()
    assert picture.size == (40, 24)
    assert json.loads(picture.text["triptych"]) == {"prompt": "zwölf 🐈 \n", "seed": 2**63 - 1}  # type: ignore[attr-defined]


def test_the_default_noise_picture_is_about_two_megabytes_and_flat_is_small(start: Start) -> None:
    noise, flat = start(seconds_per_request=0), start(seconds_per_request=0, image="flat")
    for harness in (noise, flat):
        harness.generate(width=None, height=None)
    (message, [big]), (_, [small]) = noise.hear_end(), flat.hear_end()
    assert isinstance(message, Output)
    assert (message.width, message.height, message.steps) == (1024, 1024, 50)
    assert 1_700_000 < len(big) < 2_300_000
    assert len(small) < 50_000


def test_the_same_request_gives_the_same_bytes_from_two_engines(start: Start) -> None:
    answers = []
    for harness in (start(seconds_per_request=0), start(seconds_per_request=0.01)):
        harness.generate()
        answers.append(harness.hear_end()[1])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("format", "quality"), [("jpeg", None), ("webp", 30)])
def test_other_formats_are_real_too(start: Start, format: Any, quality: int | None) -> None:
    harness = start(seconds_per_request=0)
    harness.generate(output=OutputSpec(format, quality))
    message, [data] = harness.hear_end()
    assert isinstance(message, Output)
    assert message.mime == f"image/{format}"
    assert Image.open(io.BytesIO(data)).format == format.upper()


@pytest.mark.parametrize("seconds", [0, 0.01])
@pytest.mark.parametrize(("format", "width"), [("webp", 65536), ("jpeg", 65536)])
def test_a_side_that_the_format_cannot_hold_fails_the_unit_and_not_the_engine(
    start: Start, seconds: float, format: Any, width: int
) -> None:
    harness = start(seconds_per_request=seconds)
    harness.generate(output=OutputSpec(format), width=width, height=64)
    message, _ = harness.hear_end()
    assert isinstance(message, Failure)
    assert (message.code, message.param) == ("invalid_value", "output_format")
    assert f"65536x64 cannot be encoded as {format}" in message.message
    harness.generate(output=OutputSpec(format))
    assert isinstance(harness.hear_end()[0], Output)


def test_a_unit_without_service_time_is_started_before_its_picture_is_drawn_and_only_then(start: Start) -> None:
    harness = start(seconds_per_request=0)
    for _ in range(2):
        harness.generate()
    kinds = [type(harness.hear()[0]) for _ in range(3)]
    assert kinds == [Progress, Output, Output]


def test_at_most_thirty_two_pictures_are_kept(start: Start) -> None:
    harness = start(seconds_per_request=0)
    for side in [*range(1, 34), 33, 1]:
        harness.generate(width=side, height=1)
        harness.hear_end()
    assert len(harness.engine._pictures) == 32


@pytest.mark.parametrize("kind", ["image", "video"])
def test_pictures_and_a_mask_are_taken_beside_the_prompt(start: Start, kind: str) -> None:
    info = start(kind=kind).engine.load()
    assert not info.needs_image
    assert "strength" not in info.parameters
    for call in (info.image, info.mask):
        assert call is not None
        assert (call.kind, call.max_images) == (kind, 16)
        assert "strength" in call.parameters


@pytest.mark.parametrize(("kind", "format"), [("image", "mp4"), ("video", "png")])
def test_a_format_of_the_other_kind_is_refused_instead_of_ignored(start: Start, kind: str, format: Any) -> None:
    harness = start(seconds_per_request=0, kind=kind)
    harness.generate(output=OutputSpec(format))
    message, _ = harness.hear()
    assert isinstance(message, Failure)
    assert (message.code, message.param) == ("invalid_value", "output_format")


@pytest.mark.parametrize("size", [(48, 32), (33, 31)])
def test_a_clip_plays_with_its_frames_and_names_prompt_and_seed(start: Start, size: tuple[int, int]) -> None:
    harness = start(seconds_per_request=0, kind="video", image="flat")
    assert harness.engine.load().kind == "video"
    width, height = size
    harness.generate(output=OutputSpec("mp4"), width=width, height=height, num_frames=9, fps=12)
    message, [data] = harness.hear_end()
    assert isinstance(message, Output)
    assert (message.mime, message.width, message.height, message.num_frames, message.fps) == (
        "video/mp4",
        *size,
        9,
        12,
    )
    with av.open(io.BytesIO(data)) as clip:
        assert clip.streams.video[0].average_rate == 12
        assert len(list(clip.decode(video=0))) == 9
    assert data.endswith(b'{"prompt": "a cat", "seed": 7}')


def test_a_clip_of_which_nothing_is_said_is_a_second_long(start: Start) -> None:
    harness = start(seconds_per_request=0, kind="video")
    harness.generate(output=OutputSpec("mp4"), width=None, height=None)
    message, _ = harness.hear_end()
    assert isinstance(message, Output)
    assert (message.width, message.height, message.num_frames, message.fps) == (128, 128, 16, 16)


@pytest.mark.parametrize(
    ("simulated", "steps", "seconds"),
    [({"seconds_per_request": 0.2}, 50, 0.2), ({"seconds_per_step": 0.05}, 4, 0.2), ({}, 50, 0.5)],
)
def test_a_unit_takes_its_service_time(start: Start, simulated: dict[str, float], steps: int, seconds: float) -> None:
    harness = start(**simulated)
    began = time.monotonic()
    harness.generate(num_inference_steps=steps)
    message, _ = harness.hear_end()
    assert time.monotonic() - began >= seconds
    assert isinstance(message, Output)
    assert message.inference_s >= seconds


def test_two_cost_models_at_once_are_refused() -> None:
    with pytest.raises(EngineStartError, match="exclude each other"):
        Harness({"seconds_per_request": 1.0, "seconds_per_step": 1.0})


def test_progress_counts_up_and_is_throttled(start: Start) -> None:
    harness = start(seconds_per_step=0.002)
    harness.generate(num_inference_steps=200)
    steps = []
    while isinstance(message := harness.hear()[0], Progress):
        assert message.steps == 200
        steps.append(message.step)
    assert isinstance(message, Output)
    assert 1 <= len(steps) <= message.inference_s / 0.05 + 1
    assert steps == sorted(set(steps))
    assert steps[-1] < 200


def test_as_many_units_run_at_once_as_there_are_slots(start: Start) -> None:
    harness = start(slots=2, seconds_per_request=30)
    long = [harness.generate(unit) for unit in range(3)]
    harness.engine.abort(Abort(long[2]))  # still waits for a slot: leaves at once
    assert harness.hear_end()[0] == Aborted(long[2])
    harness.generate(3, prompt="[[slow:0.01]]")  # waits behind two running ones
    with pytest.raises(queue.Empty):
        while isinstance(harness.said.get(timeout=0.3)[0], Progress):
            pass
    harness.engine.abort(Abort(long[0]))
    assert harness.hear_end()[0] == Aborted(long[0])
    message, _ = harness.hear_end()
    assert isinstance(message, Output)
    assert message.address.unit == 3
    harness.engine.abort(Abort(long[1]))
    assert harness.hear_end()[0] == Aborted(long[1])


def test_aborting_an_unknown_or_finished_unit_says_nothing(start: Start) -> None:
    harness = start(seconds_per_request=0)
    address = harness.generate()
    harness.hear_end()
    harness.engine.abort(Abort(address))
    harness.engine.update(Update(address, 3))
    with pytest.raises(queue.Empty):
        harness.said.get(timeout=0.1)


@pytest.mark.parametrize(("fault", "code"), [("oom", "out_of_memory"), ("error", "engine_error")])
def test_a_scripted_failure_concerns_its_unit_only(start: Start, fault: str, code: str) -> None:
    harness = start(seconds_per_request=0)
    harness.generate(prompt=f"please [[{fault}]] now")
    started, _ = harness.hear()
    assert isinstance(started, Progress)
    message, _ = harness.hear()
    assert isinstance(message, Failure)
    assert message.code == code
    harness.generate(prompt=f"no fault without brackets: {fault} [[nonsense]]")
    assert isinstance(harness.hear_end()[0], Output)


def test_slow_sets_the_whole_service_time(start: Start) -> None:
    harness = start(seconds_per_request=60)
    harness.generate(prompt="[[slow:0.1]]")
    message, _ = harness.hear_end()
    assert isinstance(message, Output)
    assert 0.1 <= message.inference_s < 30


def test_a_hung_engine_still_beats_but_neither_moves_nor_answers(start: Start) -> None:
    harness = start(slots=2, seconds_per_step=0.01)
    harness.generate(0, num_inference_steps=100_000)
    assert isinstance(harness.hear()[0], Progress)
    hung = harness.generate(1, prompt="[[hang]]")
    with contextlib.suppress(queue.Empty):
        while True:
            harness.said.get(timeout=0.5)
    before = harness.engine.heartbeat()
    harness.engine.abort(Abort(hung))
    harness.generate(2)
    with pytest.raises(queue.Empty):
        harness.said.get(timeout=0.3)
    assert harness.engine.heartbeat() == before
    assert before[1] == "step"


def test_heartbeat_names_the_phase_and_counts_steps(start: Start) -> None:
    harness = start(seconds_per_request=0)
    assert harness.engine.heartbeat() == (0, "idle")
    harness.generate(num_inference_steps=12)
    harness.hear_end()
    assert harness.engine.heartbeat() == (12, "idle")


def test_the_heartbeat_counts_on_during_one_long_step(start: Start) -> None:
    harness = start(seconds_per_request=30)
    harness.generate(num_inference_steps=1)
    assert isinstance(harness.hear()[0], Progress)
    deadline = time.monotonic() + WAIT_S
    while harness.engine.heartbeat()[0] < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert harness.engine.heartbeat()[0] >= 2
    assert harness.engine.heartbeat()[1] == "step"


def test_stop_lets_running_units_finish(start: Start) -> None:
    harness = start(seconds_per_request=0.3)
    harness.generate()
    harness.engine.stop()
    assert isinstance(harness.hear_end()[0], Output)
    harness.thread.join(timeout=WAIT_S)
    assert not harness.thread.is_alive()
