"""How long each table is kept, and the job that removes what is older.

It removes little at a time: each transaction takes about `TARGET_S`, and between two of them the job waits as long as
the last one took, so that the loop's writer always gets its turn. It can be killed and run again at any time. What a
budget's window needs, what a snapshot holds, and what was not summed up yet is never removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, delete, literal, select, text, tuple_, update

from storage import tables
from storage.database import Database
from storage.history import History
from storage.rows import DAY, HOUR, MINUTE
from storage.tables import as_utc

TARGET_S = 0.025
_FEWEST, _MOST = 50, 5000  # rows in a transaction
_THIN_S = 300  # of each kind of decision one is kept in so many seconds


@dataclass(frozen=True)
class Ages:
    """Seconds for which rows are kept; policies and operators' actions are kept for ever.

    ``points`` are the ticks' own, ``minutes``, ``hours`` and ``days`` the rollups of points and tokens. Decisions are
    kept whole for ``all_decisions``, and then the first of each kind in every five minutes. ``evidence`` are requests,
    forks, scores and the budget's slices; it must be longer than the longest budget window.
    """

    points: float = 6 * HOUR
    minutes: float = 7 * DAY
    hours: float = 90 * DAY
    days: float = 3 * 365 * DAY
    all_decisions: float = 6 * HOUR
    decisions: float = 90 * DAY
    evidence: float = 35 * DAY
    alerts: float = 3 * 365 * DAY

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) >= HOUR:
                raise ValueError(f"age {field.name} is {getattr(self, field.name)!r} s; keep at least an hour")

    def covering(self, window_s: float) -> Ages:
        """These ages, with evidence kept for a budget window of ``window_s`` and a quarter, where it was not."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        return Ages(**kept | {"evidence": max(self.evidence, 1.25 * window_s)})


def run(
    history: History,
    ages: Ages,
    now: float,
    *,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.perf_counter,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, int]:
    """Remove what is older than its age at `now` (Unix seconds); returns removed rows by table.

    Sums up first what is finished, since only that may go. `stop` is asked between transactions; what is left is
    removed next time. Raises StorageError.
    """
    pacer = _Pacer(pause, clock, stop)
    history.roll_up(now, pause=lambda: pause(TARGET_S))
    removed: dict[str, int] = {}
    for table, column, age, step in _rules(ages):
        extra: list[Any] = [] if step is None else [table.c.step == step]
        extra += [table.c.rolled] if "rolled" in table.c else []
        with history.database.reading(f"look for old {table.name}") as connection:
            found = list(groups(connection, table))
        for group in found:
            count = _remove(history.database, table, [*group, *extra], column, as_utc(now - age), pacer)
            removed[table.name] = removed.get(table.name, 0) + count
    thinned = _thin(history.database, as_utc(now - ages.all_decisions), pacer)
    removed["decisions"] = removed.get("decisions", 0) + thinned
    return {name: count for name, count in removed.items() if count}


# Tables whose old rows are found by pool and time; those of the others by pool, class and time.
_BY_POOL = ("requests", "forks", "scores", "alerts")


def _rules(ages: Ages) -> Iterator[tuple[Table, str, float, int | None]]:
    """Table, column that says how old a row is, age in seconds, step of the rollup."""
    yield tables.points, "time", ages.points, None
    for table in (tables.point_rollups, tables.token_rollups, tables.round_rollups):
        for step, age in ((MINUTE, ages.minutes), (HOUR, ages.hours), (DAY, ages.days)):
            yield table, "time", age, step
    for table in (tables.requests, tables.forks, tables.scores):
        yield table, "received", ages.evidence, None
    yield tables.budget_slices, "start", ages.evidence, None
    yield tables.decisions, "time", ages.decisions, None
    yield tables.alerts, "time", ages.alerts, None


