from __future__ import annotations

from core_driver import CoreDriver, aborts, dispatches, ends, events, output_of

from triptych.errors import ErrorCode, TriptychError
from triptych.messages import Aborted, Address, Heartbeat, Preview
from triptych.orchestrator.effects import Dispatch, Drop, Excuse, Finish, Requeued, SendAbort

# ---- death of replicas


def test_a_unit_that_had_not_begun_moves_freely() -> None:
    driver = CoreDriver(slots=[1, 1])
    driver.submit()
    requeued, dispatch = driver.lost(0)
    assert requeued == Requeued("a", 0, 2, False)
    assert isinstance(dispatch, Dispatch)
    assert (dispatch.replica_id, dispatch.message.alone, dispatch.message.address.attempt) == (1, False, 2)
    [output] = events(driver.output(dispatch.message.address))
    assert output.metrics.attempts == 2


def test_a_unit_that_had_begun_is_replayed_alone_and_keeps_its_place() -> None:
    driver = CoreDriver(slots=[1, 1])
    for name in "abcd":
        driver.submit(name)
    driver.progress(driver.address("a"))
    assert dispatches(driver.lost(0)) == []
    assert [unit.request.id for unit in driver.core.dispatcher.queue] == ["a", "c", "d"]
    effects = driver.output(driver.address("b"))
    assert dispatches(effects) == [(1, "a", 0)]
    assert driver.sent[-1].message.alone


def test_a_replica_takes_no_other_unit_beside_one_that_runs_alone() -> None:
    driver = CoreDriver(slots=[2, 2])
    driver.submit("a")
    driver.progress(driver.address("a"))
    driver.lost(0)
    assert driver.sent[-1].message.alone
    driver.submit("b")
    assert len(driver.sent) == 2
    effects = driver.output(driver.address("a"))
    assert dispatches(effects) == [(1, "b", 0)]
    driver.submit("c")
    assert dispatches(driver.sent)[-1] == (1, "c", 0)


def test_a_busy_replica_is_kept_for_the_unit_that_must_run_alone() -> None:
    driver = CoreDriver(slots=[1, 3, 3])
    driver.submit("x", n=6)
    suspect = driver.address("x", 0)
    driver.progress(suspect)
    driver.lost(0)
    assert driver.core.dispatcher.pool.kept is not None
    kept = driver.core.dispatcher.pool.kept.id
    driver.submit("new", n=4)
    assert kept not in [replica for replica, request, _ in dispatches(driver.sent) if request == "new"]
    for unit in range(1, 6):
        if driver.where(driver.address("x", unit)) == kept:
            driver.output(driver.address("x", unit))
    assert driver.where(driver.address("x", 0)) == kept
    assert driver.sent[-1].message.alone
    assert driver.core.dispatcher.pool.kept is None


def test_when_the_kept_replica_dies_another_is_kept() -> None:
    driver = CoreDriver(slots=[1, 2, 2])
    driver.submit("a", n=3)
    driver.progress(driver.address("a", 0))
    driver.lost(0)
    pool = driver.core.dispatcher.pool
    assert pool.kept is not None
    first = pool.kept.id
    driver.core.replica_draining(first, 1, driver.now)
    driver.take()
    assert pool.kept is not None
    assert pool.kept.id == 3 - first


def test_a_kept_replica_is_let_go_when_the_lone_unit_leaves_the_queue() -> None:
    driver = CoreDriver(slots=[1, 2])
    driver.submit("a")
    driver.submit("b")
    driver.progress(driver.address("a"))
    driver.lost(0)
    driver.submit("c")
    assert len(driver.sent) == 2
    assert dispatches(driver.abort("a")) == [(1, "c", 0)]


def test_the_second_death_alone_is_poison_and_neighbours_are_not_convicted() -> None:
    driver = CoreDriver(slots=[2, 2])
    driver.submit("bad")
    driver.submit("other")
    driver.submit("good")
    assert driver.where(driver.address("good")) == 0
    for name in ("bad", "good"):
        driver.progress(driver.address(name))
    driver.lost(0)
    driver.output(driver.address("other"))
    assert driver.where(driver.address("bad")) == 1
    driver.progress(driver.address("bad"))
    effects = driver.lost(1)
    assert ends(effects) == [("bad", "poison_request")]
    assert dispatches(driver.ready(0, 2)) == [(0, "good", 0)]
    assert ends(driver.output(driver.address("good"))) == [("good", None)]


def convict(driver: CoreDriver, *, on: tuple[int, int]) -> list[Excuse]:
    """Request `a` begins on these replicas and kills both; the first is back before it is tried again."""
    excuses = []
    for replica_id in on:
        assert driver.where(driver.address("a")) == replica_id
        driver.progress(driver.address("a"))
        effects = driver.lost(replica_id)
        excuses += [effect for effect in effects if isinstance(effect, Excuse)]
        if ("a", "poison_request") not in ends(effects):
            driver.ready(replica_id)
    return excuses


def test_replicas_are_excused_for_dying_of_a_unit_that_also_kills_another() -> None:
    driver = CoreDriver(slots=[1, 1, 1])
    driver.submit()
    assert convict(driver, on=(0, 1)) == [Excuse(((0, 1), (1, 1)))]


def test_the_only_replica_is_excused_for_dying_twice_of_a_unit() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit()
    assert convict(driver, on=(0, 0)) == [Excuse(((0, 1), (0, 2)))]


