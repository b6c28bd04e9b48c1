"""Start, stop and sudden death of the server process and its replicas."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.server_process import free_port, wait_until, write_stage_file


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_kill_9_of_the_server_leaves_no_process_and_a_free_port(simulated_server: Callable[..., Any]) -> None:
    server = simulated_server(replicas=2)
    children = server.descendants()
    assert len(children) >= 3
    sockets = {Path(c.laddr) for child in children for c in child.net_connections("unix") if "pymp-" in c.laddr}
    folders = {socket.parent for socket in sockets}
    assert len(folders) == 1
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert port_is_free(server.port)
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_lets_running_work_finish(
    simulated_server: Callable[..., Any], number: signal.Signals
) -> None:
    server = simulated_server(replicas=2, seconds=1.5)
    children = server.descendants()
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(server.image(size="64x64"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(replica["in_flight"] for replica in server.replicas()) == 2, 5, "both run")
    os.killpg(server.process.pid, number)
    wait_until(lambda: server.client.get("/readyz").status_code == 503, 5, "readiness is withdrawn")
    refused = server.image(size="64x64")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    for thread in threads:
        thread.join(20)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert server.process.wait(20) == 0
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert port_is_free(server.port)


def test_a_second_signal_stops_at_once(simulated_server: Callable[..., Any]) -> None:
    server = simulated_server(replicas=1)
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(server.image("[[slow:60]]", size="64x64")))
    thread.start()
    wait_until(lambda: server.replicas()[0]["in_flight"] == 1, 5, "it runs")
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.client.get("/readyz").status_code == 503, 5, "readiness is withdrawn")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    thread.join(20)
    assert answers[0].json()["error"]["code"] == "draining"


def test_a_port_in_use_is_exit_code_2_before_anything_loads(start_server: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start_server(port=port)
        assert server.process.wait(30) == 2
    log = server.log.read_text()
    assert f"127.0.0.1:{port}" in log
    assert "Traceback" not in log


def test_a_model_that_no_replica_can_load_is_exit_code_1_with_a_reason(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model_index.json").write_text('{"_class_name": "NoSuchPipeline", "_diffusers_version": "0.1"}')
    server = start_server(str(broken))
    assert server.process.wait(60) == 1
    assert "NoSuchPipeline" in server.log.read_text()


def test_a_bug_in_the_supervision_of_a_replica_ends_the_server_with_exit_code_1(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    planted = "from triptych.replicas.restart import RestartRule; del RestartRule.delay_after_death_s; "
    planted += "from triptych.cli.main import main; main()"
    stage_file = write_stage_file(tmp_path / "stages.yaml", replicas=2, seconds=1.0)
    server = start_server("--stage-configs-path", str(stage_file), ready=2, program=("-c", planted))
    children = server.descendants()
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(server.image(size="64x64"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(replica["in_flight"] for replica in server.replicas()) == 2, 5, "both run")
    os.kill(server.replicas()[0]["pid"], signal.SIGKILL)
    assert server.process.wait(20) == 1
    for thread in threads:
        thread.join(20)
    assert sorted(answer.status_code for answer in answers) == [200, 503]  # one runs to its end, one waits again
    assert "the server cannot go on: a bug in the supervisor (replica 0): AttributeError" in server.log.read_text()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def test_a_replica_killed_under_load_is_replaced_and_its_request_answered(
    simulated_server: Callable[..., Any],
) -> None:
    server = simulated_server(replicas=2, seconds=1.0)
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(server.image(size="64x64"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(replica["in_flight"] for replica in server.replicas()) == 2, 5, "both run")
    victim = server.replicas()[0]["pid"]
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join(30)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert sorted(answer.json()["metrics"][0]["attempts"] for answer in answers) == [1, 2]
    wait_until(lambda: server.ready_replicas() == 2, 30, "the replica is back")
    assert server.replicas()[0]["pid"] != victim
    assert server.replicas()[0]["restarts"] == 1


def test_a_careless_parent_process_does_not_matter(tmp_path: Path) -> None:
    """Standard descriptors closed, working directory gone."""
    gone = tmp_path / "gone"
    gone.mkdir()
    stage_file = write_stage_file(tmp_path / "careless.yaml", replicas=1, seconds=0)
    port = free_port()
    command = f"cd {gone}; rmdir {gone}; exec {sys.executable} -m triptych serve --port {port} "
    command += f"--stage-configs-path {stage_file} 0<&- 1>&- 2>&-"
    process = subprocess.Popen(["bash", "-c", command])
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/readyz"), 60, "it serves")
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
