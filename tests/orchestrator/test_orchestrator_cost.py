from __future__ import annotations

import pytest

from triptych.messages import SamplingParams
from triptych.orchestrator.cost import RunningMean, retry_after_s

PARAMS = SamplingParams(prompt="x", seed=0)


def test_the_mean_is_unknown_before_the_first_output_and_then_follows() -> None:
    mean = RunningMean(window=4)
    assert mean.estimate_s(PARAMS) is None
    mean.observe(PARAMS, 1.0)
    mean.observe(PARAMS, 3.0)
    assert mean.estimate_s(PARAMS) == pytest.approx(2.0)
    for _ in range(60):
        mean.observe(PARAMS, 10.0)
    assert mean.estimate_s(PARAMS) == pytest.approx(10.0, abs=0.01)


@pytest.mark.parametrize(
    ("work_s", "slots", "expected"), [(0.0, 4, 1.0), (40.0, 4, 10.0), (1e6, 4, 60.0), (5.0, 0, 60.0)]
)
def test_retry_after_is_work_per_slot_within_one_and_sixty_seconds(work_s: float, slots: int, expected: float) -> None:
    assert retry_after_s(work_s, slots) == expected
