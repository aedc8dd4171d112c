"""One picture of a sweep: what each rule loses for the target passes that it saves, a panel per completed rule.

The other completed rules stand behind each panel in grey, so that any two can be compared; published forms are drawn
with the rule that completes them. Bars are 95% intervals, of the loss (paired with lossless) and of the passes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

from decoder.demo.simulation import LOSSLESS
from decoder.frontier_table import Summary
from policies.published import get_form

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

INK, GREY, BLUE, ORANGE, GREEN = "#1b1f24", "#c9ced6", "#2563a8", "#c2611f", "#2e7d4f"
FORM_STYLES = ((ORANGE, "s"), (GREEN, "D"))
COLUMNS = 3
LINEAR = 4  # points; beyond, the scale of losses is logarithmic
TICKS = (2, 0, -2, -4, -8, -16, -32, -64)


def plot(summary: Summary, path: Path) -> Path:
    """Write the picture as PNG and return its path."""
    plain = next(row for row in summary.rows if row["rule"] == LOSSLESS.rule)
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in summary.rows:
        if row["rule"] != LOSSLESS.rule and row["rho"] == 1:
            curves.setdefault(row["rule"], [plain]).append(row)
    for rows in curves.values():
        rows.sort(key=lambda row: -row["passes_per_token"][0])
    panels = list(dict.fromkeys(curves[name][-1]["completion"] for name in curves)) or [LOSSLESS.rule]
    wide = min(COLUMNS, len(panels))
    high = -(-len(panels) // wide)
    figure, axes = plt.subplots(
        high,
        wide,
        figsize=(3.9 * wide, 2.75 * high + 0.8),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, name in zip(axes.flat, panels, strict=False):
        for other, rows in curves.items():
            if get_form(other).completed and other != name:
                axis.plot(*_means(rows), color=GREY, linewidth=0.9, zorder=1)
        if name in curves:
            _curve(axis, curves[name], BLUE, "o", "completed", knobs=True)
        forms = [other for other, rows in curves.items() if other != name and rows[-1]["completion"] == name]
        for form, (colour, marker) in zip(forms, FORM_STYLES * len(forms), strict=False):
            _curve(axis, curves[form], colour, marker, form, knobs=False)
        axis.plot(plain["passes_per_token"][0], 0, marker="*", color=INK, markersize=9, zorder=5, linestyle="none")
        axis.set_yscale("symlog", linthresh=LINEAR)
        axis.set_yticks(TICKS, [f"{tick:+d}" if tick else "0" for tick in TICKS])
        axis.minorticks_off()
        axis.set_title(name, fontsize=10, color=INK, loc="left", fontweight="bold")
        axis.axhline(0, color=INK, linewidth=0.6, zorder=0)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        if forms:
            axis.legend(loc="lower left", fontsize=7.5, facecolor="white", edgecolor="none", framealpha=0.85)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    axes[0, 0].invert_xaxis()  # shared: to the right is faster
    figure.supxlabel("target passes per token  (to the right: fewer, faster)", fontsize=9, color=INK)
    figure.supylabel("exact match against lossless, points", fontsize=9, color=INK)
    figure.suptitle(_title(summary, plain), fontsize=9.5, color=INK)
    figure.savefig(path, dpi=110, pil_kwargs={"optimize": True})
    plt.close(figure)
    return path


def _title(summary: Summary, plain: dict[str, Any]) -> str:
    sweep = summary.sweep
    return (
        f"{sweep.n} tasks a point ({sweep.domain}), temperature {sweep.temperature:g}, blocks of {sweep.g}. "
        f"Star: lossless, exact match {100 * plain['exact'][0]:.1f}%, "
        f"{plain['passes_per_token'][0]:.3f} target passes per token. Labels: theta. Bars: 95% intervals"
    )


def _means(rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [row["passes_per_token"][0] for row in rows], [-100 * row["loss"][0] + 0.0 for row in rows]


def _curve(axis: Axes, rows: list[dict[str, Any]], colour: str, marker: str, label: str, *, knobs: bool) -> None:
    x, y = _means(rows)
    points = [row for row in rows if row["rule"] != LOSSLESS.rule]
    passes, loss = ([row[key] for row in points] for key in ("passes_per_token", "loss"))
    xerr = [[abs(value[0] - value[i]) for value in passes] for i in (1, 2)]
    # The loss is drawn with its sign turned, so its upper end is the lower bar.
    yerr = [[100 * abs(value[0] - value[i]) for value in loss] for i in (2, 1)]
    line = "-" if knobs else "--"
    axis.plot(x, y, color=colour, linewidth=1.5, linestyle=line, zorder=3)
    axis.errorbar(
        *_means(points),
        yerr,
        xerr,
        color=colour,
        linestyle="none",
        marker=marker,
        markersize=3.6 if knobs else 3,
        linewidth=0.8,
        label=label,
        zorder=4,
    )
    if knobs:
        for row, px, py in zip(points, *_means(points), strict=True):
            axis.annotate(f"{row['theta']:g}", (px, py), (3, 4), textcoords="offset points", fontsize=6.5, color=colour)
