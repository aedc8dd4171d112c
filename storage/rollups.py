"""Finished minutes and points are summed into longer stretches, and read at the resolution that fits the question.

    points -> minutes, hours, days         minutes of tokens and rounds -> hours, days

A row is marked in the transaction that adds it to its hour and day, so it is added once, whenever a job is killed and
however late the row comes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, RowMapping, Select, Table, func, select, text, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from storage.database import Database
from storage.rows import DAY, HOUR, MINUTE
from storage.tables import as_utc, point_rollups, points, round_rollups, token_rollups

Kind = Literal["tokens", "rounds"]
By = Literal["position", "bucket"]

STEPS = (MINUTE, HOUR, DAY)
TABLES: dict[str, Table] = {"tokens": token_rollups, "rounds": round_rollups}
_CHUNK_S = 300  # seconds of one class that a transaction takes on: a few hundred rows, some 10 ms
_LOCK = 0x6C656E697481  # jobs of several controllers take turns


def resolution(span_s: float, rows: int, steps: Sequence[int] = STEPS) -> int:
    """The finest of `steps` (seconds) that cuts `span_s` into at most `rows` stretches; the coarsest if none does."""
    return next((step for step in steps if span_s <= rows * step), steps[-1])


def roll_up(database: Database, now: float, *, pause: Callable[[], None] = lambda: None) -> int:
    """Add what is finished and was not added before to its longer stretches; returns how many rows that were.

    Each transaction takes on five minutes of one class; `pause` is called between two of them.
    """
    done = 0
    for table, add in ((points, _add_points), (token_rollups, _add_sums), (round_rollups, _add_sums)):
        while True:
            with database.writing("sum the history up") as connection:
                taken = _take(connection, table, now)
                if taken:
                    add(connection, table, taken)
            if not taken:
                break
            done += len(taken)
            pause()
    return done


def _take(connection: Connection, table: Table, now: float) -> Sequence[RowMapping]:
    """Mark the oldest rows of some class and return them."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    c = table.c
    waiting: list[Any] = [text("NOT rolled"), c.time < as_utc(now // MINUTE * MINUTE)]
    oldest = connection.execute(
        select(c.pool, c.traffic_class, c.time).where(*waiting).order_by(c.pool, c.traffic_class, c.time).limit(1)
    ).first()
    if oldest is None:
        return []
    end = as_utc((oldest.time.timestamp() // _CHUNK_S + 1) * _CHUNK_S)
    mine = [c.pool == oldest.pool, c.traffic_class == oldest.traffic_class, c.time >= oldest.time, c.time < end]
    return connection.execute(update(table).where(*waiting, *mine).values(rolled=True).returning(*c)).mappings().all()


def _start(time: datetime, step: int) -> float:
    return time.timestamp() // step * step


def _add_sums(connection: Connection, table: Table, rows: Sequence[RowMapping]) -> None:
    """Add minutes of tokens or rounds to their hours and days."""
    keys = [c.name for c in table.primary_key if c.name not in ("step", "time")]
    sums = [c.name for c in table.c if not c.primary_key and c.name != "rolled"]
    totals: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0] * len(sums))
    for row in rows:
        for step in (HOUR, DAY):
            total = totals[step, _start(row["time"], step), *(row[name] for name in keys)]
            for i, name in enumerate(sums):
                total[i] += row[name]
    names = ("step", "time", *keys)
    values = [dict(zip(names, key, strict=True)) | dict(zip(sums, t, strict=True)) for key, t in totals.items()]
    insert = _insert(connection, table)
    added = {name: table.c[name] + insert.excluded[name] for name in sums}
    statement = insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=added)
    connection.execute(statement, [row | {"rolled": True} for row in values])


def _add_points(connection: Connection, _: Table, rows: Sequence[RowMapping]) -> None:
    """Add points of one class to their minutes, hours and days."""
    table, keys = point_rollups, ("pool", "traffic_class", "step", "time")
    sums: dict[tuple[int, float], dict[str, tuple[int, float]]] = {}
    counts: dict[tuple[int, float], int] = defaultdict(int)
    for row in rows:
        key = (MINUTE, _start(row["time"], MINUTE))
        counts[key] += 1
        minute = sums.setdefault(key, {})
        for name, value in row["values"].items():
            n, total = minute.get(name, (0, 0.0))
            minute[name] = (n + 1, total + value)
    for (_step, time), minute in list(sums.items()):
        for step in (HOUR, DAY):
            key = (step, time // step * step)
            counts[key] += counts[MINUTE, time]
            _add(sums.setdefault(key, {}), minute)
    of = {name: rows[0][name] for name in ("pool", "traffic_class")}
    c = table.c
    stretches = [(step, as_utc(time)) for step, time in sums]
    known = connection.execute(
        select(table).where(*(c[n] == v for n, v in of.items()), tuple_(c.step, c.time).in_(stretches))
    ).mappings()
    for row in known:
        key = (row["step"], row["time"].timestamp())
        counts[key] += row["count"]
        _add(sums[key], _with_counts(row))
    values = []
    for (step, time), series in sums.items():
        count = counts[step, time]
        fewer = {name: n for name, (n, _) in series.items() if n < count}
        totals = {name: float(f"{total:.9g}") for name, (_, total) in series.items()}
        stretch = {"step": step, "time": time, "count": count}
        values.append(of | stretch | {"sums": totals, "fewer": fewer or None})
    insert = _insert(connection, table)
    changed = {name: insert.excluded[name] for name in ("count", "sums", "fewer")}
    connection.execute(insert.on_conflict_do_update(index_elements=list(keys), set_=changed), values)


def _add(into: dict[str, tuple[int, float]], series: Mapping[str, tuple[int, float]]) -> None:
    for name, (n, total) in series.items():
        before = into.get(name, (0, 0.0))
        into[name] = (before[0] + n, before[1] + total)


def _with_counts(row: RowMapping) -> dict[str, tuple[int, float]]:
    fewer = row["fewer"] or {}
    return {name: (fewer.get(name, row["count"]), total) for name, total in row["sums"].items()}


def _insert(connection: Connection, table: Table) -> Any:
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


# -- readers -----------------------------------------------------------------------------------------------------------


def means(rows: Iterable[RowMapping], ticks: Iterable[RowMapping], step: int) -> dict[float, dict[str, float]]:
    """By the start of each stretch of `step` seconds, the mean of each series over the points that have it.

    `rows` are those of `point_rollups` and `ticks` the points that no job has added to them yet.
    """
    sums = {row["time"].timestamp(): _with_counts(row) for row in rows}
    for tick in ticks:
        fresh = {name: (1, value) for name, value in tick["values"].items()}
        _add(sums.setdefault(_start(tick["time"], step), {}), fresh)
    return {time: {name: total / n for name, (n, total) in series.items()} for time, series in sorted(sums.items())}


def select_unrolled(pool: str, cls: str, since: float | datetime | None, until: float | datetime | None) -> Select[Any]:
    """Points of one class with `since` < time <= `until` that are in no stretch yet, newest first."""
    return select_points(pool, cls, None, since, until).where(text("NOT rolled"))


def select_points(
    pool: str, cls: str, step: int | None, since: float | datetime | None, until: float | datetime | None
) -> Select[Any]:
    """Points of one class, or stretches of `step` seconds of them, with `since` < time <= `until`, newest first."""
    table = points if step is None else point_rollups
    c = table.c
    chosen = [c.pool == pool, c.traffic_class == cls, *([] if step is None else [c.step == step])]
    chosen += [] if since is None else [c.time > as_utc(since)]
    chosen += [] if until is None else [c.time <= as_utc(until)]
    return select(table).where(*chosen).order_by(c.time.desc())


def select_sums(
    kind: Kind,
    pool: str,
    cls: str,
    since: float | datetime,
    until: float | datetime,
    step: int,
    by: Iterable[By] = (),
) -> Select[Any]:
    """Sums of one class with `since` <= time < `until` for each stretch of `step` seconds and each value of `by`,
    newest first; ValueError for a `by` that `kind` does not have."""
    table = TABLES[kind]
    c = table.c
    names = tuple(by)
    if unknown := [n for n in names if n not in ("position", "bucket") or n not in c]:
        raise ValueError(f"{kind} are not counted by {', '.join(unknown)}")
    sums = [func.sum(column).label(column.name) for column in c if not column.primary_key and column.name != "rolled"]
    chosen = (c.pool == pool, c.traffic_class == cls, c.step == step, c.time >= as_utc(since), c.time < as_utc(until))
    groups = [c.time, *(c[name] for name in names)]
    return (
        select(*groups, *sums)
        .where(*chosen)
        .group_by(*groups)
        .order_by(c.time.desc(), *(group.desc() for group in groups[1:]))
    )
