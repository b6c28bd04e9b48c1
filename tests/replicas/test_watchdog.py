"""What counts as hung, on a clock moved by hand."""

from __future__ import annotations

from triptych.messages import Address, WarmUp
from triptych.replicas.watchdog import PACED_LIMITS, PhaseLimit, PhaseTimes, ServedTime, Watch, WatchdogLimits

LIMITS = WatchdogLimits(
    load=PhaseLimit(50, 500), step=PhaseLimit(20, 200), decode=PhaseLimit(30, 300), idle=PhaseLimit(60, 600), factor=10
)
UNIT = Address("r", 0, 1, 1)


def verdict(watch: Watch, now: float, *, stopped: bool = False) -> str | None:
    return watch.verdict(now, is_stopped=lambda: stopped)


def loaded(times: PhaseTimes, *, at: float = 0.0) -> Watch:
    watch = Watch(times, at)
    watch.ready(at)
    return watch


def beat(watch: Watch, start: float, end: float, steps: int = 0, phase: str = "step") -> None:
    for second in range(round(start), round(end) + 1):
        watch.heard(steps, phase, float(second))


def test_a_phase_never_measured_has_the_large_bound_and_a_measured_one_many_times_the_slowest() -> None:
    times = PhaseTimes(LIMITS)
    assert times.bound_s("step", 1.0) == 200
    times.learn("step", 1.0, 1.0)
    assert times.bound_s("step", 1.0) == 20  # the floor
    times.learn("step", 7.0, 1.0)
    times.learn("step", 3.0, 1.0)
    assert times.bound_s("step", 1.0) == 70


def test_larger_work_than_ever_seen_may_take_longer_with_its_square() -> None:
    times = PhaseTimes(LIMITS)
    times.learn("step", 4.0, 100.0)
    assert times.bound_s("step", 50.0) == 40
    assert times.bound_s("step", 300.0) == (40 + 10) * 9  # heartbeats tell it to a second
    times.learn("step", 5.0, 300.0)
    assert times.bound_s("step", 300.0) == 50


def test_steps_too_short_for_heartbeats_do_not_make_a_large_picture_a_hang() -> None:
    times = PhaseTimes(LIMITS)
    times.learn("step", 0.0, 64.0 * 64)
    assert times.bound_s("step", 64.0 * 64) == 20
    assert times.bound_s("step", 1024.0 * 1024) == 10 * 256**2


def test_what_the_cost_model_expects_is_sharper_than_heartbeats_for_a_larger_picture_and_allowed_for_everywhere() -> (
    None
):
    times = PhaseTimes(LIMITS)
    times.learn("step", 0.0, 100.0)
    assert times.bound_s("step", 400.0, expected_step_s=2.0) == 10 * 2 * 4
    assert times.bound_s("step", 100.0, expected_step_s=9.0) == 90
    times.learn("step", 30.0, 100.0)
    assert times.bound_s("step", 100.0, expected_step_s=0.1) == 300
    times.learn("decode", 1.0, 100.0)
    assert times.bound_s("decode", 100.0, expected_step_s=9.0) == 30


def test_before_anything_is_measured_the_warm_up_tells_what_a_hang_is() -> None:
    times = PhaseTimes(LIMITS)
    times.warmed_up(WarmUp(work=100.0, seconds=4.0, step_s=0.5, decode_s=1.0))
    assert times.bound_s("step", 100.0) == 10 * (4 + 0.5 * 1.125)
    assert times.bound_s("step", 1600.0) == 200  # no more than without: 10 * (4 + 0.5 * 16 * 3) = 280
    assert times.bound_s("step", 800.0) == 10 * (4 + 0.5 * 8 * 2)
    assert times.bound_s("decode", 800.0) == 10 * (4 + 1.0 * 8 * 2)
    assert times.bound_s("encode", 800.0) == 10 * (4 + 1.0 * 8 * 2)
    assert times.bound_s("idle", 100.0) == 600
    assert times.bound_s("load", 0.0) == 500
    times.warmed_up(WarmUp(work=100.0, seconds=0.1, step_s=0.01, decode_s=0.01))  # a quicker replica teaches nothing
    assert times.bound_s("step", 100.0) > 20


def test_a_size_that_never_ran_may_choose_its_kernels_as_the_warm_up_did() -> None:
    times = PhaseTimes(LIMITS)
    times.warmed_up(WarmUp(work=100.0, seconds=7.0, step_s=0.1, decode_s=0.1))
    times.learn("step", 0.0, 100.0)
    assert times.bound_s("step", 100.0) == 20
    assert times.bound_s("step", 200.0, expected_step_s=0.2) == 10 * (7 + 0.4)


def test_where_progress_does_not_depend_on_size_nothing_grows_with_it() -> None:
    times = PhaseTimes(PACED_LIMITS)
    times.learn("step", 0.5, 100.0)
    assert times.bound_s("step", 1e9, expected_step_s=1000.0) == 5


