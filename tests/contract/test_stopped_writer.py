"""A controller that is stopped (SIGSTOP, a machine that sleeps) in a write, with its epoch's row locked."""

from __future__ import annotations

import pytest

from storage import database
from storage.errors import StorageError
from storage.history import History
from storage.stopped import end_stopped_writes
from tests.support import wait_until


@pytest.mark.peer("postgresql")
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_writer_that_was_stopped_does_not_keep_the_pool(
    database_url: str, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database ends its transaction after a pause, so that another can claim the epoch; its write fails."""
    monkeypatch.setattr(database, "LONGEST_PAUSE_S", 0.1)
    epoch = history.claim_epoch("p", "stopped", 1.0)
    other = History(database_url)
    with pytest.raises(StorageError), history.transaction("a write") as connection:
        History._require_epoch(connection, "p", epoch)
        assert other.claim_epoch("p", "successor", 2.0) == epoch + 1
        History._require_epoch(connection, "p", epoch)
    assert history.current_epoch("p") == epoch + 1
    other.close()


@pytest.mark.peer("postgresql")
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_writer_that_was_stopped_within_a_batch_does_not_keep_the_pool_either(
    database_url: str, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database does not call it idle; who wants the pool ends it, and no write that is younger than a pause."""
    epoch = history.claim_epoch("p", "stopped", 1.0)
    other = History(database_url)
    with pytest.raises(StorageError), history.transaction("a write") as connection:
        History._require_epoch(connection, "p", epoch)
        driver = connection.connection.driver_connection
        assert driver is not None
        with driver.pipeline(), driver.cursor() as cursor:
            cursor.execute("SELECT 1")
            assert end_stopped_writes(other.database, "p") == 0
            monkeypatch.setattr(database, "LONGEST_PAUSE_S", 0.05)
            wait_until(lambda: end_stopped_writes(other.database, "p"))
            assert other.claim_epoch("p", "successor", 2.0) == epoch + 1
    assert history.current_epoch("p") == epoch + 1
    other.close()
