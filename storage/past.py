"""What was observed of one class, read back in the order in which it came."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any

from sqlalchemy import Table, select, tuple_

from storage import tables
from storage.history import History
from storage.records import ForkRecord, QualityScore, RequestRecord

CHUNK_ROWS = 2_000

Observed = RequestRecord | ForkRecord | QualityScore
_KINDS: tuple[tuple[Table, type[Observed]], ...] = (
    (tables.requests, RequestRecord),
    (tables.forks, ForkRecord),
    (tables.scores, QualityScore),
)


def observed(
    history: History, pool: str, cls: str, since: float, until: float
) -> Iterator[tuple[float, RequestRecord | ForkRecord | QualityScore]]:
    """Requests, forks and scores of a class with ``since`` < time received <= ``until``, each with that time.

    Times are Unix seconds. At one time requests come first, as they do in the loop. Read in chunks, so that memory does
    not grow with the stretch.
    """
    streams = [_rows(history, table, kind, (pool, cls), since, until) for table, kind in _KINDS]
    for received, _, record in heapq.merge(*streams, key=lambda found: found[:2]):
        yield received, record


def _rows(
    history: History, table: Table, kind: type[Observed], of: tuple[str, str], since: float, until: float
) -> Iterator[tuple[float, int, Observed]]:
    order, names = _KINDS.index((table, kind)), [f.name for f in fields(kind)]
    key = [table.c[c.name] for c in table.primary_key.columns if c.name != "pool"]
    start, end = tables.as_utc(since), tables.as_utc(until)
    query = select(table).where(table.c.pool == of[0], table.c.traffic_class == of[1], table.c.received <= end)
    query = query.order_by(table.c.received, *key).limit(CHUNK_ROWS)
    last: Mapping[str, Any] | None = None
    while True:
        if last is None:
            page = query.where(table.c.received > start)
        else:
            columns = [table.c.received, *key]
            page = query.where(tuple_(*columns) > tuple_(*[last[c.name] for c in columns]))
        with history.database.reading("read what was observed") as connection:
            rows = connection.execute(page).mappings().all()
        for row in rows:
            yield row["received"].timestamp(), order, kind(**{name: _plain(row[name]) for name in names})
        if len(rows) < CHUNK_ROWS:
            return
        last = dict(rows[-1])


def _plain(value: Any) -> Any:
    return value.timestamp() if isinstance(value, datetime) else value
