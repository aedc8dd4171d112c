"""Which databases are accepted, how SQLite is set up, and what an outage looks like."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from storage.database import Database
from storage.errors import StorageError
from storage.history import History
from tests.support_storage import NOW, a_request


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "cannot be read"),
        ("history.db", "cannot be read"),
        ("sqlite://", "needs a file"),
        ("sqlite:///:memory:", "needs a file"),
        ("mysql://localhost/lenity", "not supported"),
    ],
)
def test_a_url_that_cannot_be_used_says_what_to_write(url: str, message: str) -> None:
    """At once, not at the first write."""
    with pytest.raises(StorageError, match=message):
        Database(url)


def test_a_password_is_not_shown() -> None:
    """Errors and status name the database, not the secret."""
    assert "secret" not in str(Database("postgresql://me:secret@127.0.0.1:1/lenity"))


def test_an_unreachable_server_is_a_storage_error() -> None:
    """With the driver's reason and no statement."""
    history = History("postgresql://me:secret@127.0.0.1:1/lenity")
    with pytest.raises(StorageError, match="save a tick") as caught:
        history.save_tick("chat", 1, NOW, requests=[a_request()])
    assert "secret" not in str(caught.value)
    assert "INSERT" not in str(caught.value)


def test_sqlite_keeps_every_commit_and_readers_do_not_block(tmp_path: Path) -> None:
    """WAL, synchronous, with a wait for the lock; directories are made."""
    database = Database(f"sqlite:///{tmp_path / 'new' / 'history.db'}")
    with database.reading("look") as connection:
        found = {
            p: connection.execute(text(f"PRAGMA {p}")).scalar() for p in ("journal_mode", "synchronous", "busy_timeout")
        }
    assert found == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 5000}
    database.close()


def test_a_writer_has_the_lock_from_its_first_statement(tmp_path: Path) -> None:
    """So what it reads cannot change before it writes. A reader's transaction takes no lock."""
    path = tmp_path / "history.db"
    database = Database(f"sqlite:///{path}")
    other = sqlite3.connect(path, timeout=0, isolation_level=None)
    with database.reading("look") as connection:
        connection.execute(text("SELECT 1"))
        other.execute("BEGIN IMMEDIATE").connection.execute("ROLLBACK")
    with database.writing("write") as connection:
        connection.execute(text("SELECT 1"))
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
    other.close()
    database.close()


def test_a_file_that_is_no_database_is_an_error(tmp_path: Path) -> None:
    """Somebody else's file is not overwritten."""
    path = tmp_path / "history.db"
    path.write_text("not a database, and long enough to be looked at as one" * 40)
    with pytest.raises(StorageError, match="not a database"):
        History(f"sqlite:///{path}").upgrade()


# Reads, then writes what follows from it, in four ways, while jobs sum up and remove what the others write.
READ_THEN_WRITE = """
import sys
from storage import retention
from storage.history import History, Point
h, me = History(sys.argv[1]), sys.argv[2]
for n in range(30):
    epoch = h.claim_epoch('shared', me, 1e9 + n)
    mine = h.claim_epoch(me, me, 1e9 + n)
    h.save_tick(me, mine, 1e9 + n, points=[Point(me, 'default', 1e9 + n, {'a': 1.0})], snapshot={'n': n})
    h.add_policy_revision('shared', f'{me} {n}', 'sha', 'p.yaml', 1e9, accepted=True, error=None)
    h.add_operator_action('shared', '*', 'freeze', me, str(n), 1e9)
    if n % 10 == 9:
        retention.run(h, retention.Ages(), 1e9 + 200, pause=lambda _: None)
    print(epoch)
"""


def test_two_processes_that_read_then_write_lose_nothing(tmp_path: Path) -> None:
    """For a second or two: no error, every number was given once, and what both wrote is there and summed up once."""
    url = f"sqlite:///{tmp_path / 'history.db'}"
    history = History(url)
    history.upgrade()
    root = Path(__file__).parents[3]
    processes = [
        subprocess.Popen([sys.executable, "-c", READ_THEN_WRITE, url, me], stdout=subprocess.PIPE, cwd=root)
        for me in ("one", "two")
    ]
    epochs = [int(e) for p in processes for e in p.communicate(timeout=120)[0].split()]
    assert sorted(epochs) == list(range(1, 61))
    assert [r["revision"] for r in history.policy_revisions("shared", 1000)] == list(range(60, 0, -1))
    assert [a.id for a in history.operator_actions("shared", limit=1000)] == list(range(1, 61))
    history.roll_up(1e9 + 1000)
    for pool in ("one", "two"):
        assert history.load_snapshot(pool) == ({"n": 29}, "0-0")
        with history.transaction() as connection:
            sums = "SELECT sum(count) FROM point_rollups WHERE step = 86400 AND pool = :pool"
            assert connection.execute(text(sums), {"pool": pool}).scalar_one() == 30
    history.close()
