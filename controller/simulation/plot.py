"""One picture of a simulated run: block length, knob, speed, budget and true loss over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np

from controller.simulation.judge import values_of

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

if TYPE_CHECKING:
    from controller.simulate import Run

INK, BLUE, ORANGE, GREEN, RED = "#1b1f24", "#2563a8", "#c2611f", "#2e7d4f", "#b3261e"

Line = tuple[str, str, str]  # quantity, label, colour
PANELS: tuple[tuple[str, tuple[Line, ...]], ...] = (
    ("block length, rows", (("g", "g", BLUE), ("rows", "rows", ORANGE))),
    ("knob", (("theta", "theta (leniency)", BLUE),)),
    ("speed over plain", (("speed", "truth", BLUE),)),
    ("acceptance", (("true_acceptance", "truth", GREEN), ("acceptance", "estimate", BLUE))),
    ("error budget left", (("remaining", "left", GREEN),)),
    ("true loss", (("window_loss", "per request, over the window", RED), ("max_loss", "allowed", INK))),
)
_STEPS = ("g", "rows", "theta", "max_loss")


def plot_run(run: Run, path: Path) -> None:
    """Write the picture of ``run`` to ``path`` (PNG)."""
    hours = run.series["time"] / 3600
    figure, axes = plt.subplots(len(PANELS), 1, figsize=(10, 11), sharex=True, layout="constrained")
    for axis, (title, lines) in zip(axes, PANELS, strict=True):
        for name, label, colour in lines:
            values = values_of(run.series, name).astype(float)
            if name in ("remaining",):
                values = np.maximum(values, 0.0)
            style = {"drawstyle": "steps-post"} if name in _STEPS else {}
            axis.plot(hours, values, color=colour, label=label, linewidth=1.3, **style)
        _tidy(axis, title, legend=len(lines) > 1)
    axes[2].axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    for axis in axes:
        for began, ended in run.alert_times:
            axis.axvspan(began / 3600, ended / 3600, color=RED, alpha=0.08, linewidth=0)
    axes[-1].set_xlabel("hours", fontsize=9)
    failed = sum(not v.passed for v in run.verdicts)
    outcome = "all checks hold" if not failed else f"{failed} of {len(run.verdicts)} checks fail"
    figure.suptitle(f"{run.scenario.name}: {run.scenario.about} ({outcome})", fontsize=10, color=INK, wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _tidy(axis: Axes, title: str, *, legend: bool) -> None:
    axis.set_ylabel(title, fontsize=9, color=INK)
    axis.grid(axis="y", alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
    axis.set_ylim(bottom=0)
    if legend:
        axis.legend(loc="upper left", fontsize=8, frameon=False, ncols=2)
