"""One SQLAlchemy engine for SQLite and PostgreSQL, and what goes wrong with it.

SQLite runs in WAL mode with every commit on disk, and a transaction that writes takes the write lock when it begins
(`BEGIN IMMEDIATE`), so that what it read cannot have changed when it writes. Readers never wait for the writer.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from storage.errors import RecordRefused, StorageError

BUSY_TIMEOUT_S = 5
LONGEST_PAUSE_S = 3.0  # between two statements of a transaction that writes: less than any heartbeat lasts by default
_POSTGRES_SETTINGS = {"timezone": "UTC", "statement_timeout": "15s", "lock_timeout": "5s"}


class Database:
    """An engine with `reading` and `writing` transactions; connects on first use. Safe for several threads."""

    def __init__(self, url: str):
        self.url = _parse(url)
        self.sqlite = self.url.get_backend_name() == "sqlite"
        try:
            self._engine = self._sqlite_engine() if self.sqlite else self._postgres_engine()
        except (ImportError, NoSuchModuleError) as e:
            raise StorageError(f"{self}: {e}; install it with: pip install 'lenity[postgres]'") from e
        except (SQLAlchemyError, OSError) as e:
            raise StorageError(f"{self}: {_reason(e)}") from e
        self._writer = self._engine.execution_options(immediate=True)

    def __str__(self) -> str:
        return self.url.render_as_string(hide_password=True)

    @property
    def path(self) -> Path | None:
        """The file of a SQLite database."""
        return Path(self.url.database or "").absolute() if self.sqlite else None

    @contextmanager
    def reading(self, what: str) -> Iterator[Connection]:
        """A transaction that sees one state of the database. Database errors leave it as StorageError."""
        with guard(what), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self, what: str) -> Iterator[Connection]:
        """A transaction that is committed as a whole or not at all. Database errors leave it as StorageError."""
        with guard(what), self._writer.begin() as connection:
            yield connection

    @contextmanager
    def alone(self, what: str) -> Iterator[Connection]:
        """A connection outside any transaction, for what databases do only there; each statement is its own."""
        options = {"alone": True} if self.sqlite else {"isolation_level": "AUTOCOMMIT"}
        with guard(what), self._engine.execution_options(**options).connect() as connection:
            yield connection

    def close(self) -> None:
        """Close the connections; the next use opens new ones."""
        self._engine.dispose()

    def _sqlite_engine(self) -> Engine:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(self.url, connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False})

        @event.listens_for(engine, "connect")
        def configure(connection: Any, _record: Any) -> None:
            connection.isolation_level = None  # the driver begins nothing by itself; `begin` below does
            _turn_to_wal(connection)
            for setting in ("synchronous = FULL", "journal_size_limit = 67108864"):
                connection.execute(f"PRAGMA {setting}")

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            options = connection.get_execution_options()
            if options.get("immediate", False):
                _begin_to_write(connection)
            elif not options.get("alone", False):
                connection.exec_driver_sql("BEGIN")

        return engine

    def _postgres_engine(self) -> Engine:
        options = " ".join(f"-c {name}={value}" for name, value in _POSTGRES_SETTINGS.items())
        defaults = {"connect_timeout": 5, "application_name": "lenity", "options": options}
        given = {name for name in defaults if name in self.url.query}
        engine = create_engine(
            self.url,
            connect_args={name: value for name, value in defaults.items() if name not in given},
            pool_pre_ping=True,
            pool_timeout=BUSY_TIMEOUT_S,
        )

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            """A leader that was stopped in the middle of a write must not keep others from claiming the epoch."""
            if connection.get_execution_options().get("immediate", False):
                pause_ms = int(LONGEST_PAUSE_S * 1000)
                connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {pause_ms}")

        return engine


def _begin_to_write(connection: Connection) -> None:
    """Take the write lock. SQLite's own wait sleeps up to a tenth of a second between two tries, so that it can lose
    against a process that writes all the time until its timeout; trying more often gets a turn between two commits."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                driver.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as e:
                if e.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.001)
            else:
                return
    finally:
        driver.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000}")


def _turn_to_wal(connection: Any) -> None:
    """Set WAL mode. While others do the same on a new file SQLite refuses at once, whatever the busy timeout says."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as e:
            if "locked" not in str(e) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


@contextmanager
def guard(what: str) -> Iterator[None]:
    """Turn what a database or its driver raises into StorageError; `what` says what was being done."""
    try:
        yield
    except (DataError, IntegrityError, OverflowError, UnicodeError) as e:
        raise RecordRefused(f"{what}: {_reason(e)}") from e
    except (SQLAlchemyError, sqlite3.Error, OSError) as e:
        raise StorageError(f"{what}: {_reason(e)}") from e


def _reason(error: BaseException) -> str:
    """The driver's own words, without the statement and its values."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except SQLAlchemyError as e:
        raise StorageError("the database URL cannot be read; use sqlite:///PATH or postgresql://USER@HOST/NAME") from e
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise StorageError("SQLite history needs a file: sqlite:///PATH")
        return parsed
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise StorageError(f"{backend} is not supported; use sqlite:///PATH or postgresql://USER@HOST/NAME")
