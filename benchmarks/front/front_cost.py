"""What our front costs: our server with an engine that needs no time, against a bare uvicorn app, in one run.

Both answer the same picture in the same JSON shape, one request at a time, in paired blocks (ours, bare; bare, ours),
so that slow changes of the machine meet both. Reported: medians and their ratio with a bootstrap interval over pairs.

    python benchmarks/front/front_cost.py --at-most 256x256=1.0 --at-most 1024x1024=0.5 --output-file front_cost.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from light_client import Connection, chat_message, parse_size
from rich.console import Console
from rich.table import Table
from simulated import MODEL, simulated_server

from triptych.bench.server import free_port


def paired_blocks(
    ours: Connection, bare: Connection, message: bytes, *, pairs: int, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Latencies in seconds, `pairs x block` for each; the order within a pair alternates."""
    measured: dict[str, list[list[float]]] = {"ours": [], "bare": []}
    connections = {"ours": ours, "bare": bare}
    for pair in range(pairs):
        for name in ("ours", "bare") if pair % 2 == 0 else ("bare", "ours"):
            connection = connections[name]
            connection.request(message)  # Wakes the process; the pause while the other ran is not its cost.
            measured[name].append([connection.request(message)[0] for _ in range(block)])
    return np.array(measured["ours"]), np.array(measured["bare"])


def ratio_of_medians(ours: np.ndarray, bare: np.ndarray, *, seed: int = 1) -> dict[str, float]:
    """Medians in milliseconds, their ratio, and its 95 % bootstrap interval over pairs."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(ours), size=(2000, len(ours)))
    ratios = [np.median(ours[pairs]) / np.median(bare[pairs]) for pairs in drawn]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return {
        "ours_p50_ms": float(np.median(ours)) * 1e3,
        "bare_p50_ms": float(np.median(bare)) * 1e3,
        "difference_ms": float(np.median(ours) - np.median(bare)) * 1e3,
        "ratio": float(np.median(ours) / np.median(bare)),
        "ratio_low": float(low),
        "ratio_high": float(high),
    }


@contextmanager
def bare_server(folder: Path, templates: dict[str, Any]) -> Iterator[int]:
    """The bare app in a process of its own; yields its port."""
    port = free_port()
    answers = folder / "answers.json"
    answers.write_text(json.dumps(templates))
    command = [sys.executable, str(Path(__file__).with_name("bare_app.py")), str(port), str(answers)]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                Connection(port).close()
                break
            except ConnectionRefusedError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(10)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both servers side by side, every size in turn."""
    messages = {
        size: chat_message(width=width, height=height, model=MODEL)
        for size in arguments.sizes
        for width, height in [parse_size(size)]
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with simulated_server(folder, replicas=1, seconds_per_request=0.0) as port:
            ours = Connection(port)
            templates = {size: json.loads(bytes(ours.request(message)[1])) for size, message in messages.items()}
            with bare_server(folder, templates) as bare_port:
                bare = Connection(bare_port)
                rows = []
                for size, message in messages.items():
                    body_bytes = {name: len(c.request(message)[1]) for name, c in (("ours", ours), ("bare", bare))}
                    paired_blocks(ours, bare, message, pairs=2, block=arguments.block)
                    blocks = paired_blocks(ours, bare, message, pairs=arguments.pairs, block=arguments.block)
                    rows.append({"size": size, "body_bytes": body_bytes, **ratio_of_medians(*blocks)})
                bare.close()
            ours.close()
    return {"pairs": arguments.pairs, "block": arguments.block, "concurrency": 1, "rows": rows}


def show(report: dict[str, Any]) -> None:
    """The table."""
    table = Table(title="Front: our server against a bare uvicorn app, concurrency 1", title_justify="left")
    for heading in ("size", "body (kB)", "ours p50 (ms)", "bare p50 (ms)", "ratio", "95 % interval", "at most"):
        table.add_column(heading, justify="right")
    for row in report["rows"]:
        table.add_row(
            row["size"],
            f"{row['body_bytes']['ours'] / 1e3:.0f}",
            f"{row['ours_p50_ms']:.2f}",
            f"{row['bare_p50_ms']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f}..{row['ratio_high']:.3f}",
            "-" if row["at_most"] is None else f"{row['at_most']:g}",
        )
    Console(width=110).print(table)


def main() -> int:
    """Measure, report, compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["256x256", "1024x1024"], help="picture sizes")
    parser.add_argument("--pairs", type=int, default=60, help="paired blocks per size")
    parser.add_argument("--block", type=int, default=8, help="requests per block")
    parser.add_argument(
        "--at-most", action="append", default=[], metavar="SIZE=RATIO", help="exit 1 when the ratio is above it"
    )
    parser.add_argument("--output-file", type=Path, help="write the report there as JSON")
    arguments = parser.parse_args()
    bars = {size: float(bar) for size, _, bar in (text.partition("=") for text in arguments.at_most)}
    if unknown := bars.keys() - set(arguments.sizes):
        parser.error(f"--at-most names sizes that are not measured: {', '.join(sorted(unknown))}")
    report = asyncio.run(measure(arguments))
    for row in report["rows"]:
        row["at_most"] = bars.get(row["size"])
    show(report)
    if arguments.output_file:
        arguments.output_file.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(row["at_most"] is not None and row["ratio"] > row["at_most"] for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
