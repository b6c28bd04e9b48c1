"""The table of replica states."""

from __future__ import annotations

import pytest

from triptych.replicas.state import ReplicaState
from triptych.replicas.transitions import TRANSITIONS, IllegalTransition, Trigger, next_state


def test_a_life_with_one_death_and_an_orderly_end() -> None:
    state = ReplicaState.STARTING
    seen = [state]
    for trigger in (
        Trigger.PROCESS_STARTED,
        Trigger.BECAME_READY,
        Trigger.DIED,
        Trigger.PROCESS_STARTED,
        Trigger.DIED_EARLY,
        Trigger.BACKOFF_OVER,
        Trigger.STOP_ASKED,
    ):
        state = next_state(state, trigger)
        seen.append(state)
    assert [str(state) for state in seen] == [
        "starting", "warming", "ready", "starting", "warming", "backing_off", "starting", "draining",
    ]  # fmt: skip


def test_what_is_not_in_the_table_raises() -> None:
    for state in ReplicaState:
        for trigger in Trigger:
            if (state, trigger) not in TRANSITIONS:
                with pytest.raises(IllegalTransition):
                    next_state(state, trigger)


def test_a_drained_or_failed_replica_starts_again_only_when_asked() -> None:
    for state in (ReplicaState.DRAINING, ReplicaState.FAILED):
        ways_up = [trigger for trigger in Trigger if TRANSITIONS.get((state, trigger)) is ReplicaState.STARTING]
        assert ways_up == [Trigger.RESTART_ASKED]


def test_every_state_can_be_reached() -> None:
    assert {*TRANSITIONS.values()} == set(ReplicaState)
