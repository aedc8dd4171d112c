"""The processes of the demo: a stream server, decoding workers and a controller, with their logs and their ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import httpx

from storage.embedded import EmbeddedServer
from storage.records import RequestRecord, from_fields
from storage.stream import connect, telemetry_key

POOL = "demo"
TICK_S = 0.5
TTL_S = 3.0
HALF_LIFE_ROUNDS = 1500.0


class Stage:
    """Starts, kills and stops what the demo needs, all below one directory. A context manager."""

    def __init__(self, directory: Path, policy_text: str, *, workers: int, port: int, seed: int):
        self.directory, self.workers, self.seed = directory, workers, seed
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.database_url = f"sqlite:///{directory / 'history.db'}"
        self.policy_path = directory / "policy.yaml"
        self.policy_path.write_text(policy_text)
        self._http = httpx.Client(base_url=self.url, timeout=2.0)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[TextIO] = []
        self._server = EmbeddedServer(directory / "valkey")

    def __enter__(self) -> Stage:
        self._server.__enter__()
        self.redis_url = self._server.url
        self._client = connect(self.redis_url, name="lenity-demo")
        return self

    def __exit__(self, *exc: object) -> None:
        for name in reversed(list(self._processes)):
            self.stop(name)
        self._http.close()
        self._client.close()
        self._server.__exit__(None, None, None)
        for log in self._logs:
            log.close()

    # -- processes -----------------------------------------------------------------------------------------------------

    def start_workers(self) -> None:
        """Start the decoding workers; without a lease they decode losslessly."""
        for i in range(self.workers):
            args = ["worker", "--redis-url", self.redis_url, "--pool", POOL, "--worker-id", f"w{i + 1}"]
            args += ["--traffic", "demo", "--seed", str(self.seed + i), "--threads", "1"]
            self._start(f"worker-{i + 1}", [sys.executable, "-m", "decoder.cli", *args])

    def start_controller(self) -> None:
        """Start the controller."""
        args = ["controller", "--redis-url", self.redis_url, "--database", self.database_url]
        args += ["--policy", str(self.policy_path), "--port", str(self.port), "--tick", str(TICK_S)]
        args += ["--ttl", str(TTL_S), "--half-life-rounds", str(HALF_LIFE_ROUNDS)]
        self._start("controller", [sys.executable, "-m", "controller.cli", *args])

    def kill_controller(self) -> float:
        """SIGKILL, as a crash would end it; returns the wall time of the kill."""
        process = self._processes.pop("controller")
        process.send_signal(signal.SIGKILL)
        killed = time.time()
        process.wait()
        return killed

    def stop(self, name: str) -> None:
        """SIGTERM and wait; SIGKILL after ten seconds."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop_workers(self) -> None:
        """Stop the workers; they flush their telemetry first."""
        for name in [n for n in self._processes if n.startswith("worker")]:
            self.stop(name)

    def check_alive(self) -> None:
        """Raise RuntimeError with the end of its log when a process has died by itself."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                tail = "\n".join(self._log_path(name).read_text(errors="replace").splitlines()[-15:])
                raise RuntimeError(f"{name} ended with code {process.returncode}; the end of its log:\n{tail}")

    def _start(self, name: str, command: list[str]) -> None:
        log = self._log_path(name).open("a")
        self._logs.append(log)
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)

    def _log_path(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    # -- what an operator would look at --------------------------------------------------------------------------------

    def pool(self) -> dict[str, Any] | None:
        """The pool as the API shows it; None while the controller does not answer, or waits and does not lead yet."""
        try:
            answer = self._http.get(f"/v1/pools/{POOL}")
        except httpx.HTTPError:
            return None
        pool: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        return pool if pool.get("classes") else None

    def ready(self) -> bool:
        """Whether the controller says that it can act."""
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    # -- what the demo changes in the world ----------------------------------------------------------------------------

    def world(self, settings: Mapping[str, str]) -> None:
        """Change the traffic (`domain`) or what a good answer is (`scorer`)."""
        for name, value in settings.items():
            self._client.hset(f"lenity:{POOL}:demo", name, value)
        self._client.expire(f"lenity:{POOL}:demo", 3600)

    def edit_policy(self, text: str) -> None:
        """Write the policy file as an editor does: a new file that takes the old one's place."""
        temporary = self.policy_path.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(self.policy_path)

    def served_since(self, started: float, limit: int = 3000) -> list[RequestRecord]:
        """Requests on the stream that began at `started` (Unix seconds) or later, oldest first."""
        newest = self._client.xrevrange(telemetry_key(POOL), count=limit)
        return [r for r in _requests(newest)[::-1] if r.started >= started]

    def count_requests(self) -> int:
        """Distinct requests on the whole stream."""
        return len({r.request_id for r in _requests(self._client.xrange(telemetry_key(POOL)))})


def _requests(entries: Any) -> list[RequestRecord]:
    records = [from_fields(fields) for _, fields in entries if fields.get(b"kind") == b"request"]
    return [r for r in records if isinstance(r, RequestRecord)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])
