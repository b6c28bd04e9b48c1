"""The picture of a sweep: throughput with the ideal line, and efficiency, over the number of replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["plot_sweep"]

_MEASURED, _IDEAL = "#1f6feb", "#8b949e"


def plot_sweep(report: dict[str, Any], path: Path) -> None:
    """Draw a sweep report into a PNG file. Raises OSError."""
    # Half a second of imports that nobody else needs.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import PercentFormatter

    rows = report["rows"]
    counts = [row["replicas"] for row in rows]
    throughput = [row["throughput_qps"] for row in rows]
    per_replica = throughput[0] / counts[0]
    figure = Figure(figsize=(11, 4.8), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08), dpi=130)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)

    ends = [0, max(counts)]
    left.plot(ends, [per_replica * count for count in ends], "--", color=_IDEAL, label="ideal (linear)")
    left.plot(counts, throughput, "o-", color=_MEASURED, label="measured")
    for count, value in zip(counts, throughput, strict=True):
        left.annotate(f"{value:#.3g}", (count, value), textcoords="offset points", xytext=(6, -13), color=_MEASURED)
    left.set(title="Throughput", xlabel="replicas", ylabel="requests per second")
    left.set_xlim(0, max(counts) * 1.12)
    left.set_ylim(0, max(per_replica * max(counts), *throughput) * 1.12 or 1)
    left.legend(loc="upper left")

    efficiency = [row["efficiency"] or 0.0 for row in rows]
    positions = range(len(counts))
    bars = right.bar(positions, efficiency, width=0.6, color=_MEASURED)
    right.bar_label(bars, [f"{value:.1%}" for value in efficiency], padding=-18, color="white")
    right.axhline(1.0, linestyle="--", color=_IDEAL)
    right.set_xticks(positions, [str(count) for count in counts])
    title = f"Efficiency (against {counts[0]} replica{'s' if counts[0] > 1 else ''})"
    right.set(title=title, xlabel="replicas", ylabel="throughput per replica")
    right.set_ylim(0, max(1.0, *efficiency) * 1.15)
    right.yaxis.set_major_formatter(PercentFormatter(1.0))

    left.set_xticks(counts)
    for axes in (left, right):
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{report['model']}: {report['num_prompts']} requests, at most {report['max_concurrency']} at a time, "
        f"{report['cpu_threads_per_replica']} CPU thread(s) per replica",
        fontsize=11,
    )
    figure.savefig(path)
