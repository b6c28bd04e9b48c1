"""States of a replica and what moves it between them: one table, nothing else is legal."""

from __future__ import annotations

from enum import StrEnum

from triptych.replicas.state import ReplicaState

__all__ = ["TRANSITIONS", "IllegalTransition", "Trigger", "next_state"]

S = ReplicaState


class Trigger(StrEnum):
    """Why a replica changes its state."""

    PROCESS_STARTED = "process_started"
    BECAME_READY = "became_ready"
    DIED = "died"  # after it had served for a while: starts again at once
    DIED_EARLY = "died_early"  # before it was ready, or right after
    BACKOFF_OVER = "backoff_over"
    CRASH_LOOP = "crash_loop"  # died early too often in a row
    NONE_EVER_READY = "none_ever_ready"
    DRAIN_ASKED = "drain_asked"  # by an operator: finish, leave, stay away; also the first half of a restart
    RESTART_ASKED = "restart_asked"
    STOP_ASKED = "stop_asked"  # the whole server ends


TRANSITIONS: dict[tuple[ReplicaState, Trigger], ReplicaState] = {
    (S.STARTING, Trigger.PROCESS_STARTED): S.WARMING,
    (S.STARTING, Trigger.DIED_EARLY): S.BACKING_OFF,
    (S.WARMING, Trigger.BECAME_READY): S.READY,
    (S.WARMING, Trigger.DIED_EARLY): S.BACKING_OFF,
    (S.READY, Trigger.DIED): S.STARTING,
    (S.READY, Trigger.DIED_EARLY): S.BACKING_OFF,
    (S.BACKING_OFF, Trigger.BACKOFF_OVER): S.STARTING,
    (S.BACKING_OFF, Trigger.RESTART_ASKED): S.STARTING,
    (S.FAILED, Trigger.RESTART_ASKED): S.STARTING,
    (S.DRAINING, Trigger.RESTART_ASKED): S.STARTING,
    **{(state, Trigger.CRASH_LOOP): S.FAILED for state in (S.STARTING, S.WARMING, S.READY)},
    (S.BACKING_OFF, Trigger.NONE_EVER_READY): S.FAILED,
    (S.STARTING, Trigger.NONE_EVER_READY): S.FAILED,
    (S.WARMING, Trigger.NONE_EVER_READY): S.FAILED,
    **{
        (state, trigger): S.DRAINING
        for state in S
        for trigger in (Trigger.DRAIN_ASKED, Trigger.STOP_ASKED)
        if state is not S.DRAINING
    },
}


class IllegalTransition(Exception):
    """A bug: this trigger cannot happen in this state."""


def next_state(state: ReplicaState, trigger: Trigger) -> ReplicaState:
    """Where `trigger` leads from `state`. Raises `IllegalTransition`."""
    try:
        return TRANSITIONS[state, trigger]
    except KeyError:
        raise IllegalTransition(f"{trigger} in state {state}") from None