def test_a_replica_that_alone_dies_of_a_unit_while_others_serve_is_not_excused() -> None:
    driver = CoreDriver(slots=[1, 1])
    driver.submit("busy")
    driver.submit()
    assert convict(driver, on=(1, 1)) == []
    assert driver.core.history.get("a") is not None


def test_a_suspect_is_rather_tried_where_it_has_not_been() -> None:
    driver = CoreDriver(slots=[1, 1])
    driver.submit()
    driver.progress(driver.address())
    driver.core.dispatcher.turn = 1  # the next one in the rotation is replica 0
    assert dispatches(driver.ready(0)) == [(1, "a", 0)]


def test_a_unit_that_kills_three_replicas_unheard_is_poison() -> None:
    driver = CoreDriver(slots=[1, 1, 1])
    driver.submit()
    ended = [ends(driver.lost(driver.where(driver.address()))) for _ in range(3)]
    assert ended == [[], [], [("a", "poison_request")]]
    assert [effect.message.alone for effect in driver.sent] == [False, False, True]


def test_poison_aborts_siblings_on_other_replicas_only() -> None:
    driver = CoreDriver(slots=[1, 1, 1])
    driver.submit(n=2)
    for _ in range(2):
        driver.progress(driver.address("a", 0))
        effects = driver.lost(driver.where(driver.address("a", 0)))
    assert ends(effects) == [("a", "poison_request")]
    assert aborts(effects) == [(1, driver.address("a", 1))]


def test_previews_that_were_sent_are_not_sent_again_by_a_replay() -> None:
    driver = CoreDriver(slots=[1, 1])
    driver.submit(previews=2)
    driver.say(Preview(driver.address(), 0, 4, "image/png", 64, 32), frames=[b"p"])
    driver.lost(0)
    assert driver.say(Preview(driver.address(), 0, 4, "image/png", 64, 32), frames=[b"p"]) == [Drop("surplus_preview")]
    assert len(events(driver.say(Preview(driver.address(), 1, 8, "image/png", 64, 32), frames=[b"p"]))) == 1
    assert driver.say(Preview(driver.address(), 2, 9, "image/png", 64, 32), frames=[b"p"]) == [Drop("surplus_preview")]


def test_an_unannounced_new_incarnation_means_the_old_one_is_gone() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit()
    requeued, dispatch = driver.ready(0)
    assert isinstance(requeued, Requeued)
    assert isinstance(dispatch, Dispatch)
    assert dispatch.message.address == Address("a", 0, 2, 2)


def test_late_and_foreign_messages_are_dropped_and_counted() -> None:
    driver = CoreDriver(slots=[1, 1])
    driver.submit()
    old = driver.address()
    driver.lost(0)
    driver.ready(0)
    assert driver.say(output_of(old), frames=[b"x"], replica_id=0) == [Drop("stale_incarnation")]
    assert driver.say(Aborted(driver.address()), replica_id=9) == [Drop("stale_incarnation")]
    assert driver.say(Aborted(Address("a", 0, 1, 1)), replica_id=1) == [Drop("stale_unit")]
    assert driver.say(Aborted(Address("z", 0, 2, 1)), replica_id=1) == [Drop("stale_unit")]
    driver.core.message(1, Heartbeat(1, 5, "step"), (), driver.now)
    driver.core.replica_lost(0, 1, driver.now)
    driver.core.replica_ready(0, 2, 1, driver.now)
    assert driver.take() == [Drop("unexpected_message"), Drop("stale_loss"), Drop("stale_ready")]
    assert driver.core.dropped["stale_unit"] == 2
    assert ends(driver.output(driver.address())) == [("a", None)]
    assert driver.say(output_of(driver.address()), frames=[b"x"]) == [Drop("stale_unit")]


# ---- draining


def test_a_draining_replica_finishes_what_it_has_and_takes_no_more() -> None:
    driver = CoreDriver(slots=[1, 1])
    driver.submit("a")
    driver.core.replica_draining(0, 1, driver.now)
    assert ends(driver.output(driver.address("a"))) == [("a", None)]
    driver.submit("b", n=2)
    assert dispatches(driver.sent)[1:] == [(1, "b", 0)]


def test_begin_drain_ends_whoever_waits_and_lets_running_units_finish() -> None:
    driver = CoreDriver(slots=[1, 1])
    driver.submit("a")
    driver.submit("b", n=2)
    driver.submit("c")
    driver.core.begin_drain(driver.now)
    effects = driver.take()
    assert ends(effects) == [("b", "draining"), ("c", "draining")]
    assert aborts(effects) == [(1, driver.address("b", 0))]
    assert driver.refused("d").code is ErrorCode.DRAINING
    assert ends(driver.output(driver.address("a"))) == [("a", None)]


def test_a_unit_whose_replica_dies_during_the_drain_is_not_queued_again() -> None:
    driver = CoreDriver(slots=[1, 1])
    driver.submit()
    driver.core.begin_drain(driver.now)
    assert ends(driver.lost(0)) == [("a", "draining")]
    assert len(driver.core.dispatcher.queue) == 0


def test_abort_all_ends_everything_with_errors_of_their_own() -> None:
    driver = CoreDriver(slots=[1])
    driver.submit("a")
    driver.submit("b")
    driver.core.abort_all(lambda: TriptychError(ErrorCode.DRAINING, "now"), driver.now)
    effects = driver.take()
    assert ends(effects) == [("a", "draining"), ("b", "draining")]
    errors = [effect.error for effect in effects if isinstance(effect, Finish)]
    assert errors[0] is not errors[1]
    assert [type(effect) for effect in effects].count(SendAbort) == 1