def test_the_warm_up_of_a_replica_bounds_its_first_unit() -> None:
    watch = Watch(PhaseTimes(LIMITS), 0.0)
    watch.ready(5.0, WarmUp(work=1.0, seconds=0.5, step_s=0.1, decode_s=0.1))
    watch.sent(UNIT, 1.0, 5.0)
    beat(watch, 6, 30, steps=0)
    assert verdict(watch, 25) is None
    assert verdict(watch, 26) == "hung: no progress in phase step for 20 s (limit 20 s)"


def test_a_step_that_does_not_end_is_a_hang_although_heartbeats_go_on() -> None:
    watch = loaded(PhaseTimes(LIMITS))
    watch.sent(UNIT, 1.0, 0.0)
    beat(watch, 1, 5, steps=0)
    beat(watch, 6, 45, steps=1)  # the first stretch of `step` took 5 s by heartbeats, so 4 s or a little more
    assert verdict(watch, 45) is None
    beat(watch, 46, 46, steps=1)
    assert verdict(watch, 46) == "hung: no progress in phase step for 40 s (limit 40 s)"


def test_what_one_replica_learned_holds_for_the_next_incarnation() -> None:
    times = PhaseTimes(LIMITS)
    first = loaded(times)
    first.sent(UNIT, 1.0, 0.0)
    beat(first, 1, 1, steps=0)
    beat(first, 2, 2, steps=1)
    second = loaded(times, at=10.0)
    second.sent(UNIT, 1.0, 10.0)
    beat(second, 11, 31, steps=0)
    assert verdict(second, 31) == "hung: no progress in phase step for 20 s (limit 20 s)"


def test_a_load_has_its_own_bound_and_its_silence_is_no_hang() -> None:
    times = PhaseTimes(LIMITS)
    watch = Watch(times, 0.0)
    assert verdict(watch, 499) is None
    assert "phase load" in str(verdict(watch, 500))
    watch.ready(13.0)
    assert times.bound_s("load", 0.0) == 120
    assert "phase load for 120 s" in str(verdict(Watch(times, 100.0), 220))


def test_an_idle_replica_may_idle_for_ever_but_not_fall_silent() -> None:
    watch = loaded(PhaseTimes(LIMITS))
    beat(watch, 1, 1000, phase="idle")
    assert verdict(watch, 1000) is None
    assert verdict(watch, 1029) is None
    assert verdict(watch, 1030) == "hung: no heartbeat for 30 s"


def test_a_stopped_process_is_found_by_a_few_missing_heartbeats_also_while_it_loads() -> None:
    for watch in (loaded(PhaseTimes(LIMITS)), Watch(PhaseTimes(LIMITS), 0.0)):
        assert verdict(watch, 2.9, stopped=True) is None
        assert verdict(watch, 3.0, stopped=False) is None
        assert verdict(watch, 3.0, stopped=True) == "hung: stopped by a signal and silent for 3 s"


def test_a_unit_that_no_model_runs_is_bounded_too() -> None:
    watch = loaded(PhaseTimes(LIMITS))
    watch.sent(UNIT, 1.0, 0.0)
    beat(watch, 1, 600, phase="idle")
    assert verdict(watch, 599) is None
    assert verdict(watch, 600) is not None
    watch.ended(UNIT, 600.0)
    assert verdict(watch, 600) is None


def test_a_replica_that_was_asked_to_leave_does_so_soon_after_its_last_unit() -> None:
    watch = loaded(PhaseTimes(LIMITS))
    watch.sent(UNIT, 1.0, 0.0)
    watch.leave(1.0)
    beat(watch, 1, 100, phase="step")
    watch.heard(0, "idle", 101.0)
    assert verdict(watch, 101) is None
    watch.ended(UNIT, 101.0)
    assert verdict(watch, 110.9) is None
    assert verdict(watch, 111) == "hung: did not leave within 10 s of its last unit"


def test_of_several_units_the_smallest_is_what_the_time_was_measured_for() -> None:
    times = PhaseTimes(LIMITS)
    watch = loaded(times)
    watch.sent(UNIT, 1.0, 0.0)
    watch.sent(Address("r", 1, 1, 1), 1000.0, 0.0)
    beat(watch, 1, 1, steps=0)
    beat(watch, 7, 7, steps=1)
    assert times.bound_s("step", 1.0) == 50
    assert times.bound_s("step", 10.0) == 6000


def test_time_in_which_the_loop_stood_still_does_not_count() -> None:
    served = ServedTime(100.0, interval_s=0.5)
    assert served.tick(100.5) == 0.5
    assert served.tick(101.0) == 1.0
    assert served.read(160.0) == 2.0  # heartbeats are read before the next tick
    assert served.tick(160.0) == 2.0
    assert served.tick(160.5) == 2.5
