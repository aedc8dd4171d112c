"""One picture of a run, from the database."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from controller.demo.show import Phase
from storage.history import History, Point

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

INK, BLUE, ORANGE, GREEN, RED = "#1b1f24", "#2563a8", "#c2611f", "#2e7d4f", "#b3261e"

Line = tuple[str, str, str]  # key of the point's values, label, colour
PANELS: tuple[tuple[str, tuple[Line, ...]], ...] = (
    ("touches per request", (("tau_allowed", "allowed", BLUE), ("touches_per_request", "seen", ORANGE))),
    ("knobs", (("theta", "theta (leniency)", BLUE), ("g", "g / 10 (block length)", GREEN))),
    (
        "acceptance and answers",
        (
            ("acceptance", "acceptance rate", BLUE),
            ("quality_lossless", "correct, lossless", GREEN),
            ("quality_lenient", "correct, lenient", ORANGE),
        ),
    ),
    ("error budget", (("remaining", "left", GREEN),)),
    ("tokens per second", (("tokens_per_second", "measured in the rounds", BLUE),)),
)


def plot_run(history: History, pool: str, phases: Sequence[Phase], started: float, path: Path) -> Path | None:
    """Write the picture of everything since `started`; None when the database has no points yet."""
    points = history.points(pool, "default", started, 5000)
    if not points:
        return None
    figure, axes = plt.subplots(len(PANELS), 1, figsize=(10, 9.5), sharex=True, layout="constrained")
    for axis, (title, lines) in zip(axes, PANELS, strict=True):
        for key, label, colour in lines:
            times, values = _column(points, key, started)
            scaled = [v / 10 for v in values] if key == "g" else values
            if key == "remaining":
                scaled = [max(v, 0.0) for v in scaled]
            step = {"drawstyle": "steps-post"} if key in ("g", "theta", "tau_allowed") else {}
            axis.plot(times, scaled, color=colour, label=label, linewidth=1.6, **step)
        axis.set_ylabel(title, fontsize=9, color=INK)
        axis.grid(axis="y", alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.set_ylim(0, 1.3 * max(0.1, axis.get_ylim()[1]))
        axis.set_xlim(left=0)
        if len(lines) > 1:
            axis.legend(loc="upper left", fontsize=8, frameon=False, ncols=len(lines))
        _mark(axis, phases, started)
    _firing(axes[3], history, pool, started)
    for phase in phases:
        if phase.started:
            axes[0].text(
                phase.started - started + 1, 1.02, f"({phase.key})", transform=axes[0].get_xaxis_transform(), fontsize=9
            )
    axes[-1].set_xlabel("seconds since the start", fontsize=9)
    names = {
        "a": "lossless baseline",
        "b": "leniency opens",
        "c": "traffic shifts",
        "d": "regression",
        "e": "recovery",
        "f": "policy edit",
        "g": "crash, takeover",
    }
    figure.suptitle("   ".join(f"({p.key}) {names[p.key]}" for p in phases if p.started), fontsize=9, color=INK)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _column(points: Sequence[Point], key: str, started: float) -> tuple[list[float], list[float]]:
    """Times and values of one column; a gap of more than three seconds breaks the line."""
    times: list[float] = []
    values: list[float] = []
    for point in points:
        if key in point.values:
            t = point.time - started
            if times and t - times[-1] > 3.0:
                times.append(times[-1])
                values.append(float("nan"))
            times.append(t)
            values.append(point.values[key])
    return times, values


def _mark(axis: Axes, phases: Sequence[Phase], started: float) -> None:
    for i, phase in enumerate(phases):
        if phase.started and i % 2:
            axis.axvspan(phase.started - started, phase.ended - started, color="#000000", alpha=0.045, linewidth=0)


def _firing(axis: Axes, history: History, pool: str, started: float) -> None:
    """Mark the moments at which an alert started."""
    for alert in history.alerts(pool, "default", started, 100):
        if alert.firing:
            axis.axvline(alert.time - started, color=RED, linewidth=1.2, linestyle=":")
            axis.text(
                alert.time - started + 0.5,
                0.05,
                alert.name,
                color=RED,
                fontsize=7,
                transform=axis.get_xaxis_transform(),
            )
