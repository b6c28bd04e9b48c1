"""A storm is drawn from its seed and nothing else."""

from __future__ import annotations

from itertools import islice

from chaos_schedule import Blow, faults, wishes


def test_the_same_seed_makes_the_same_storm_and_another_one_another() -> None:
    options = {"duration_s": 60.0, "replicas": 4}
    assert faults(5, **options) == faults(5, **options)
    assert faults(5, **options) != faults(6, **options)
    assert list(islice(wishes(5, 0), 50)) == list(islice(wishes(5, 0), 50))
    assert list(islice(wishes(5, 0), 50)) != list(islice(wishes(6, 0), 50))


def test_faults_come_in_order_within_the_time_with_every_kind_among_the_first() -> None:
    for seed in range(50):
        plan = faults(seed, duration_s=30.0, replicas=3, pause_s=(0.5, 1.5))
        moments = [fault.at_s for fault in plan]
        gaps = [later - earlier for earlier, later in zip([0.0, *moments], moments, strict=False)]
        assert all(0.5 <= gap <= 1.5 for gap in gaps)
        assert max(moments) < 30.0
        assert {fault.blow for fault in plan[: len(Blow)]} == set(Blow)
        assert {fault.replica for fault in plan} == {0, 1, 2}


def test_clients_wish_everything_and_never_use_a_number_twice() -> None:
    asked = [wish for client in range(12) for wish in islice(wishes(1, client), 2000)]
    assert len({wish.number for wish in asked}) == len(asked)
    kinds = {wish.kind for wish in asked}
    assert kinds == {"plain", "several", "slow", "oom", "error", "leave", "delete", "late", "crash", "hang"}
    assert sum(wish.kind == "plain" for wish in asked) > len(asked) / 2
    for wish in asked:
        assert (wish.outputs > 1) == (wish.kind == "several")
        assert (wish.gone_after_s is not None) == (wish.kind == "leave")
        assert ("[[" in wish.prompt) == (wish.kind not in ("plain", "several"))
