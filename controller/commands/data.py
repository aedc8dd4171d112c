"""`lenity db`, `lenity export` and `lenity doctor`: look after what outlives a process."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from controller.commands.common import (
    DEFAULT_DATABASE,
    DEFAULT_URL,
    DatabaseOption,
    JsonOption,
    RedisOption,
    UrlOption,
    errors,
    print_json,
)
from policies.scalars import parse_duration

db_app = typer.Typer(no_args_is_help=True, help="Look after the history database.")

_INSTANT = "2026-03-08T13:30:45-08:00, Unix seconds, or how long ago: 7d, 1h30m"
InstantOption = Annotated[str | None, typer.Option(help=f"{_INSTANT}.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the root."""
    app.add_typer(db_app, name="db")
    app.command()(export)
    app.command()(doctor)


@db_app.command("upgrade")
def db_upgrade(database: DatabaseOption = DEFAULT_DATABASE) -> None:
    """Bring the database's schema up to this version."""
    from storage.history import History

    with errors():
        store = History(database)
        store.upgrade()
        typer.echo(f"{database.partition('://')[0]}: {store.schema_status()}")


@db_app.command("status")
def db_status(database: DatabaseOption = DEFAULT_DATABASE, as_json: JsonOption = False) -> None:
    """Say which schema the database has and which one this version needs, and how large its tables are."""
    from storage import upkeep
    from storage.history import History

    with errors():
        store = History(database)
        status = store.schema_status()
        size = upkeep.size(store.database)
        grows = upkeep.growth(store.database, time.time()) if status.state == "current" else None
    if as_json:
        tables = [vars(t) for t in size.tables]
        print_json(vars(status) | {"bytes": size.bytes, "unused": size.unused, "grows": grows, "tables": tables})
        return
    typer.echo(str(status))
    typer.echo(f"{_mb(size.bytes)}, {_mb(size.unused)} unused, requests of the last day {_mb(grows)}")
    shown = Table("table", "rows", "MB", "oldest", "newest", box=None, padding=(0, 2))
    for t in size.tables:
        ends = [f"{at:%Y-%m-%d %H:%M}" if at else "-" for at in (t.oldest, t.newest)]
        shown.add_row(t.name, f"{t.rows:,}", "-" if t.bytes is None else f"{t.bytes / 1e6:.1f}", *ends)
    Console().print(shown)


def _mb(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e6:.1f} MB"


@db_app.command("vacuum")
def db_vacuum(database: DatabaseOption = DEFAULT_DATABASE) -> None:
    """Give unused space back to the disk and refresh the statistics.

    A SQLite file is rewritten: stop the controller first. On PostgreSQL nothing has to stop.
    """
    from storage import upkeep
    from storage.history import History

    with errors():
        store = History(database)
        store.check_schema()
        before, after = upkeep.vacuum(store.database)
        typer.echo(f"{_mb(before)} before, {_mb(after)} after")


def export(
    tables: Annotated[list[str], typer.Argument(metavar="TABLE...", help="requests, scores, decisions, …, or all.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="A file, or with several tables a directory; - is standard output.")
    ] = Path("-"),
    form: Annotated[
        str | None, typer.Option("--format", help="csv or parquet; by default as the file's name ends, else csv.")
    ] = None,
    pool: Annotated[str | None, typer.Option(help="One pool; all of them by default.")] = None,
    since: InstantOption = None,
    until: InstantOption = None,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Write tables of the history to CSV or Parquet files.

    Example: lenity export requests scores --pool chat-7b --since 7d --out export --format parquet
    """
    from storage.export import TABLES
    from storage.export import export as write
    from storage.history import History

    names = list(TABLES) if tables == ["all"] else tables
    if unknown := [name for name in names if name not in TABLES]:
        raise typer.BadParameter(f"{', '.join(unknown)}: no such table; there are {', '.join(TABLES)}, and all")
    kind = form or ("parquet" if out.suffix == ".parquet" else "csv")
    if kind not in ("csv", "parquet"):
        raise typer.BadParameter(f"{kind!r} is neither csv nor parquet", param_hint="--format")
    to_screen = str(out) == "-"
    if to_screen and len(names) > 1:
        raise typer.BadParameter("several tables need a directory", param_hint="--out")
    now = time.time()
    chosen: dict[str, Any] = {"pool": pool, "since": _instant(since, now), "until": _instant(until, now)}
    with errors():
        store = History(database)
        store.check_schema()
        for name in names:
            target = out if len(names) == 1 else out / f"{name}.{kind}"
            sink = sys.stdout.buffer if to_screen else target
            count = write(store, name, sink, kind, **chosen, progress=_progress(name))  # type: ignore[arg-type]
            typer.echo(f"{name}: {count:,} rows" + ("" if to_screen else f" in {target}"), err=True)


def _progress(name: str) -> Any:
    """Rows so far on one line of a terminal; nothing in a log."""
    if not sys.stderr.isatty():
        return lambda _: None
    return lambda count: typer.echo(f"\r{name}: {count:,} rows\r", nl=False, err=True)


def _instant(value: str | None, now: float) -> float | datetime | None:
    """The instant that an option names."""
    if value is None:
        return None
    for read in (float, lambda text: now - parse_duration(text)):
        with contextlib.suppress(ValueError):
            return read(value)
    try:
        instant = datetime.fromisoformat(value)
    except ValueError as e:
        raise typer.BadParameter(f"{value!r} is no time; write {_INSTANT}") from e
    if instant.tzinfo is None:
        raise typer.BadParameter(f"{value!r} has no zone, so it could be any of 24 instants; add Z or an offset")
    return instant


def doctor(
    policy: Annotated[list[Path] | None, typer.Option(help="Policy file or directory; repeat for several.")] = None,
    redis_url: RedisOption = "redis://127.0.0.1:6379/0",
    database: DatabaseOption = DEFAULT_DATABASE,
    url: UrlOption = DEFAULT_URL,
    spool: Annotated[Path | None, typer.Option(help="The controller's spool; beside the database by default.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as failures.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check stream server, database, clocks, leadership, policies, disk and controller, and say what to fix.

    Changes nothing. Exit code 0 when nothing failed, 1 otherwise.
    """
    from controller.doctor import Patient, examine

    bad = {"fail", "warn"} if strict else {"fail"}
    findings = []
    for finding in examine(Patient(redis_url, database, tuple(policy or ()), url, spool)):
        findings.append(finding)
        if not as_json:
            typer.echo(f"{finding.status:<4}  {finding.check}: {finding.detail}")
            if finding.fix:
                typer.echo(f"      -> {finding.fix}")
    if as_json:
        sys.stdout.write(json.dumps([vars(f) for f in findings]) + "\n")
    raise typer.Exit(int(any(f.status in bad for f in findings)))
