from __future__ import annotations

import pytest
from core_driver import CoreDriver, aborts, dispatches, ends, events, make_request, output_of

from triptych.errors import ErrorCode, TriptychError
from triptych.messages import Address, Preview
from triptych.orchestrator.deadlines import Deadlines
from triptych.orchestrator.effects import Dispatch, Finish, Publish, SendUpdate
from triptych.orchestrator.events import RequestStatus, UnitOutput, UnitPreview, UnitProgress, UnitState
from triptych.orchestrator.history import MAX_FINISHED
from triptych.orchestrator.units import IllegalTransition, Request, Trigger


def states(driver: CoreDriver, request_id: str = "a") -> list[UnitState]:
    request = driver.core.live.get(request_id) or driver.core.history.get(request_id)
    assert request is not None
    return [unit.state for unit in request.units]


# ---- the plain life of a request


def test_a_request_is_dispatched_publishes_its_output_and_ends() -> None:
    driver = CoreDriver(slots=[1])
    [dispatch] = driver.submit(frames=(b"pixels",), priority=3, previews=1)
    assert isinstance(dispatch, Dispatch)
    assert dispatch.frames == (b"pixels",)
    assert dispatch.message.address == Address("a", 0, 1, 1)
    assert (dispatch.message.priority, dispatch.message.previews, dispatch.message.alone) == (3, 1, False)
    driver.now += 2.0
    publish, finish = driver.output(dispatch.message.address, inference_s=1.5)
    assert isinstance(publish, Publish)
    output = publish.event
    assert isinstance(output, UnitOutput)
    assert (output.unit, output.seed, output.data, output.mime) == (0, 7, b"png", "image/png")
    assert (output.metrics.replica, output.metrics.inference_s, output.metrics.attempts) == (0, 1.5, 1)
    assert finish == Finish("a", None)
    assert driver.core.dispatcher.pool.by_id[0].completed == 1


def test_output_i_of_n_has_seed_plus_i_and_runs_anywhere() -> None:
    driver = CoreDriver(slots=[1, 1, 1])
    driver.submit(n=3, seed=40)
    assert [effect.message.params.seed for effect in driver.sent] == [40, 41, 42]
    assert dispatches(driver.sent) == [(0, "a", 0), (1, "a", 1), (2, "a", 2)]
    assert ends(driver.output(driver.address("a", 2))) == []
    assert ends(driver.output(driver.address("a", 0))) == []
    effects = driver.output(driver.address("a", 1))
    assert events(effects)[0].seed == 41
    assert ends(effects) == [("a", None)]


def test_queue_time_is_the_wait_for_a_slot() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("a")
    driver.submit("b")
    driver.now += 5.0
    driver.output(driver.address("a"))
    driver.now += 1.0
    [output] = events(driver.output(driver.address("b")))
    assert output.metrics.queue_s == pytest.approx(5.0)


def test_progress_and_previews_are_published() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit(previews=2)
    address = driver.address()
    assert events(driver.progress(address, 4)) == [UnitProgress(0, 4, 20)]
    preview = driver.say(Preview(address, 0, 4, "image/png", 64, 32), frames=[b"p"])
    assert events(preview) == [UnitPreview(0, 0, "image/png", b"p", 64, 32)]


def test_an_ended_request_keeps_neither_prompt_nor_pictures() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit(frames=(b"pixels",))
    driver.output(driver.address())
    request = driver.core.history.get("a")
    assert request is not None
    assert (request.spec.params.prompt, request.spec.frames) == ("", ())


def test_an_id_is_used_once() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit()
    with pytest.raises(ValueError, match="used before"):
        driver.submit()


def test_an_illegal_transition_raises() -> None:
    request = Request(make_request(), first_arrival=0, now=0.0)
    with pytest.raises(IllegalTransition, match="output while queued"):
        request.units[0].fire(Trigger.OUTPUT)
    with pytest.raises(IllegalTransition):
        request.fire(Trigger.OUTPUT)
    request.fire(Trigger.ABORT)
    with pytest.raises(IllegalTransition):
        request.fire(Trigger.ABORT)


# ---- admission


def test_before_the_first_ready_replica_work_is_refused() -> None:
    error = CoreDriver().refused()
    assert (error.code, error.status) == (ErrorCode.NOT_READY, 503)
    assert error.retry_after_s is not None


def test_a_deadline_in_the_past_is_refused() -> None:
    assert CoreDriver(slots=[1]).refused(timeout_s=0.0).code is ErrorCode.DEADLINE_EXCEEDED


def test_units_that_start_at_once_do_not_count_against_the_queue_bound() -> None:
    driver = CoreDriver(slots=[2, 1], max_queue_size=2)
    driver.submit("a", n=5)
    assert len(driver.core.dispatcher.queue) == 2
    error = driver.refused("b")
    assert (error.code, error.retry_after_s) == (ErrorCode.QUEUE_FULL, 1.0)
    assert "2 units wait, the limit is 2" in error.message


