"""Ends writes that their controllers left open: stopped, or cut off from the database, with the pool's epoch locked.

The database's own timeout for idle transactions does not count while the client is in the middle of a batch of
statements, so whoever wants to claim the pool looks for itself.
"""

from __future__ import annotations

from sqlalchemy import text

from storage import database
from storage.database import Database

# A row that is locked names the transaction that has it; a role may end its own sessions.
_END = text("""
    SELECT pg_terminate_backend(l.pid)
    FROM epochs e
    JOIN pg_locks l ON l.locktype = 'transactionid' AND l.granted AND l.transactionid = e.xmax
    JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE e.pool = :pool AND l.mode = 'ExclusiveLock'
        AND clock_timestamp() - a.xact_start > make_interval(secs => :least)
""")


def end_stopped_writes(of: Database, pool: str) -> int:
    """End the write that has held the epoch of `pool` for more than `LONGEST_PAUSE_S`; how many there were (0 or 1).

    Its writer gets an error if it ever goes on. Nothing to do on SQLite, which has one controller. Raises StorageError.
    """
    if of.sqlite:
        return 0
    with of.alone(f"end a stopped write of {pool}") as connection:
        return len(connection.execute(_END, {"pool": pool, "least": database.LONGEST_PAUSE_S}).all())
