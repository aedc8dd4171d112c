"""The embedded server starts, is found, and does not outlive those who need it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from storage.embedded import MAX_SOCKET_PATH, EmbeddedServer
from storage.errors import StorageError
from storage.stream import connect
from tests.support import wait_until

# A process that starts a server, says where, and waits to be killed.
OWNER = """
import sys, threading
from storage.embedded import EmbeddedServer
server = EmbeddedServer(sys.argv[1])
if sys.argv[2] == "thread":
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
else:
    server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def killed_owner(directory: Path, thread: str = "main") -> int:
    """The pid of a server whose owner was killed just after starting it."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory), thread],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert alive(pid)
        owner.kill()
        owner.wait()
    return pid


def test_a_server_answers_on_a_socket_and_on_no_port_and_keeps_nothing(tmp_path: Path) -> None:
    """It is private to its user, its memory is bounded, and it writes no data to the disk."""
    with EmbeddedServer(tmp_path / "run", max_memory=64 << 20) as server:
        client = connect(server.url)
        wanted = {"port": "0", "save": "", "appendonly": "no", "maxmemory": str(64 << 20)}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
        client.set("x", 1)
        client.close()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["valkey.lock", "valkey.log"]


def test_a_stopped_server_is_gone_and_can_be_started_again(tmp_path: Path) -> None:
    """Stopping twice is no error; the second start begins empty."""
    server = EmbeddedServer(tmp_path).start()
    pid = server.pid
    assert pid is not None
    connect(server.url).set("x", 1)
    server.stop()
    server.stop()
    assert server.pid is None
    assert not alive(pid)
    with server:
        assert connect(server.url).dbsize() == 0


def test_a_long_path_gets_a_short_private_socket(tmp_path: Path) -> None:
    """The system's limit on socket paths is no reason not to start, and nothing of the detour stays."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    with EmbeddedServer(deep) as server:
        socket = Path(server.url.removeprefix("unix://"))
        assert len(os.fsencode(socket)) <= MAX_SOCKET_PATH
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        assert connect(server.url).ping()
    assert not socket.parent.exists()


def test_one_living_owner_at_a_time(tmp_path: Path) -> None:
    """A second one is told which process has the directory; the first one's server goes on."""
    with EmbeddedServer(tmp_path) as server:
        with pytest.raises(StorageError, match=f"in use by process {os.getpid()}"):
            EmbeddedServer(tmp_path).start()
        assert connect(server.url).ping()
        with pytest.raises(StorageError, match="started already"):
            server.start()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_the_server_dies_with_its_owner(tmp_path: Path) -> None:
    """Killed without a chance to clean up."""
    pid = killed_owner(tmp_path)
    assert wait_until(lambda: not alive(pid))


def test_an_orphan_is_ended_by_the_next_start(tmp_path: Path) -> None:
    """Started from a thread it cannot be tied to its owner; a program is not left with two servers."""
    pid = killed_owner(tmp_path, "thread")
    assert alive(pid)
    with EmbeddedServer(tmp_path) as server:
        assert server.pid != pid
        assert not alive(pid)
        assert connect(server.url).ping()


@pytest.mark.parametrize("content", ["", "not json", "[]", '{"pid": "x"}', None])
def test_a_stale_pid_file_ends_nobody(tmp_path: Path, content: str | None) -> None:
    """A process id that now belongs to another program is not ours to end; a broken file is no obstacle."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        saved = json.dumps({"pid": bystander.pid, "socket": str(tmp_path / "valkey.sock")})
        (tmp_path / "valkey.pid").write_text(saved if content is None else content)
        with EmbeddedServer(tmp_path) as server:
            assert connect(server.url).ping()
        assert bystander.poll() is None
        bystander.send_signal(signal.SIGKILL)


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    """What the program said is what the operator needs."""
    program = tmp_path / "broken-server"
    program.write_text("#!/bin/sh\necho 'fatal: no memory today' >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(StorageError, match=r"status 3[\s\S]*no memory today"):
        EmbeddedServer(tmp_path, binary=str(program)).start()


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """Named, not a stack trace of the launcher."""
    with pytest.raises(StorageError, match="no-such-server"):
        EmbeddedServer(tmp_path, binary="/no-such-server").start()


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """A file stands where the directory should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be started"):
        EmbeddedServer(tmp_path / "file" / "run").start()