def test_admission_is_all_or_nothing() -> None:
    driver = CoreDriver(slots=[1], max_queue_size=2)
    driver.submit("a")
    assert driver.refused("b", n=3).code is ErrorCode.QUEUE_FULL
    driver.submit("c", n=2)


# ---- abort and failure


def test_aborting_a_queued_request_removes_it_at_once() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("a")
    driver.submit("b")
    effects = driver.abort("b")
    assert ends(effects) == [("b", "request_aborted")]
    assert aborts(effects) == []
    assert len(driver.core.dispatcher.queue) == 0


@pytest.mark.parametrize("answer", ["output", "failure", "aborted"])
def test_an_aborted_running_unit_holds_its_slot_until_its_replica_answers(answer: str) -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("a")
    driver.submit("b")
    address = driver.address("a")
    effects = driver.abort("a")
    assert aborts(effects) == [(0, address)]
    assert ends(effects) == [("a", "request_aborted")]
    assert states(driver, "a") == [UnitState.ABORTING]
    assert driver.progress(address, 3) == []
    effects = getattr(driver, answer)(address)
    assert dispatches(effects) == [(0, "b", 0)]
    assert (ends(effects), events(effects)) == ([], [])
    assert states(driver, "a") == [UnitState.ABORTED]


def test_an_aborted_unit_ends_with_its_replica_and_is_not_replayed() -> None:
    driver = CoreDriver(slots=[1, 1])
    driver.submit("a")
    driver.abort("a")
    assert driver.lost(0) == []
    assert states(driver) == [UnitState.ABORTED]


def test_one_failed_unit_aborts_its_siblings_and_fails_the_request_once() -> None:
    driver = CoreDriver(slots=[1, 1])
    driver.submit(n=3)
    effects = driver.failure(driver.address("a", 1), "out_of_memory")
    assert aborts(effects) == [(0, driver.address("a", 0))]
    assert ends(effects) == [("a", "out_of_memory")]
    assert states(driver) == [UnitState.ABORTING, UnitState.FAILED, UnitState.ABORTED]
    assert ends(driver.failure(driver.address("a", 0))) == []
    request = driver.core.history.get("a")
    assert request is not None
    assert request.status is RequestStatus.FAILED


def test_an_engines_own_error_code_becomes_engine_error() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit()
    assert ends(driver.failure(driver.address(), "sprocket_missing")) == [("a", "engine_error")]


def test_a_unit_that_stops_without_being_asked_or_sends_no_data_fails_its_request() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("a")
    assert ends(driver.aborted(driver.address("a"))) == [("a", "engine_error")]
    driver.submit("b")
    assert ends(driver.say(output_of(driver.address("b")))) == [("b", "engine_error")]


def test_abort_of_unknown_and_ended_requests_says_so() -> None:
    driver = CoreDriver(slots=[1])
    with pytest.raises(TriptychError) as unknown:
        driver.abort("a")
    assert unknown.value.code is ErrorCode.REQUEST_NOT_FOUND
    driver.submit()
    driver.output(driver.address())
    with pytest.raises(TriptychError) as ended:
        driver.abort("a")
    assert ended.value.code is ErrorCode.CONFLICT
    with pytest.raises(TriptychError) as updated:
        driver.update("a", priority=1)
    assert updated.value.code is ErrorCode.CONFLICT


# ---- update


def test_a_new_priority_re_sorts_queued_units_and_reaches_every_running_one() -> None:
    driver = CoreDriver(slots=[1, 1])
    driver.submit("a", n=2)
    driver.submit("b")
    driver.submit("c")
    assert driver.update("c", priority=-1) == []
    assert [unit.request.id for unit in driver.core.dispatcher.queue] == ["c", "b"]
    assert driver.update("a", priority=7) == [
        SendUpdate(0, driver.address("a", 0), 7),
        SendUpdate(1, driver.address("a", 1), 7),
    ]
    assert dispatches(driver.output(driver.address("a", 0))) == [(0, "c", 0)]


def test_a_new_timeout_counts_from_now() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit(timeout_s=100.0)
    driver.now += 50.0
    driver.update("a", timeout_s=20.0)
    assert driver.core.next_deadline() == driver.now + 20.0
    driver.update("a", timeout_s=500.0)
    assert driver.core.next_deadline() == driver.now + 500.0
    assert driver.pass_time(499.0) == []
    assert ends(driver.pass_time(1.0)) == [("a", "deadline_exceeded")]


# ---- deadlines and outages


