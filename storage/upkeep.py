"""How large a database is and how it grows, and giving its free space back."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, Table, func, inspect, select, text

from storage import tables
from storage.database import Database
from storage.errors import StorageError
from storage.retention import groups
from storage.tables import as_utc

# Tables whose oldest and newest rows are at the ends of an index, each with the column that says when a row happened.
_TIMED: dict[Table, str] = {
    tables.requests: "received",
    tables.forks: "received",
    tables.scores: "received",
    tables.decisions: "time",
    tables.points: "time",
    tables.alerts: "time",
}
# Bytes of a row with its indices, measured on SQLite (bench/history.py). What grows with traffic, and is kept longest.
_ROW_BYTES: dict[Table, int] = {tables.requests: 500, tables.forks: 230, tables.scores: 300}
DAY_S = 86400.0


@dataclass(frozen=True)
class TableSize:
    """Rows of a table (estimated on PostgreSQL), bytes with indices (None: unknown), and its oldest and newest row."""

    name: str
    rows: int
    bytes: int | None
    oldest: datetime | None
    newest: datetime | None


@dataclass(frozen=True)
class Size:
    """Bytes of the database, of these free inside it, and free on its disk (None where that cannot be known)."""

    bytes: int
    unused: int | None
    disk_free: int | None
    tables: tuple[TableSize, ...] = ()


def size(database: Database, *, details: bool = True) -> Size:
    """How large the database is; with `details` also its tables, which reads an index of each."""
    with database.reading("measure the database") as connection:
        known = set(inspect(connection).get_table_names())
        found = [_table(connection, t) for t in tables.metadata.sorted_tables if details and t.name in known]
        if not database.sqlite:
            total = connection.execute(select(func.pg_database_size(func.current_database()))).scalar_one()
            return Size(int(total), None, None, tuple(found))
        pages, free, page = (
            int(connection.execute(text(f"PRAGMA {p}")).scalar_one())
            for p in ("page_count", "freelist_count", "page_size")
        )
    path = database.path
    assert path is not None
    wal = path.with_name(path.name + "-wal")
    log = wal.stat().st_size if wal.exists() else 0
    return Size(pages * page + log, free * page, shutil.disk_usage(path.parent).free, tuple(found))


def _table(connection: Connection, table: Table) -> TableSize:
    if connection.dialect.name == "sqlite":
        rows, taken = connection.execute(select(func.count()).select_from(table)).scalar_one(), None
    else:
        sizes = "SELECT reltuples::bigint, pg_total_relation_size(oid) FROM pg_class WHERE oid = to_regclass(:name)"
        rows, taken = connection.execute(text(sizes), {"name": table.name}).one()
        if rows < 0:  # never analyzed
            rows = connection.execute(select(func.count()).select_from(table)).scalar_one()
    oldest: datetime | None = None
    newest: datetime | None = None
    if table in _TIMED:
        at = table.c[_TIMED[table]]
        for group in groups(connection, table):
            low, high = connection.execute(select(func.min(at), func.max(at)).where(*group)).one()
            oldest, newest = min(oldest or low, low), max(newest or high, high)
    return TableSize(table.name, int(rows), taken, oldest, newest)


def growth(database: Database, now: float) -> float:
    """Bytes that the last day's requests, forks and scores take: what the database grows by until their age is reached.

    Everything else has a bounded size (docs/storage.md).
    """
    total = 0
    with database.reading("count the last day's rows") as connection:
        for table, row_bytes in _ROW_BYTES.items():
            recent = table.c.received >= as_utc(now - DAY_S)
            for group in groups(connection, table):
                count = select(func.count()).select_from(table).where(*group, recent)
                total += row_bytes * int(connection.execute(count).scalar_one())
    return float(total)


def vacuum(database: Database) -> tuple[int, int]:
    """Give free space back to the disk and refresh the statistics; returns the bytes before and after.

    SQLite rewrites the whole file, for which it needs as much room again, and lets nobody else write meanwhile: stop
    the controller first, or expect it to spool. PostgreSQL makes the space reusable and blocks nobody.

    Raises StorageError when the disk has no room for the copy, or the database refuses.
    """
    before = size(database, details=False)
    if database.sqlite and before.disk_free is not None and before.disk_free < before.bytes:
        raise StorageError(
            f"{database}: needs {before.bytes / 1e6:.0f} MB of free disk for a copy, there are "
            f"{before.disk_free / 1e6:.0f} MB; make room, or remove history with shorter ages"
        )
    with database.alone(f"vacuum {database}") as connection:
        if database.sqlite:
            for statement in (
                "PRAGMA wal_checkpoint(TRUNCATE)",
                "VACUUM",
                "PRAGMA wal_checkpoint(TRUNCATE)",
                "ANALYZE",
            ):
                connection.exec_driver_sql(statement)
        else:
            connection.exec_driver_sql("SET statement_timeout = 0")
            for name in inspect(connection).get_table_names():
                if name in tables.metadata.tables:
                    connection.exec_driver_sql(f"VACUUM (ANALYZE) {name}")
    return before.bytes, size(database, details=False).bytes
