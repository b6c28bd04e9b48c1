"""From a replica's `Output` and `Preview` messages to the events that a route reads."""

from __future__ import annotations

from triptych.messages import Output, Preview
from triptych.orchestrator.events import UnitMetrics, UnitOutput, UnitPreview
from triptych.orchestrator.units import Unit
from triptych.wire import Frame

__all__ = ["unit_output", "unit_preview"]


def unit_output(unit: Unit, message: Output, data: Frame) -> UnitOutput:
    """The result of a unit that runs on a replica, with its `metrics`."""
    assert unit.replica_id is not None
    metrics = UnitMetrics(
        replica=unit.replica_id,
        queue_s=unit.queue_s,
        inference_s=message.inference_s,
        steps=message.steps,
        batch_size_mean=message.batch_size_mean,
        peak_memory_mb=message.peak_memory_mb,
        attempts=unit.attempt,
    )
    return UnitOutput(
        unit=unit.index,
        seed=unit.request.spec.params.seed + unit.index,
        mime=message.mime,
        data=data,
        width=message.width,
        height=message.height,
        num_frames=message.num_frames,
        fps=message.fps,
        metrics=metrics,
        encode_s=message.encode_s,
    )


def unit_preview(unit: Unit, message: Preview, data: Frame) -> UnitPreview:
    """A partial picture of a unit."""
    return UnitPreview(
        unit=unit.index,
        index=message.index,
        mime=message.mime,
        data=data,
        width=message.width,
        height=message.height,
    )