def test_a_deadline_ends_queued_and_running_requests() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("a", timeout_s=10.0)
    driver.submit("b", timeout_s=5.0)
    assert ends(driver.pass_time(5.0)) == [("b", "deadline_exceeded")]
    effects = driver.pass_time(5.0)
    assert ends(effects) == [("a", "deadline_exceeded")]
    assert aborts(effects) == [(0, driver.address("a"))]
    assert driver.core.next_deadline() is None


def test_without_any_replica_queued_work_waits_thirty_seconds() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("a")
    driver.submit("b")
    driver.lost(0)
    driver.now += 10.0
    driver.submit("c")
    assert sorted(ends(driver.pass_time(20.0))) == [("a", "no_replica"), ("b", "no_replica")]
    effects = driver.pass_time(10.0)
    assert ends(effects) == [("c", "no_replica")]
    [finish] = effects
    assert isinstance(finish, Finish)
    assert finish.error is not None
    assert finish.error.retry_after_s is not None


def test_a_request_that_outlasts_outages_waits_for_a_replica_until_its_own_deadline() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("runs", outlasts_outages=True, timeout_s=3600.0)
    driver.submit("waits", outlasts_outages=True, timeout_s=3600.0)
    driver.submit("plain")
    driver.lost(0)
    driver.submit("comes", outlasts_outages=True, timeout_s=60.0)
    assert ends(driver.pass_time(30.0)) == [("plain", "no_replica")]
    assert ends(driver.pass_time(30.0)) == [("comes", "deadline_exceeded")]
    driver.pass_time(3000.0)
    assert dispatches(driver.ready(0)) == [(0, "runs", 0)]
    assert dispatches(driver.output(driver.address("runs"))) == [(0, "waits", 0)]


def test_a_replica_that_comes_back_ends_the_wait() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("a")
    driver.submit("b")
    driver.lost(0)
    driver.now += 29.0
    assert dispatches(driver.ready(0)) == [(0, "a", 0)]
    assert driver.pass_time(100.0) == []


def test_a_draining_replica_that_dies_does_not_prolong_an_outage() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("a")
    driver.submit("b")
    driver.core.replica_draining(0, 1, driver.now)
    driver.now += 29.0
    driver.lost(0)
    assert ends(driver.pass_time(1.0)) == [("b", "no_replica")]
    assert ends(driver.pass_time(29.0)) == [("a", "no_replica")]


def test_while_a_replica_finishes_what_it_has_before_it_is_started_anew_queued_work_waits_for_it() -> None:
    driver = CoreDriver(slots=[1, 1])
    driver.submit("a", n=2)
    driver.submit("b")
    driver.lost(1)
    driver.core.replica_draining(0, 1, driver.now, comes_back=True)
    driver.submit("c")
    assert driver.pass_time(200.0) == []
    driver.output(driver.address("a"))
    driver.lost(0)
    assert driver.pass_time(29.0) == []
    driver.submit("d")
    assert sorted(ends(driver.pass_time(1.0))) == [("a", "no_replica"), ("b", "no_replica"), ("c", "no_replica")]
    assert dispatches(driver.ready(0)) == [(0, "d", 0)]


def test_a_drain_that_turns_out_to_be_for_good_bounds_the_wait_from_then_on_and_a_restart_lifts_it() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("a")
    driver.submit("b")
    driver.core.replica_draining(0, 1, driver.now, comes_back=True)
    driver.pass_time(100.0)
    driver.core.replica_draining(0, 1, driver.now, comes_back=False)
    assert driver.pass_time(29.0) == []
    driver.core.replica_draining(0, 1, driver.now, comes_back=True)
    assert driver.pass_time(100.0) == []
    driver.core.replica_draining(0, 1, driver.now, comes_back=False)
    assert ends(driver.pass_time(30.0)) == [("b", "no_replica")]


def test_the_heap_of_moments_stays_in_proportion_to_live_requests() -> None:
    driver = CoreDriver(slots=[2])
    driver.submit("long", timeout_s=10.0)
    for number in range(3000):
        driver.submit(f"r{number}")
        driver.output(driver.address(f"r{number}"))
    deadlines = driver.core._deadlines
    assert isinstance(deadlines, Deadlines)
    assert len(deadlines) < 200
    assert driver.core.next_deadline() == 1010.0


# ---- history


def test_ended_requests_are_kept_ten_minutes_and_at_most_a_thousand() -> None:
    driver = CoreDriver(slots=[1])
    for number in range(MAX_FINISHED + 5):
        driver.submit(f"r{number}")
        driver.output(driver.address(f"r{number}"))
    history = driver.core.history
    assert len(history) == MAX_FINISHED
    assert history.get("r4") is None
    assert history.get("r5") is not None
    driver.now += 601.0
    history.forget(driver.now)
    assert len(history) == 0
