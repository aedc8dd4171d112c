"""`lenity policy backtest`: how a policy would have done, on stored history or on a simulated pool."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from controller.commands.client import REFUSED, fail
from controller.commands.common import DEFAULT_DATABASE, DatabaseOption, JsonOption, errors, print_json
from policies.scalars import format_duration, parse_duration

if TYPE_CHECKING:
    from controller.backtest import Outcome, Span
    from policies.model import Policy

MINUTE_AFTER_S = 2 * 3600.0  # stretches longer than this are read minute by minute, where there are minutes
SHOWN_SPANS = 10


def policy_backtest(
    file: Annotated[Path, typer.Argument(help="The policy to try.")],
    scenario: Annotated[
        Path | None, typer.Option(help="Play this scenario's pool instead of reading history.", exists=True)
    ] = None,
    since: Annotated[str, typer.Option(help="How far back in history, such as 6h or 7d.")] = "7d",
    cls: Annotated[str, typer.Option("--class", help="Traffic class.")] = "default",
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG).")] = None,
    database: DatabaseOption = DEFAULT_DATABASE,
    as_json: JsonOption = False,
) -> None:
    """Tell when a policy would have paged and pulled back, and with what speed and loss, beside what was in force.

    Examples: lenity policy backtest policies/chat.yaml --since 3d

    lenity policy backtest policies/chat.yaml --scenario tests/scenarios/sudden_regression.yaml
    """
    from policies.load import load

    with errors():
        policy = load(file).policy
        if scenario is not None:
            from controller.backtest import of_run, simulated
            from controller.simulate import load_scenario, simulate

            played = load_scenario(scenario)
            outcomes = [of_run(simulate(played), "its own policy"), simulated(played, policy, "edit")]
        else:
            outcomes = _from_history(policy, cls, since, database)
    if plot is not None:
        from controller.backtest_plot import plot_outcomes

        plot_outcomes(outcomes, plot)
    if as_json:
        print_json([asdict(outcome) for outcome in outcomes])
        return
    Console().print(_table(outcomes))
    for outcome in outcomes:
        for line in _spans(outcome, dated=scenario is None):
            typer.echo(line)
    if any(outcome.unseen > 0.01 for outcome in outcomes):
        typer.echo("Where the edit allows more touches than were served, history cannot say what they would have cost.")


def _from_history(policy: Policy, cls: str, since: str, database: str) -> list[Outcome]:
    from controller.backtest import as_it_was, replayed
    from storage.history import History
    from storage.past import observed

    try:
        span_s = parse_duration(since)
    except ValueError as e:
        raise typer.BadParameter(str(e), param_hint="--since") from e
    store, pool = History(database), policy.pool
    try:
        store.check_schema()
        newest = store.points(pool, cls, limit=1)
        if not newest:
            raise fail(f"no history of pool {pool!r}, class {cls!r}", REFUSED)
        until, begin = newest[0].time, newest[0].time - span_s
        step = 60.0 if span_s > MINUTE_AFTER_S else None
        points = store.points(pool, cls, begin, limit=10_000, step=step) or store.points(pool, cls, begin, limit=10_000)
        alerts = store.alerts(pool, cls, begin, limit=10_000)
        changes = store.decision_changes(pool, cls, begin, limit=10_000)
        decision = store.decisions(pool, cls, limit=1)
        rule = decision[0]["lease"]["rule"] if decision else policy.for_class(cls).rules[0]
        seen = observed(store, pool, cls, max(begin, points[0].time - 1), until)
        past = as_it_was(points, alerts, changes)
        tried = replayed(policy.for_class(cls), rule, seen, points, "edit")
    finally:
        store.close()
    past.requests = tried.requests
    return [past, tried]


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "requests", "pages", "used up", "pulled back", "lossless", "speed", "loss", "least left"):
        table.add_column(name, no_wrap=True)
    for o in outcomes:
        held = sum(span.end - span.begin for span in o.pulled_back)
        table.add_row(
            o.name,
            str(o.requests),
            str(len(o.pages)),
            str(len(o.exhausted)),
            f"{len(o.pulled_back)} ({format_duration(round(held))})" if o.pulled_back else "0",
            f"{o.lossless:.0%}",
            "-" if o.speed is None else f"{o.speed:.2f}x",
            "-" if o.loss is None else f"{o.loss:.2%}",
            f"{o.least_remaining:.0%}",
        )
    return table


def _spans(outcome: Outcome, *, dated: bool) -> list[str]:
    """The first pages and pull-backs of an outcome, a line each."""

    def at(seconds: float) -> str:
        if not dated:
            return format_duration(round(seconds))
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))

    spans: list[tuple[Span, str]] = [(span, "would page") for span in outcome.pages]
    spans += [(span, "budget used up") for span in outcome.exhausted]
    spans += [(span, "pulled back") for span in outcome.pulled_back]
    spans.sort(key=lambda found: found[0].begin)
    lines = [f"{outcome.name}: {at(s.begin)} to {at(s.end)} {what}: {s.detail}" for s, what in spans[:SHOWN_SPANS]]
    more = len(spans) - SHOWN_SPANS
    return [*lines, f"{outcome.name}: and {more} more; --json has all"] if more > 0 else lines
