"""How large a database is, and giving space back, on both."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from sqlalchemy import text

from storage import upkeep
from storage.errors import StorageError
from storage.history import History
from storage.tables import metadata
from tests.support_storage import NOW, a_fork, a_request, a_score


def fill(history: History, count: int) -> None:
    rows = [vars(a_request(request_id=f"r{n}")) | {"received": NOW + n} for n in range(count)]
    with history.transaction() as connection:
        connection.execute(metadata.tables["requests"].insert(), rows)


def test_tables_are_measured(history: History) -> None:
    """Rows, oldest and newest over all pools; a database without a schema is just small."""
    epoch = history.claim_epoch("code", "x", NOW)
    history.save_tick("code", epoch, NOW - 60, requests=[a_request("code")])
    fill(history, 3)
    found = upkeep.size(history.database)
    requests = next(t for t in found.tables if t.name == "requests")
    assert (requests.rows, requests.newest) == (4, datetime.fromtimestamp(NOW + 2, UTC))
    assert requests.oldest == datetime.fromtimestamp(NOW - 60, UTC)
    assert found.bytes > 10_000
    assert {t.name for t in found.tables} == set(metadata.tables)


def test_an_empty_database_can_be_measured(database_url: str) -> None:
    """Before its first upgrade."""
    history = History(database_url)
    assert upkeep.size(history.database).tables == ()
    history.close()


def test_growth_is_what_the_last_day_brought(history: History) -> None:
    """Requests, forks and scores of every pool."""
    for pool in ("chat", "code"):
        epoch = history.claim_epoch(pool, "x", NOW)
        history.save_tick(pool, epoch, NOW - 90_000, requests=[a_request(pool, "old")])
        history.save_tick(pool, epoch, NOW, requests=[a_request(pool)], forks=[a_fork(pool)], scores=[a_score(pool)])
    assert upkeep.growth(history.database, NOW) == 2 * (500 + 230 + 300)


def test_space_is_given_back(history: History) -> None:
    """What was deleted makes a SQLite file smaller; on PostgreSQL the tables are vacuumed and analyzed."""
    fill(history, 3000)
    with history.transaction() as connection:
        connection.execute(text("DELETE FROM requests WHERE request_id <> 'r1'"))
    before, after = upkeep.vacuum(history.database)
    if history.database.sqlite:
        assert after < before / 2
        assert upkeep.size(history.database, details=False).unused == 0
    else:
        with history.transaction() as connection:
            rows = connection.execute(text("SELECT reltuples FROM pg_class WHERE relname = 'requests'")).scalar()
        assert rows == 1
    assert history.find_request("r1") is not None


def test_a_full_disk_is_noticed_before(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite needs room for a copy; PostgreSQL does not."""
    genuine = upkeep.size
    small = upkeep.Size(10**9, 0, 10**6)
    monkeypatch.setattr(upkeep, "size", lambda d, **how: small if d.sqlite else genuine(d, **how))
    if history.database.sqlite:
        with pytest.raises(StorageError, match="free disk"):
            upkeep.vacuum(history.database)
    else:
        upkeep.vacuum(history.database)
