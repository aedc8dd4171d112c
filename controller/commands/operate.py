"""Commands for whoever runs a pool: what is going on, and why."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from controller.commands.common import (
    DEFAULT_DATABASE,
    DEFAULT_URL,
    DatabaseOption,
    JsonOption,
    UrlOption,
    errors,
    get,
    print_json,
)


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the root."""
    for command in (status, history):
        app.command()(command)


def status(url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Show every pool and class of a running controller."""
    body = get(url, "/v1/pools")
    if as_json:
        print_json(body)
        return
    table = Table(
        "pool", "class", "state", "g", "theta", "speed", "budget left", "explanation", box=None, padding=(0, 2)
    )
    for pool in body["pools"]:
        for c in pool["classes"]:
            speed = c["predicted_speedup_plain"]
            table.add_row(
                pool["pool"],
                c["traffic_class"],
                c["state"],
                str(c["g"]),
                f"{c['theta']:.3f}",
                "-" if speed is None else f"{speed:.2f}x plain",
                f"{c['remaining']:.0%}",
                c["explanation"],
            )
    Console().print(table)


def history(
    pool: Annotated[str, typer.Argument(help="Name of the pool.")],
    database: DatabaseOption = DEFAULT_DATABASE,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show the newest decisions of a pool from the database, each with its reason."""
    from storage.history import History

    with errors():
        store = History(database)
        store.check_schema()
        rows = store.decisions(pool, limit=limit)
    if as_json:
        print_json(rows)
        return
    table = Table("time", "class", "state", "reason", "g", "theta", "explanation", box=None, padding=(0, 2))
    for row in rows:
        knobs = row["lease"]["table"][0]
        table.add_row(
            f"{row['time']:%Y-%m-%d %H:%M:%S}",
            row["traffic_class"],
            row["state"],
            row["reason"],
            str(knobs["g"]),
            f"{knobs['theta']:.3f}",
            row["explanation"],
        )
    Console().print(table)
