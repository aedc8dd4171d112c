"""Migrations survive being killed, keep what was there, and a database that went away is found again."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import text

import storage.schema
from storage.errors import StorageError
from storage.history import History, Point
from storage.tables import metadata
from tests.conftest import PostgresServer
from tests.support_storage import NOW, a_request

ROOT = Path(__file__).parents[2]

# Upgrades, and kills itself before the statement of that number that changes the schema or the version.
KILLED = """
import os, signal, sys
from sqlalchemy import event
from storage.history import History
history, left = History(sys.argv[1]), int(sys.argv[2])
@event.listens_for(history.database._engine, "before_cursor_execute")
def count(connection, cursor, statement, *_):
    global left
    if statement.lstrip().split()[0] in ("CREATE", "ALTER", "DROP", "INSERT", "UPDATE"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
history.upgrade()
"""


def at_revision(history: History, revision: str) -> None:
    """Migrate up to `revision`, as an older program did."""
    with history.transaction() as connection:
        config = Config()
        config.set_main_option("script_location", str(storage.schema._MIGRATIONS))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def differences(history: History) -> list[object]:
    with history.transaction() as connection:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))


def test_a_migration_that_was_killed_can_be_run_again(database_url: str) -> None:
    """SIGKILL between two steps of the second of two migrations: nothing of either is there after, and the next upgrade
    does it all."""
    history = History(database_url)
    at_revision(history, "0001")
    command = [sys.executable, "-c", KILLED, database_url, "12"]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=60).returncode == -signal.SIGKILL
    assert history.schema_status().current == "0001"
    assert len(differences(history)) > 10
    history.upgrade()
    assert differences(history) == []
    history.close()


def test_an_upgrade_keeps_what_was_there(database_url: str) -> None:
    """Rows of the first schema are read by this program, and jobs go over them."""
    history = History(database_url)
    at_revision(history, "0001")
    with history.transaction() as connection:
        connection.execute(
            text("INSERT INTO points (pool, traffic_class, time, \"values\") VALUES ('chat', 'default', :at, :values)"),
            {"at": "2027-01-15 08:00:00.000000", "values": '{"a":2.0}'},
        )
    assert history.schema_status().state == "older"
    with pytest.raises(StorageError, match="lenity db upgrade"):
        history.check_schema()
    history.upgrade()
    assert differences(history) == []
    assert history.points("chat", "default") == [Point("chat", "default", 1_800_000_000.0, {"a": 2.0})]
    assert history.roll_up(NOW + 60) == 1
    history.close()


def test_a_migration_can_be_taken_back(database_url: str) -> None:
    """And made again; what the older schema has no place for is gone."""
    history = History(database_url)
    history.upgrade()
    with history.transaction() as connection:
        config = Config()
        config.set_main_option("script_location", str(storage.schema._MIGRATIONS))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert history.schema_status().state == "empty"
    history.upgrade()
    assert differences(history) == []
    history.close()


@pytest.mark.peer("postgresql")
def test_a_database_that_restarts_is_found_again(postgres: PostgresServer) -> None:
    """While it is away every call fails at once with a StorageError; afterwards the same object goes on."""
    postgres.execute("DROP SCHEMA public CASCADE")
    postgres.execute("CREATE SCHEMA public")
    history = History(postgres.url)
    history.upgrade()
    epoch = history.claim_epoch("chat", "first", NOW)
    postgres.stop()
    for _ in range(2):
        with pytest.raises(StorageError):
            history.save_tick("chat", epoch, NOW, requests=[a_request()])
    postgres.start()
    history.save_tick("chat", epoch, NOW, requests=[a_request()])
    with pytest.raises(StorageError), history.transaction() as connection:
        postgres.stop()
        postgres.start()
        connection.execute(text("SELECT 1"))
    assert history.find_request("r1") is not None
    history.close()
