"""The version of a database's schema, and moving it to this program's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sqlalchemy import Connection, inspect, text

from storage.database import Database
from storage.errors import SchemaTooNew, StorageError

_MIGRATIONS = Path(__file__).parent / "migrations"
_UPGRADE_LOCK = 0x6C656E697479  # any number that no other program on the server uses


@dataclass(frozen=True)
class SchemaStatus:
    """`current`: revision of the database, None when it is empty; `head`: this program's newest one."""

    current: str | None
    head: str
    state: Literal["empty", "older", "current", "newer"]

    def __str__(self) -> str:
        return f"schema {self.current or 'none'} ({self.state}), this program's is {self.head}"


def schema_status(database: Database) -> SchemaStatus:
    """Where the database stands; raises StorageError when it cannot be asked."""
    with database.reading(f"read the schema version of {database}") as connection:
        return _status(connection)


def check_schema(database: Database) -> None:
    """Raise SchemaTooNew or StorageError, with what to do, unless the schema is this program's own."""
    status = schema_status(database)
    _refuse_newer(database, status)
    if status.state != "current":
        raise StorageError(f"{database}: {status}; run `lenity db upgrade`")


def upgrade(database: Database) -> SchemaStatus:
    """Bring the schema to this program's newest revision, in one transaction; several callers at once take turns.

    Returns the status before. Raises SchemaTooNew for a database of a newer program, which is left alone.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    with database.writing(f"upgrade {database}") as connection:
        if not database.sqlite:
            connection.execute(text("SET LOCAL lock_timeout = '60s'"))
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = '60s'"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
        before = _status(connection)
        _refuse_newer(database, before)
        if before.state != "current":
            config = Config()
            config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
            config.set_main_option("path_separator", "os")
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as e:
                raise StorageError(f"upgrade {database}: {e}") from e
    return before


def _status(connection: Connection) -> SchemaStatus:
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory(str(_MIGRATIONS))
    head = scripts.get_current_head()
    assert head is not None
    current = None
    if inspect(connection).has_table("alembic_version"):
        current = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    if current is None:
        return SchemaStatus(None, head, "empty")
    if current == head:
        return SchemaStatus(current, head, "current")
    known = {script.revision for script in scripts.walk_revisions()}
    return SchemaStatus(current, head, "older" if current in known else "newer")


def _refuse_newer(database: Database, status: SchemaStatus) -> None:
    if status.state == "newer":
        raise SchemaTooNew(
            f"{database} has schema {status.current}, newer than this program's {status.head}: run the newer program, "
            "or restore the backup made before its upgrade"
        )