class _Pacer:
    """How many rows a transaction may take on, from how long the last ones took."""

    def __init__(self, pause: Callable[[float], None], clock: Callable[[], float], stop: Callable[[], bool]):
        self._pause, self._clock, self.stop = pause, clock, stop
        self.rows = 200

    def timed(self, work: Callable[[], int]) -> int:
        """Run one transaction, then wait as long as it took."""
        began = self._clock()
        count = work()
        took = self._clock() - began
        self.rows = round(min(_MOST, max(_FEWEST, self.rows * min(2.0, max(0.25, TARGET_S / max(took, 1e-6))))))
        self._pause(max(took, 0.001))
        return count


def groups(connection: Connection, table: Table) -> Iterator[list[Any]]:
    """Conditions for each pool, or pool and class, that the table has rows of; one look into the index for each."""
    columns = [table.c[name] for name in ("pool", "traffic_class")[: 1 if table.name in _BY_POOL else 2]]
    last: Sequence[Any] | None = None
    while True:
        query = select(*columns).order_by(*columns).limit(1)
        if last is not None:
            query = query.where(tuple_(*columns) > tuple_(*map(literal, last)))
        last = connection.execute(query).first()
        if last is None:
            return
        yield [column == value for column, value in zip(columns, last, strict=True)]


def _remove(database: Database, table: Table, chosen: list[Any], column: str, cutoff: datetime, pacer: _Pacer) -> int:
    """Remove the chosen rows before `cutoff`, oldest first; rows of one instant go together."""
    at, total, more = table.c[column], 0, True

    def batch() -> int:
        nonlocal more
        with database.writing(f"remove old {table.name}") as connection:
            old = [*chosen, at < cutoff]
            last = connection.execute(select(at).where(*old).order_by(at).offset(pacer.rows - 1).limit(1)).scalar()
            more = last is not None
            return connection.execute(delete(table).where(*old, *([at <= last] if more else []))).rowcount

    while more and not pacer.stop():
        total += pacer.timed(batch)
    return total


def _thin(database: Database, cutoff: datetime, pacer: _Pacer) -> int:
    """Of decisions before `cutoff` keep the first of each kind in every five minutes, and mark those."""
    total, more = 0, True

    def batch() -> int:
        nonlocal more
        with database.writing("thin old decisions") as connection:
            found = _oldest_stretch(connection, cutoff)
            more = bool(found)
            keep, drop = _first_of_each_kind(found)
            c = tables.decisions.c
            if drop:
                connection.execute(delete(tables.decisions).where(c.id.in_(drop)))
            if keep:
                connection.execute(update(tables.decisions).where(c.id.in_(keep)).values(thinned=True))
            return len(drop)

    while more and not pacer.stop():
        total += pacer.timed(batch)
    return total


def _oldest_stretch(connection: Connection, cutoff: datetime) -> Sequence[Any]:
    """The decisions of one class in one stretch that is over, thinned or not."""
    c = tables.decisions.c
    end_of_old = cutoff.timestamp() // _THIN_S * _THIN_S
    waiting: list[Any] = [text("NOT thinned"), c.time < as_utc(end_of_old)]
    oldest = connection.execute(
        select(c.pool, c.traffic_class, c.time).where(*waiting).order_by(c.pool, c.traffic_class, c.time).limit(1)
    ).first()
    if oldest is None:
        return []
    start = oldest.time.timestamp() // _THIN_S * _THIN_S
    mine = [c.pool == oldest.pool, c.traffic_class == oldest.traffic_class]
    stretch = [c.time >= as_utc(start), c.time < as_utc(start + _THIN_S)]
    columns = (c.id, c.epoch, c.policy_revision, c.state, c.reason, c.superseded, c.thinned)
    return connection.execute(select(*columns).where(*mine, *stretch).order_by(c.time, c.id)).all()


def _first_of_each_kind(found: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Ids to mark and ids to remove; a late decision never removes one that was kept before."""
    seen: set[tuple[Any, ...]] = {_kind(d) for d in found if d.thinned}
    keep: list[int] = []
    drop: list[int] = []
    for d in found:
        if d.thinned:
            continue
        (drop if _kind(d) in seen else keep).append(d.id)
        seen.add(_kind(d))
    return keep, drop


def _kind(d: Any) -> tuple[Any, ...]:
    return (d.epoch, d.policy_revision, d.state, d.reason, d.superseded)
