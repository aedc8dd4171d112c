"""Who may steer: one controller for a SQLite database, the newest epoch for a pool.

An epoch fences a pool: `History.save_tick`, the lease store and the workers refuse what carries an older one.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from storage.database import Database
from storage.errors import StorageError
from storage.history import History


@dataclass(frozen=True)
class Leadership:
    """A claim to a pool, good until somebody claims a newer epoch."""

    history: History
    pool: str
    epoch: int
    holder: str

    @classmethod
    def claim(cls, history: History, pool: str, holder: str, now: float, *, at_least: int = 1) -> Leadership:
        """Take the pool over from whoever had it. `at_least`: see `History.claim_epoch`."""
        return cls(history, pool, history.claim_epoch(pool, holder, now, at_least=at_least), holder)

    def held(self) -> bool:
        """Whether the epoch is still the pool's newest, as the database says now. Raises StorageError."""
        return self.history.current_epoch(self.pool) == self.epoch


@contextmanager
def single_controller(database_url: str) -> Iterator[None]:
    """Be the only controller of a SQLite database for the length of the block; nothing to do for PostgreSQL.

    The lock is the operating system's, on a file beside the database, so it ends with the process however that dies. A
    process that was forked (not spawned) meanwhile keeps it. Raises StorageError that names the controller that has it.
    """
    path = Database(database_url).path
    if path is None:
        yield
        return
    lock_path = path.with_name(path.name + ".lock")
    with _opened(lock_path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            owner = os.pread(descriptor, 300, 0).decode(errors="replace").strip() or "another process"
            raise StorageError(
                f"{path} has a controller already: {owner}. Stop it, or use PostgreSQL to run several controllers"
            ) from e
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as e:
        raise StorageError(f"{path}: {e.strerror}") from e
    try:
        yield descriptor
    finally:
        os.close(descriptor)
