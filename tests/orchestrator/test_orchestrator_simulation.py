from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

MIX = [(0.1, 0.8), (1.0, 0.2)]


@pytest.mark.parametrize("routing", ["round_robin", "least_work"])
def test_the_central_queue_is_as_good_as_a_clairvoyant_least_work_policy(simulate: ModuleType, routing: str) -> None:
    jobs = simulate.Jobs.draw(count=3000, mix=MIX, load=0.9, servers=4, seed=2)
    central, error = simulate.latencies_s(jobs, routing=routing, replicas=4)
    clairvoyant = simulate.clairvoyant_latencies_s(jobs, servers=4)
    assert central.mean() == pytest.approx(clairvoyant.mean(), rel=0.03)
    assert np.percentile(central, 99) == pytest.approx(np.percentile(clairvoyant, 99), rel=0.03)
    assert error < 0.01


def test_binding_on_arrival_is_much_worse_under_mixed_load(simulate: ModuleType) -> None:
    jobs = simulate.Jobs.draw(count=3000, mix=MIX, load=0.9, servers=4, seed=2)
    strict, _ = simulate.latencies_s(jobs, routing="strict_round_robin", replicas=4)
    assert strict.mean() > 1.5 * simulate.clairvoyant_latencies_s(jobs, servers=4).mean()


@pytest.mark.parametrize("routing", ["round_robin", "least_work"])
def test_expected_ends_come_true(simulate: ModuleType, routing: str) -> None:
    """With nothing else arriving, `eta_s` and positions foretell the very schedule, whatever priorities and users."""
    server = simulate.VirtualServer(routing=routing, replicas=3, slots=2)
    for seconds in (1.0, 2.0, 5.0):
        server.submit(f"warm{seconds}", seconds)
    server.run()
    for number in range(120):
        server.run(server.now + 0.01)
        seconds, user = (1.0, 2.0, 5.0)[number % 3], (None, "u", "v", "w")[number % 7 % 4]
        server.submit(f"{number}", seconds, user=user, priority=(number % 5 - 2) * 3)
    forecast = server.core.backlog.forecast(server.now)
    assert len(forecast.positions) > 100
    began_s = server.now
    waiting = sorted(forecast.positions, key=forecast.positions.__getitem__)
    server.run()
    for unit, eta_s in forecast.etas_s.items():
        assert server.ended_s[unit.request.id] == pytest.approx(began_s + eta_s, abs=1e-6)
    started_s = [server.dispatched_s[unit.request.id, 0] for unit in waiting]
    assert started_s == sorted(started_s)


def test_the_program_writes_what_it_shows(
    simulate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    options = ["--jobs", "200", "--replicas", "2", "--slots", "2", "--mix", "0.1:1", "--output-file", str(file)]
    monkeypatch.setattr(sys, "argv", ["simulate.py", *options])
    simulate.main()
    results = json.loads(file.read_text())
    assert set(results) == {"clairvoyant", "round_robin", "strict_round_robin", "least_work"}
    assert "round_robin" in capsys.readouterr().out
