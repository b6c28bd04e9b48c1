"""How close to ideal many replicas come: simulated engine, clients that never let the queue run dry.

`counts` keeps twice as many clients as replicas busy at 1, 2, 4 and 8 replicas of 0.5 s a request; `wide` does so with
16 replicas of 0.05 s; `rotation` sends 2n requests one by one, which must go to replicas 0..n-1 twice. The fraction is
ideal time (requests x service time / replicas) over measured time, from first byte sent to last byte received.

    python benchmarks/front/scaling.py counts --at-least 0.97
    python benchmarks/front/scaling.py wide --at-least 0.95
    python benchmarks/front/scaling.py rotation
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from light_client import Connection, chat_message, parse_size
from rich.console import Console
from rich.table import Table
from simulated import MODEL, simulated_server


def busy_seconds(port: int, message: bytes, *, clients: int, requests_per_client: int) -> float:
    """Seconds that `clients` clients need for their requests, each sending the next as soon as one is answered."""
    connections = [Connection(port, buffer_bytes=4 << 20) for _ in range(clients)]
    barrier = threading.Barrier(clients + 1)
    failures: list[BaseException] = []

    def client(connection: Connection) -> None:
        barrier.wait()
        try:
            for _ in range(requests_per_client):
                connection.request(message)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(connection,)) for connection in connections]
    for thread in threads:
        thread.start()
    barrier.wait()
    began_at = time.perf_counter()
    for thread in threads:
        thread.join()
    elapsed_s = time.perf_counter() - began_at
    for connection in connections:
        connection.close()
    if failures:
        raise failures[0]
    return elapsed_s


async def measure_count(arguments: argparse.Namespace, folder: Path, replicas: int) -> dict[str, Any]:
    """One server with `replicas` replicas under full load."""
    width, height = parse_size(arguments.size)
    message = chat_message(width=width, height=height, model=MODEL)
    clients = replicas * arguments.clients_per_replica
    async with simulated_server(folder, replicas=replicas, seconds_per_request=arguments.seconds) as port:
        # Every replica encodes its picture once before it is measured.
        busy_seconds(port, message, clients=clients, requests_per_client=1)
        rounds = max(1, round(arguments.duration / (arguments.seconds * arguments.clients_per_replica)))
        elapsed_s = busy_seconds(port, message, clients=clients, requests_per_client=rounds)
    requests = clients * rounds
    ideal_s = requests * arguments.seconds / replicas
    return {
        "replicas": replicas,
        "clients": clients,
        "requests": requests,
        "elapsed_s": elapsed_s,
        "ideal_s": ideal_s,
        "throughput_qps": requests / elapsed_s,
        "fraction_of_ideal": ideal_s / elapsed_s,
    }


async def measure_rotation(arguments: argparse.Namespace, folder: Path, replicas: int) -> dict[str, Any]:
    """2n requests one after another, and the replica that served each."""
    width, height = parse_size(arguments.size)
    message = chat_message(width=width, height=height, model=MODEL)
    async with simulated_server(folder, replicas=replicas, seconds_per_request=arguments.seconds) as port:
        connection = Connection(port)
        served = [
            json.loads(bytes(connection.request(message)[1]))["metrics"][0]["replica"] for _ in range(2 * replicas)
        ]
        connection.close()
    return {"replicas": replicas, "served_by": served, "in_turn": served == [*range(replicas)] * 2}


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every replica count in turn."""
    one = measure_rotation if arguments.case == "rotation" else measure_count
    with tempfile.TemporaryDirectory() as name:
        return [await one(arguments, Path(name), replicas) for replicas in arguments.replicas]


def show(report: dict[str, Any]) -> None:
    """The table."""
    table = Table(
        title=f"{report['case']}: simulated engine, {report['seconds_per_request']:g} s a request, {report['size']}",
        title_justify="left",
    )
    if report["case"] == "rotation":
        for heading in ("replicas", "served by", "in turn"):
            table.add_column(heading)
        for row in report["rows"]:
            table.add_row(str(row["replicas"]), " ".join(map(str, row["served_by"])), "yes" if row["in_turn"] else "NO")
    else:
        for heading in ("replicas", "clients", "requests", "seconds", "requests/s", "of ideal"):
            table.add_column(heading, justify="right")
        for row in report["rows"]:
            table.add_row(
                str(row["replicas"]),
                str(row["clients"]),
                str(row["requests"]),
                f"{row['elapsed_s']:.2f}",
                f"{row['throughput_qps']:.2f}",
                f"{row['fraction_of_ideal']:.4f}",
            )
    Console(width=110).print(table)


def main() -> int:
    """Measure, report, compare with the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["counts", "wide", "rotation"])
    parser.add_argument("--replicas", type=lambda text: [int(part) for part in text.split(",")], help="like 1,2,4,8")
    parser.add_argument("--seconds", type=float, help="service time of a request")
    parser.add_argument("--clients-per-replica", type=int, default=2)
    parser.add_argument("--duration", type=float, default=8.0, help="ideal seconds of load per count")
    parser.add_argument("--size", default="256x256")
    parser.add_argument("--at-least", type=float, help="exit 1 when a fraction of ideal is below it")
    parser.add_argument("--output-file", type=Path, help="write the report there as JSON")
    arguments = parser.parse_args()
    replicas, seconds = {
        "counts": ([1, 2, 4, 8], 0.5),
        "wide": ([16], 0.05),
        "rotation": ([1, 2, 4, 8], 0.02),
    }[arguments.case]
    arguments.replicas = arguments.replicas or replicas
    arguments.seconds = seconds if arguments.seconds is None else arguments.seconds
    report = {
        "case": arguments.case,
        "seconds_per_request": arguments.seconds,
        "size": arguments.size,
        "rows": asyncio.run(measure(arguments)),
    }
    show(report)
    if arguments.output_file:
        arguments.output_file.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.case == "rotation":
        return int(not all(row["in_turn"] for row in report["rows"]))
    bar = arguments.at_least
    return int(bar is not None and any(row["fraction_of_ideal"] < bar for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
