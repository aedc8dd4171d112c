"""Commands for whoever runs a pool: what is going on, why, and what was."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from controller.commands.client import ClassOption, PoolArgument, TokenFileOption, get, token_from
from controller.commands.common import DEFAULT_URL, JsonOption, UrlOption, errors, print_json
from policies.scalars import parse_duration

DAY_S = 86_400.0

LimitOption = Annotated[int, typer.Option(min=1, max=500, help="At most so many, the newest.")]
StoredOption = Annotated[
    str | None, typer.Option("--database", help="Read this database instead of asking a controller.")
]
Row = Mapping[str, Any]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the root."""
    for command in (status, why, decisions, history):
        app.command()(command)


def status(
    url: UrlOption = DEFAULT_URL,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep the table up to date until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between updates with --watch.")] = 2.0,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every pool and class of a running controller.

    Example: lenity status --watch
    """
    token = token_from(token_file)
    if as_json:
        print_json(get(url, "/v1/pools", token))
        return
    if not watch:
        Console().print(_status_table(get(url, "/v1/pools", token)))
        return
    with Live(_status_table(get(url, "/v1/pools", token)), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                live.update(_status_table(get(url, "/v1/pools", token)), refresh=True)
        except KeyboardInterrupt:
            return


def why(
    pool: PoolArgument,
    cls: ClassOption = None,
    url: UrlOption = DEFAULT_URL,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say in plain words why a pool decodes as it does, when that may change, and what to do.

    Example: lenity why chat-7b --class code
    """
    found = get(url, f"/v1/pools/{quote(pool)}/why", token_from(token_file), **{"class": cls})
    if as_json:
        print_json(found)
        return
    for i, answer in enumerate(found):
        typer.echo(("\n" if i else "") + answer["headline"])
        for sentence in answer["sentences"]:
            typer.echo(f"  {sentence}")
        if answer["returns"]:
            typer.echo(f"  Comes back: {answer['returns']}")
        if answer["advice"]:
            typer.echo(f"  What to do: {answer['advice']}")


def decisions(
    pool: PoolArgument,
    cls: ClassOption = None,
    limit: LimitOption = 20,
    changes: Annotated[
        bool,
        typer.Option("--changes/--every", help="Only where state or reason changed, or the decision of every tick."),
    ] = True,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones until Ctrl-C.")] = False,
    database: StoredOption = None,
    url: UrlOption = DEFAULT_URL,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what was decided for a pool in the last day, each with its reason; the newest first, last with --follow.

    Example: lenity decisions chat-7b --limit 5
    """
    token = token_from(token_file)

    def read(since: float | None, most: int, changes: bool) -> list[dict[str, Any]]:
        if database is None:
            query = {"class": cls, "since": since, "limit": most, "changes": changes}
            return list(get(url, f"/v1/pools/{quote(pool)}/decisions", token, **query))
        if changes:
            after = time.time() - DAY_S if since is None else since
            found = _stored(database, "decision_changes", pool, cls, after, most)
        else:
            found = _stored(database, "decisions", pool, cls, since, most)
        return [row | {"time": row["unix_time"]} for row in found]

    newest = time.time()
    rows = read(None, limit, changes)
    if follow:
        _follow(rows, newest, lambda since: read(since, 500, False), changes, as_json)
    elif as_json:
        print_json(rows)
    else:
        Console().print(_decision_table(rows))


def history(
    pool: PoolArgument,
    cls: Annotated[str, typer.Option("--class", help="Traffic class.")] = "default",
    since: Annotated[str, typer.Option(help="How far back, such as 15m, 6h or 7d.")] = "1h",
    step: Annotated[str | None, typer.Option(help="Means over steps, such as 1m; every tick by default.")] = None,
    limit: LimitOption = 60,
    database: StoredOption = None,
    url: UrlOption = DEFAULT_URL,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a class did over time: knobs, acceptance, speed, loss and budget; the newest last.

    Example: lenity history chat-7b --since 6h --step 10m
    """
    after = time.time() - _seconds(since, "--since")
    step_s = None if step is None else _seconds(step, "--step")
    if database is None:
        query = {"class": cls, "since": after, "step": step_s, "limit": limit}
        body = get(url, f"/v1/pools/{quote(pool)}/series", token_from(token_file), **query)
        times, values = body["time"], body["values"]
    else:
        from controller.api_json import columns

        points = _stored(database, "points", pool, cls, after, limit if step_s is None else 10_000)
        series = columns(pool, cls, points, after, limit, step=step_s)
        times, values = series.time, series.values
    rows = [{"time": t} | {name: column[i] for name, column in values.items()} for i, t in enumerate(times)]
    if as_json:
        print_json(rows)
    else:
        Console().print(_series_table(rows))


# -- inside ------------------------------------------------------------------------------------------------------------


def _follow(
    rows: list[dict[str, Any]], newest: float, later: Callable[[float], Any], changes: bool, as_json: bool
) -> None:
    """Print ``rows`` and then what is later, oldest first; with ``changes`` only where state or reason is another."""
    last: dict[str, tuple[str, str]] = {}
    try:
        while True:
            for row in reversed(rows):
                newest = max(newest, row["time"])
                kind = row["state"], row["reason"]
                if changes and last.get(row["traffic_class"]) == kind:
                    continue
                last[row["traffic_class"]] = kind
                if as_json:
                    print_json(row)
                else:
                    typer.echo(f"{_clock(row['time'])}  {row['traffic_class']}  {row['reason']}  {row['explanation']}")
            time.sleep(1.0)
            rows = later(newest)
    except KeyboardInterrupt:
        return


def _stored(url: str, what: str, *query: Any) -> Any:
    from storage.history import History

    with errors():
        store = History(url)
        store.check_schema()
        found = getattr(store, what)(*query)
        store.close()
    return found


def _seconds(text: str, option: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as e:
        raise typer.BadParameter(str(e), param_hint=option) from e


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


def _number(form: str, unknown: str = "-") -> Callable[[float | None], str]:
    return lambda value: unknown if value is None else form.format(value)


_TWO, _THREE, _SHARE, _SPEED = _number("{:.2f}"), _number("{:.3f}"), _number("{:.1%}"), _number("{:.2f}x")


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2))
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name in ("time", "state", "budget left", "speed"))
    return table


