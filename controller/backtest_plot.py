"""A picture of backtested policies: budget left, touches allowed, and when each would have paged or pulled back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from controller.backtest import Outcome

COLOURS = ("#2563a8", "#c2611f", "#2e7d4f", "#b3261e")
PANELS = (("remaining", "budget left"), ("touches", "touches per request"), ("burn", "burn"), ("loss", "true loss"))


def plot_outcomes(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the picture to ``path`` (PNG)."""
    panels = [(key, title) for key, title in PANELS if any(key in o.series for o in outcomes)]
    figure, axes = plt.subplots(len(panels), 1, figsize=(10, 2.6 * len(panels)), sharex=True, layout="constrained")
    for axis, (key, title) in zip(axes, panels, strict=True):
        for outcome, colour in zip(outcomes, COLOURS, strict=False):
            hours = [(t - outcomes[0].begin) / 3600 for t in outcome.series["time"]]
            if key in outcome.series:
                values = [max(-0.5, v) for v in outcome.series[key]]
                axis.plot(hours, values, color=colour, linewidth=1.3, label=outcome.name)
            for span in outcome.pages if key == "remaining" else ():
                begin, end = ((t - outcomes[0].begin) / 3600 for t in (span.begin, span.end))
                axis.axvspan(begin, end, color=colour, alpha=0.15, linewidth=0)
        axis.set_title(title, fontsize=9, loc="left")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, frameon=False)
    axes[-1].set_xlabel("hours", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
