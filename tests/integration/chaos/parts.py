"""The processes that are killed: a light worker that keeps a ledger of what it sent, a controller of one pool, and the
servers, which keep their data over SIGKILL."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
import time
import uuid
from pathlib import Path
from typing import Any, cast

import redis
import structlog

from controller.desk import Desk
from controller.loop import LoopConfig
from controller.runner import Parts, PoolRunner
from controller.seating import seat_name
from controller.view import Board
from policies.reload import PolicyFile
from storage.connection import telemetry_key
from storage.embedded import _bundled_binary
from storage.errors import StorageError
from storage.history import History
from storage.leases import LeaseStore
from storage.stream import StreamWriter, connect
from tests.conftest import PostgresServer
from tests.support import wait_until
from tests.support_storage import a_block, a_request

POOL, TTL_S, TICK_S = "p", 1.0, 0.1
POSITIONS = 8  # drafted in each block


def worker(name: str, redis_url: str, ledger: Path) -> None:
    """Send one block and one request after the other, each until the server has taken it, and watch the leases.

    Ledger: a line before each attempt, one when it was accepted, and one for each lease seen (epoch, seq, seconds left,
    ttl, and by the server's clock a time before the question and one after the answer).
    """
    ending = _ending()
    client, boot = connect(redis_url), uuid.uuid4().hex[:8]
    writer, leases = StreamWriter(client, POOL), LeaseStore(client)
    with ledger.open("a", buffering=1) as file:

        def note(*what: object) -> None:
            file.write(json.dumps(what) + "\n")

        for seq in itertools.count():
            if ending.is_set():
                break
            records = [
                a_block(POOL, seq=seq, positions=POSITIONS, worker=name, boot=boot),
                a_request(POOL, f"{name}.{boot}.{seq}", worker=name, boot=boot),
            ]
            note("sent", boot, seq)
            while not ending.is_set():
                try:
                    writer.append(records)
                except StorageError:
                    ending.wait(0.02)
                else:
                    note("accepted", boot, seq)
                    break
            with contextlib.suppress(StorageError, redis.RedisError):
                asked = server_time(client)
                found = leases.read(POOL, "default")
                if found is not None:
                    lease, left = found
                    note("lease", lease.epoch, lease.seq, left, lease.ttl, asked, server_time(client))
            ending.wait(0.02)


def controller(name: str, redis_url: str, database_url: str, directory: Path) -> None:
    """Tick the pool until SIGTERM."""
    ending = _ending()
    history = History(database_url)
    while not ending.is_set():
        try:
            history.upgrade()
            break
        except StorageError:
            ending.wait(0.05)
    parts = Parts(
        client=connect(redis_url),
        history=history,
        board=Board(),
        name=seat_name(name, os.getpid(), uuid.uuid4().hex[:4]),
        spool=directory / name,
        config=LoopConfig(tick_s=TICK_S, ttl_s=TTL_S, snapshot_s=0.3),
        saving=Desk("save"),
        claiming=Desk("claim"),
        clock=time.time,
    )
    runner = PoolRunner(PolicyFile(directory / "policy.yaml"), parts)
    while not ending.is_set():
        with contextlib.suppress(StorageError):
            runner.tick(time.time())
        ending.wait(TICK_S)
    runner.close(time.time(), 10.0)


def server_time(client: redis.Redis) -> float:
    """What the server's own clock says, in seconds."""
    seconds, microseconds = cast("tuple[int, int]", client.time())
    return seconds + microseconds / 1e6


def unsettled(client: redis.Redis) -> int:
    """Entries of the stream that the controllers have not acknowledged: those they were given, and those that nobody
    has read, of which nothing is pending."""
    key = telemetry_key(POOL)
    groups = cast("list[dict[str, Any]]", client.xinfo_groups(key))
    if not groups:
        return int(client.xlen(key))  # type: ignore[arg-type]
    delivered = groups[0]["last-delivered-id"].decode()
    return int(groups[0]["pending"]) + len(cast("list[Any]", client.xrange(key, f"({delivered}", "+")))


def _ending() -> threading.Event:
    """Set by SIGTERM."""
    structlog.configure(processors=[_drop])
    event = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: event.set())
    return event


def _drop(logger: Any, method: str, event: Any) -> Any:
    raise structlog.DropEvent


class StreamServer:
    """A valkey-server whose every accepted write is on disk."""

    def __init__(self, directory: Path):
        self.directory, self.url = directory, f"unix://{directory}/s"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, with what the last one left; returns when it answers."""
        options = {"port": "0", "unixsocket": "s", "dir": str(self.directory), "save": ""}
        options |= {"appendonly": "yes", "appendfsync": "always"}
        command = [_bundled_binary(), *(part for k, v in options.items() for part in (f"--{k}", v))]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self.directory, stdout=log, stderr=log)
        client = connect(self.url)

        def answers() -> bool:
            with contextlib.suppress(Exception):
                return bool(client.ping())
            return False

        wait_until(answers, timeout=30)
        client.close()

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()


class Postgres(PostgresServer):
    """A PostgreSQL server that can be killed and started again."""

    def kill(self) -> None:
        """SIGKILL to the server; its children end by themselves."""
        self._process.kill()
        self._process.wait()

    def start(self) -> None:
        """Start again on the same data; children of the last one may still hold it for a moment."""
        settings = {"listen_addresses": "", "unix_socket_directories": str(self.directory), "fsync": "off"}
        settings |= {"shared_buffers": "16MB", "max_connections": "40"}
        pairs = [part for k, v in settings.items() for part in ("-c", f"{k}={v}")]
        deadline = time.monotonic() + 30
        while True:
            with (self.directory / "log").open("ab") as log:
                command = [str(self._binary), "-D", str(self.directory / "data"), *pairs]
                self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", **self._as)  # type: ignore[call-overload]
            while self._process.poll() is None:
                with contextlib.suppress(Exception):
                    self.execute("SELECT 1")
                    return
                time.sleep(0.05)
            if time.monotonic() > deadline:
                raise RuntimeError((self.directory / "log").read_text()[-2000:])
            time.sleep(0.1)
