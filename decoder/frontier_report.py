"""``lenity frontier``: runs a sweep and writes its files. Wiring only: numbers come from `decoder.frontier_table`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from decoder.demo.pair import load_pair
from decoder.demo.problems import Domain
from decoder.demo.simulation import LOSSLESS
from decoder.frontier import (
    LOG,
    Log,
    Sweep,
    checksum_of_pair,
    checksum_of_tasks,
    load_tasks,
    measure_cost_ratio,
    measurer,
    run_sweep,
    settings_of,
)
from decoder.frontier_plot import plot
from decoder.frontier_table import LOSSES, SAVINGS, Summary, summarise

INTERRUPTED = 130


def run_frontier(
    directory: Path,
    *,
    n: int,
    g: int,
    temperature: float,
    domain: Domain,
    seed: int,
    rules: Sequence[str] = (),
    knobs: Sequence[float] = (),
    cost_ratio: float | None = None,
    pair_directory: Path | None = None,
    tasks_file: Path | None = None,
    threads: int = 1,
    console: Console | None = None,
) -> int:
    """Measure what is not measured yet and write ``frontier.{csv,json,png,md}`` beside the log; returns the exit code.

    Ctrl-C stops after writing the files for what is finished (130); the same command goes on from there. Raises
    ValueError for options that cannot be, ModelError for a pair that cannot be loaded.
    """
    console = console or Console(stderr=True)
    torch.set_num_threads(threads)
    settings = settings_of(rules, knobs)
    tasks = load_tasks(tasks_file, n, domain, seed)
    sweep = Sweep(
        checksum_of_pair(pair_directory), checksum_of_tasks(tasks), n, "file" if tasks_file else domain, temperature, g,
        seed,
    )  # fmt: skip
    log = Log(directory / LOG, sweep)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    code = 0
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("loading the pair", total=len(settings))
        try:
            pair = load_pair(directory=pair_directory)
            if log.cost_ratio is None:
                progress.update(bar, description="cost of a draft step")
                log.add_cost_ratio(measure_cost_ratio(pair, tasks[:: max(1, n // 20)], g))
            measure = measurer(pair, tasks, sweep)
            run_sweep(
                log,
                settings,
                measure,
                start=lambda s: progress.update(bar, description=f"{s.rule} {s.theta:g}"),
                done=lambda _: progress.advance(bar),
            )
        except KeyboardInterrupt:
            code = INTERRUPTED
    if code:
        console.print(f"stopped with {len(log.done)} settings finished; the same command goes on from there")
    if LOSSLESS in log.done:
        for path in write_files(summarise(log, cost_ratio=cost_ratio), directory):
            console.print(f"wrote {path}")
    return code


def write_files(summary: Summary, directory: Path) -> list[Path]:
    """Write the four files of a summary and return their paths."""
    texts = {"frontier.csv": summary.to_csv(), "frontier.json": summary.to_json(), "frontier.md": tables(summary)}
    for name, text in texts.items():
        (directory / name).write_text(text)
    return [*(directory / name for name in texts), plot(summary, directory / "frontier.png")]


def tables(summary: Summary) -> str:
    """The comparisons as Markdown: who wins where, every rule at equal loss and at equal saving, published forms."""
    parts = [
        "### Which rule wins where\n\n" + winners(summary),
        "### Target passes saved within a loss\n\n"
        + matrix(summary.at_loss, "loss", LOSSES, "saved", 100, "{:g} pt or less"),
        "### Loss in points at equal saving\n\n"
        + matrix(summary.at_saving, "saved", SAVINGS, "loss", 100, "{:g}% saved"),
    ]
    if summary.against_published:
        parts.append("### Published form against its completion\n\n" + published(summary))
    return "\n\n".join(parts) + "\n"


def winners(summary: Summary) -> str:
    """One line per loss and per saving: the best completed rule of the sample, and how sure that is."""
    lines = []
    for rows, key, of, text, best in (
        (summary.at_loss, "loss", "saved", "losing at most {:g} points", max),
        (summary.at_saving, "saved", "loss", "saving {:g}% of the passes", min),
    ):
        for level in dict.fromkeys(row[key] for row in rows):
            here = [row for row in rows if row[key] == level and row["wins"] is not None]
            first = best(here, key=lambda row: row[of][0])
            others = sorted((row for row in here if row is not first), key=lambda row: -row["wins"])[:2]
            shown = ", ".join(f"`{row['rule']}` {row['wins']:.0%}" for row in others if row["wins"] >= 0.005)
            unit = "saves {}%" if of == "saved" else "loses {} points"
            when = text.format(100 * level).replace(" 1 points", " 1 point")
            lines.append((when, f"`{first['rule']}`", unit.format(_cell(first[of], 100)),
                          f"{first['wins']:.0%}", shown or "–"))  # fmt: skip
    return markdown(("when", "best rule", "what it does", "best in resamples", "others that were"), lines)


def matrix(rows: list[dict[str, Any]], key: str, levels: Sequence[float], of: str, scale: float, head: str) -> str:
    """Rules down, levels across, each cell a value with its interval."""
    cells = {(row["rule"], row[key]): _cell(row[of], scale) for row in rows}
    names = list(dict.fromkeys(row["rule"] for row in rows))
    return markdown(
        ("rule", *(head.format(100 * level) for level in levels)),
        [(f"`{name}`", *(cells.get((name, level), "–") for level in levels)) for name in names],
    )


def published(summary: Summary) -> str:
    """For each published form: acceptance bought per unit of drift, and its extra loss at equal saving."""
    extra = {(row["form"], row["saved"]): _cell(row["extra_loss"], 100) for row in summary.against_published}
    lines = []
    for form, rule in dict.fromkeys((row["form"], row["completion"]) for row in summary.against_published):
        bought = [row["gain_per_drift"] for row in summary.rows if row["rule"] == form]
        lines.append((f"`{form}`", f"`{rule}`", f"{min(bought):.2f} to {max(bought):.2f}",
                      *(extra.get((form, level), "–") for level in SAVINGS)))  # fmt: skip
    head = ("form", "against", "acceptance per drift", *(f"{100 * level:g}% saved" for level in SAVINGS))
    return markdown(head, lines)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ("---",) * len(head), *lines))


def _cell(estimate: Sequence[float], scale: float) -> str:
    value, low, high = (round(scale * x, 1) + 0.0 for x in estimate)  # no minus before a zero
    return f"{value:.1f} ({low:.1f} to {high:.1f})"