def _status_table(body: Row) -> Table:
    table = _table("pool", "class", "state", "g", "theta", "speed", "budget left", "explanation")
    if not body["pools"]:
        table.add_row("-", *[""] * 6, "This controller leads no pool; /readyz says why.")
    for pool in body["pools"]:
        late = body["time"] - pool["time"] > 3 * pool["interval_s"]
        for c in pool["classes"]:
            stale = f"[no tick for {body['time'] - pool['time']:.0f} s] " if late else ""
            speed = _SPEED(c["predicted_speedup_plain"]) + " plain"
            cells = (c["state"], str(c["g"]), _THREE(c["theta"]), speed, _SHARE(c["remaining"]))
            table.add_row(pool["pool"], c["traffic_class"], *cells, stale.replace("[", "\\[") + c["explanation"])
    return table


def _decision_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("time", "class", "state", "reason", "g", "theta", "explanation")
    for row in rows:
        knobs = row["lease"]["table"][0]
        cells = (row["traffic_class"], row["state"], row["reason"], str(knobs["g"]), _THREE(knobs["theta"]))
        table.add_row(_clock(row["time"]), *cells, row["explanation"])
    return table


def _series_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("time", "g", "theta", "acceptance", "speed", "loss", "at most", "budget left")
    for row in rows:
        cells = (
            _number("{:.1f}")(row.get("g")),
            _TWO(row.get("theta")),
            _SHARE(row.get("acceptance")),
            _SPEED(row.get("speedup_plain")),
            _THREE(row.get("loss")),
            _THREE(row.get("loss_upper")),
            _SHARE(row.get("remaining")),
        )
        table.add_row(_clock(row["time"]), *cells)
    return table
