from __future__ import annotations

import random

import pytest

from triptych.messages import SamplingParams
from triptych.orchestrator.cost import MAX_AMOUNTS, CostModel
from triptych.orchestrator.robust_mean import RobustMean
from triptych.orchestrator.work import Work, work_of

PICTURE = Work(pixels=1024 * 1024, frames=1, steps=20, branches=2)


def fed(values: list[float]) -> float:
    mean = RobustMean(values[0])
    for value in values[1:]:
        mean.add(value)
    return mean.value


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"prompt": "x", "seed": 0} | fields)


# ---- the robust mean


@pytest.mark.parametrize("outlier_at", [0, 1, 5, 31, 60])
@pytest.mark.parametrize("outlier", [100.0, 1e6, 0.0])
def test_an_outlier_moves_the_mean_by_a_few_per_cent(outlier_at: int, outlier: float) -> None:
    rng = random.Random(outlier_at)
    values = [rng.gauss(1.0, 0.05) for _ in range(64)]
    values[outlier_at] = outlier
    for count in (3, 4, 8, 16, 32, 64):
        if count > outlier_at:
            assert fed(values[:count]) == pytest.approx(1.0, abs=0.15)


def test_two_outliers_in_a_window_do_not_wreck_it() -> None:
    assert fed([1.0, 1.02, 0.98, 1.01] * 7 + [300.0, 300.0, 1.0, 1.0]) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_a_true_mixture_keeps_its_mean(seed: int) -> None:
    rng = random.Random(seed)
    values = [1.0 if rng.random() < 0.2 else 0.1 for _ in range(3000)]
    mean = RobustMean(values[0])
    seen = []
    for value in values[1:]:
        mean.add(value)
        seen.append(mean.value)
    assert sum(seen[32:]) / len(seen[32:]) == pytest.approx(0.28, rel=0.15)


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.8])
def test_heavy_noise_leaves_the_mean_unbiased_enough(sigma: float) -> None:
    rng = random.Random(3)
    mean, seen = RobustMean(1.0), []
    true = 2.718281828 ** (sigma * sigma / 2)
    for _ in range(4000):
        mean.add(rng.lognormvariate(0.0, sigma))
        seen.append(mean.value)
    assert sum(seen[32:]) / len(seen[32:]) == pytest.approx(true, rel=0.1)


def test_a_lasting_change_is_followed_within_a_window() -> None:
    assert fed([1.0] * 100 + [5.0] * 32) == pytest.approx(5.0)
    assert fed([1.0] * 100 + [5.0] * 16) > 2.5


def test_a_slow_first_value_is_forgotten_after_two_more() -> None:
    assert fed([10.0, 1.0]) < 1.5
    assert fed([10.0, 1.0, 1.0]) == pytest.approx(1.0, rel=0.1)


# ---- work


def test_work_counts_pixels_frames_steps_and_guidance_branches() -> None:
    assert work_of(params(width=64, height=32, num_inference_steps=7)) == Work(2048, 1, 7, 0)
    assert work_of(params(num_frames=9, num_inference_steps=10, strength=0.42)).steps == 4
    assert work_of(params(num_frames=9)).frames == 9
    assert [work_of(params(guidance_scale=scale)).branches for scale in (0.0, 1.0, 1.5)] == [1, 1, 2]
    assert work_of(params(true_cfg_scale=4.0)).branches == 1  # without a negative prompt there is no second branch
    assert work_of(params(true_cfg_scale=4.0, negative_prompt="")).branches == 2


# ---- the model


def test_nothing_is_known_before_the_first_unit_ended() -> None:
    model = CostModel()
    assert (model.estimate_s(PICTURE), model.step_s(PICTURE)) == (None, None)
    model.observe(PICTURE, 0.0, 0.0)
    assert (model.estimate_s(PICTURE), model.step_s(PICTURE)) == (None, None)


def test_one_known_amount_is_enough_for_a_guess_in_proportion() -> None:
    model = CostModel()
    model.observe(PICTURE, 10.0)
    assert model.estimate_s(PICTURE) == pytest.approx(10.0)
    assert model.estimate_s(PICTURE._replace(steps=40)) == pytest.approx(20.0, rel=0.15)
    assert model.estimate_s(PICTURE._replace(pixels=PICTURE.pixels // 4)) == pytest.approx(2.5, rel=0.4)
    assert model.estimate_s(PICTURE._replace(branches=1)) == pytest.approx(5.0, rel=0.15)


SERVERS = {
    "denoising with a constant part and a decoder": lambda w: (
        0.4 + 1e-7 * w.pixels * w.frames + 5e-8 * w.pixels * w.frames * w.steps * (w.branches or 2)
    ),
    "attention": lambda w: w.steps * (w.branches or 2) * ((w.pixels / 1e6) + 0.3 * (w.pixels / 1e6) ** 2),
    "a simulated engine of so much per request": lambda w: 0.5,
    "a simulated engine of so much per step": lambda w: 0.02 * w.steps,
}


@pytest.mark.parametrize("name", SERVERS)
def test_amounts_never_seen_are_estimated_from_a_few_that_were(name: str) -> None:
    rng = random.Random(7)
    true_s = SERVERS[name]
    model = CostModel()
    seen = [Work(side * side, 1, steps, 2) for side in (512, 1024) for steps in (10, 20, 50)]
    for _ in range(30):
        for work in seen:
            model.observe(work, true_s(work) * rng.lognormvariate(0.0, 0.1))
    for work in (Work(768 * 768, 1, 30, 2), Work(1024 * 512, 1, 15, 2), Work(1280 * 1280, 1, 40, 2)):
        assert model.estimate_s(work) == pytest.approx(true_s(work), rel=0.25)


def test_guesses_follow_what_is_learned_later() -> None:
    model = CostModel()
    unseen = PICTURE._replace(steps=30)
    model.observe(PICTURE, 10.0)
    assert model.estimate_s(unseen) == pytest.approx(15.0, rel=0.15)
    for _ in range(40):
        model.observe(PICTURE, 2.0)
    assert model.estimate_s(unseen) == pytest.approx(3.0, rel=0.15)
    model.observe(unseen, 2.5)
    assert model.estimate_s(unseen) == pytest.approx(2.5)


def test_a_step_is_measured_or_else_the_service_time_shared_out() -> None:
    model = CostModel()
    model.observe(PICTURE, 10.0)
    assert model.step_s(PICTURE) == pytest.approx(0.5)
    model.observe(PICTURE, 10.0, 0.4)
    assert model.step_s(PICTURE) == pytest.approx(0.4)
    assert model.step_s(PICTURE._replace(steps=3)) == pytest.approx(0.4)
    assert model.step_s(PICTURE._replace(pixels=4 * PICTURE.pixels)) == pytest.approx(1.6, rel=0.2)


def test_amounts_are_remembered_in_bounded_number() -> None:
    model = CostModel()
    for steps in range(1, 1000):
        model.observe(PICTURE._replace(steps=steps), steps / 10)
        model.estimate_s(PICTURE._replace(steps=steps + 5000))
    times = model._service
    assert len(times._known) == MAX_AMOUNTS
    assert len(times._guesses) <= MAX_AMOUNTS + 1
    assert model.estimate_s(PICTURE._replace(steps=700)) == pytest.approx(70.0, rel=0.1)
