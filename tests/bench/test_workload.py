"""When requests are due, and what their latency targets are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from triptych.bench.workload import BenchRequest, arrival_offsets, with_slo_targets


def plain(count: int) -> list[BenchRequest]:
    return [BenchRequest(prompt="x") for _ in range(count)]


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_offsets(plain(3), request_rate=math.inf, seed=1) == [0.0, 0.0, 0.0]


def test_poisson_arrivals_are_the_same_for_the_same_seed_and_have_the_asked_rate() -> None:
    first = arrival_offsets(plain(4000), request_rate=20.0, seed=42)
    assert first == arrival_offsets(plain(4000), request_rate=20.0, seed=42)
    assert first != arrival_offsets(plain(4000), request_rate=20.0, seed=43)
    gaps = np.diff(first)
    assert first[0] == 0.0
    assert np.all(gaps >= 0)
    assert np.mean(gaps) == pytest.approx(1 / 20, rel=0.06)
    assert np.std(gaps) == pytest.approx(1 / 20, rel=0.1)


def test_timestamps_of_a_trace_are_kept_relative_to_the_first() -> None:
    requests = [BenchRequest(prompt="x", timestamp_s=stamp) for stamp in (100.0, 100.5, 103.0)]
    assert arrival_offsets(requests, request_rate=1000.0, seed=1) == [0.0, 0.5, 3.0]


def test_slo_targets_scale_with_pixels_frames_and_steps() -> None:
    small = BenchRequest(prompt="x", width=64, height=64, num_inference_steps=2)
    large = BenchRequest(prompt="x", width=128, height=128, num_inference_steps=20, num_frames=3)
    own = BenchRequest(prompt="x", width=64, height=64, slo_ms=5.0)
    unsized = BenchRequest(prompt="x")
    targets = with_slo_targets([small, large, own, unsized], [(small, 0.1), (small, 0.3), (small, 0.2)], scale=3.0)
    assert targets[0].slo_ms == pytest.approx(600.0)
    assert targets[1].slo_ms == pytest.approx(600.0 * 4 * 10 * 3)
    assert targets[2].slo_ms == 5.0
    assert targets[3].slo_ms is None


def test_slo_targets_need_no_size_when_no_request_names_one() -> None:
    request = BenchRequest(prompt="x", num_inference_steps=10)
    warmup = BenchRequest(prompt="x", num_inference_steps=2)
    (target,) = with_slo_targets([request], [(warmup, 0.1)], scale=2.0)
    assert target.slo_ms == pytest.approx(1000.0)


def test_without_an_answered_warm_up_there_is_no_target() -> None:
    assert with_slo_targets(plain(1), [], scale=2.0)[0].slo_ms is None
