"""The end of the demo: what happened, in numbers read back from the database."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from controller.demo.show import Phase
from storage.history import History


def print_summary(
    console: Console,
    history: History,
    pool: str,
    phases: Sequence[Phase],
    counts: tuple[int, int] | None,
    picture: Path | None,
    directory: Path,
) -> bool:
    """Print the summary; True when every phase was seen and every request was counted exactly once."""
    table = Table(
        "phase", "requests", "tokens/s", "passes/token", "touches/request", "correct", box=None, padding=(0, 2)
    )
    for p in phases:
        if not p.started:
            continue
        r = history.requests_between(pool, p.started, p.ended, by="started")
        table.add_row(
            f"{'✓' if p.ok else '✗'} ({p.key})",
            f"{r['requests']:.0f}",
            _ratio(r["tokens"], r["seconds"], "{:.0f}"),
            _ratio(r["target_passes"], r["tokens"], "{:.3f}"),
            _ratio(r["touches"], r["requests"], "{:.2f}"),
            _ratio(r["served_score_sum"], r["served_scores"], "{:.3f}"),
        )
    console.print()
    console.print("What the database says (served answers; the forks that measure quality run beside them):")
    console.print(table)
    for p in phases:
        for text in p.seen:
            console.print(f"({p.key}) {text}", markup=False, highlight=False, soft_wrap=True)
        if p.state == "waiting":
            console.print(f"({p.key}) not reached", style="red")
    policy = history.policy_revisions(pool, 10)
    console.print(
        "The policy of this demo is made for minutes: a larger max_loss, a window of seconds, every touched request "
        f"forked. {len(policy)} policy revisions are recorded.",
        highlight=False,
        soft_wrap=True,
    )
    exact = counts is not None and counts[0] == counts[1]
    if counts is not None:
        console.print(f"Requests on the stream: {counts[0]}, in the database: {counts[1]}", highlight=False)
    if picture is not None:
        console.print(f"Picture: {picture}", highlight=False, soft_wrap=True)
    console.print(f"Logs and database: {directory}", highlight=False, soft_wrap=True)
    return all(p.ok for p in phases) and exact


def _ratio(above: float, below: float, form: str) -> str:
    return form.format(above / below) if below else "-"
