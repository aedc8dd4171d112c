"""Tables as files: CSV for everybody, Parquet with the `parquet` extra (pyarrow).

Rows are read and written a few thousand at a time, so that memory does not grow with the history. Times are UTC, to the
microsecond: ISO 8601 in CSV, timestamps in Parquet. Columns of JSON stay JSON text. A file appears when it is whole.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from sqlalchemy import BigInteger, Boolean, Double, Select, Table, select

from storage import tables
from storage.errors import StorageError
from storage.history import History
from storage.tables import Json, UtcTime, as_utc

Format = Literal["csv", "parquet"]
CHUNK_ROWS = 5_000

# What can be exported, each with the column that says when a row happened.
TABLES: Mapping[str, tuple[Table, str]] = {
    "requests": (tables.requests, "received"),
    "scores": (tables.scores, "received"),
    "forks": (tables.forks, "received"),
    "decisions": (tables.decisions, "time"),
    "points": (tables.points, "time"),
    "point_rollups": (tables.point_rollups, "time"),
    "token_rollups": (tables.token_rollups, "time"),
    "round_rollups": (tables.round_rollups, "time"),
    "budget_slices": (tables.budget_slices, "start"),
    "alerts": (tables.alerts, "time"),
    "operator_actions": (tables.operator_actions, "time"),
    "policy_revisions": (tables.policy_revisions, "time"),
}
_MARKS = ("rolled", "thinned")  # what jobs have dealt with; nothing that was observed


class Sink(Protocol):
    """Takes rows, a few thousand at a time."""

    def write(self, rows: Sequence[Sequence[Any]]) -> None: ...


def export(
    history: History,
    name: str,
    out: Path | IO[bytes],
    form: Format = "csv",
    *,
    pool: str | None = None,
    since: float | datetime | None = None,
    until: float | datetime | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Write the rows of a table of `TABLES`, oldest first by pool, with `since` <= time < `until`; returns how many.

    Args:
        out: a file, which is replaced when the new one is whole, or an open binary stream.
        progress: called with the number of rows so far after each chunk.

    Raises:
        StorageError: the database cannot be read, the file cannot be written, or pyarrow is not installed.
    """
    columns = [c for c in TABLES[name][0].c if c.name not in _MARKS]
    query = _query(name, pool, since, until)
    count = 0
    try:
        with ExitStack() as stack:
            stream = stack.enter_context(_replacing(out)) if isinstance(out, Path) else out
            sink = stack.enter_context(_SINKS[form](stream, columns))
            for rows in stack.enter_context(closing(_chunks(history, query))):
                sink.write(rows)
                count += len(rows)
                progress(count)
    except OSError as e:
        raise StorageError(f"{out}: {e.strerror or e}") from e
    return count


def _query(name: str, pool: str | None, since: float | datetime | None, until: float | datetime | None) -> Select[Any]:
    table, at = TABLES[name]
    when = table.c[at]
    chosen = [] if pool is None else [table.c.pool == pool]
    chosen += [] if since is None else [when >= as_utc(since)]
    chosen += [] if until is None else [when < as_utc(until)]
    by_class = [table.c.traffic_class] if name in ("points", "point_rollups", "token_rollups", "round_rollups") else []
    step = [table.c.step] if "step" in table.c else []
    order = [table.c.pool, *by_class, *step, when, *(c for c in table.primary_key if c.name == "id")]
    return select(*(c for c in table.c if c.name not in _MARKS)).where(*chosen).order_by(*order)


def _chunks(history: History, query: Select[Any]) -> Generator[Sequence[Sequence[Any]], None, None]:
    with history.database.reading("export the history") as connection:
        streaming = connection.execution_options(stream_results=True, max_row_buffer=CHUNK_ROWS)
        with streaming.execute(query) as result:
            yield from result.partitions(CHUNK_ROWS)


class _replacing(AbstractContextManager[IO[bytes]]):
    """Write beside `path`, and take its place at the end unless something went wrong."""

    def __init__(self, path: Path):
        self._path, self._part = path, path.with_name(path.name + ".part")

    def __enter__(self) -> IO[bytes]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._part.open("wb")
        return self._file

    def __exit__(self, kind: object, *_: object) -> None:
        self._file.close()
        if kind is None:
            self._part.replace(self._path)
        else:
            self._part.unlink(missing_ok=True)


class _Csv(AbstractContextManager["_Csv"]):
    """RFC 4180 with a header; an unknown value is an empty field, a flag `true` or `false`."""

    def __init__(self, stream: IO[bytes], columns: Sequence[Any]):
        self._stream = stream
        self._lines = csv.writer(_Encoded(stream), lineterminator="\r\n")
        self._lines.writerow([c.name for c in columns])

    def write(self, rows: Sequence[Sequence[Any]]) -> None:
        self._lines.writerows([_plain(value) for value in row] for row in rows)

    def __exit__(self, *_: object) -> None:
        self._stream.flush()


class _Encoded:
    """The text side of a binary stream, for the csv module."""

    def __init__(self, stream: IO[bytes]):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text.encode())


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds").replace("+00:00", "Z")
    if isinstance(value, bool):
        return str(value).lower()
    return _json(value)


def _json(value: Any) -> Any:
    return json.dumps(value, separators=(",", ":")) if isinstance(value, dict | list) else value


class _Parquet(AbstractContextManager["_Parquet"]):
    """One row group a chunk, compressed."""

    def __init__(self, stream: IO[bytes], columns: Sequence[Any]):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as e:
            raise StorageError("Parquet needs pyarrow; install it with: pip install 'lenity[parquet]'") from e
        kinds = {BigInteger: pyarrow.int64(), Double: pyarrow.float64(), Boolean: pyarrow.bool_()}
        kinds |= {UtcTime: pyarrow.timestamp("us", "UTC"), Json: pyarrow.string()}
        self._arrow = pyarrow
        self._schema = pyarrow.schema([(c.name, kinds.get(type(c.type), pyarrow.string())) for c in columns])
        self._writer = pyarrow.parquet.ParquetWriter(stream, self._schema, compression="zstd")

    def write(self, rows: Sequence[Sequence[Any]]) -> None:
        columns = zip(*rows, strict=True)
        arrays = [
            self._arrow.array([_json(value) for value in column], field.type)
            for column, field in zip(columns, self._schema, strict=True)
        ]
        self._writer.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))

    def __exit__(self, *_: object) -> None:
        self._writer.close()


_SINKS: Mapping[str, Callable[[IO[bytes], Sequence[Any]], Any]] = {"csv": _Csv, "parquet": _Parquet}
