"""Composition root of the controller: builds every part from a configuration and runs them until a signal."""

from __future__ import annotations

import socket
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import uvicorn
from prometheus_client import CollectorRegistry

from controller.api import BoardServer, create_app
from controller.auth import Tokens
from controller.clock import SteadyClock
from controller.jobs import Ticker
from controller.loop import FencedOff, LoopConfig, PoolLoop
from controller.metrics import ControllerMetrics
from controller.view import Board
from policies.reload import PolicyFile
from storage.history import History
from storage.leader import single_controller
from storage.stream import LeaseStore, StreamReader, connect

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ServiceConfig:
    """Where the controller finds its stream, database and policies, where it listens, and how it ticks."""

    redis_url: str
    database_url: str
    policies: tuple[Path, ...]
    host: str = "127.0.0.1"
    port: int = 8470
    loop: LoopConfig = field(default_factory=LoopConfig)
    tokens_file: Path | None = None
    read_token_file: Path | None = None


class Service:
    """A running controller. `run()` returns the process's exit code."""

    def __init__(self, config: ServiceConfig):
        self.config = config
        self.clock = SteadyClock()
        self.board = Board()
        self._stack = ExitStack()
        self._fenced: str | None = None
        self.loops: list[PoolLoop] = []
        self._build()

    def _build(self) -> None:
        config = self.config
        holder = f"{socket.gethostname()}:{uuid.uuid4().hex[:8]}"
        self.history = History(config.database_url)
        self._stack.callback(self.history.close)
        self._stack.enter_context(single_controller(config.database_url))
        self.history.upgrade()
        client = connect(config.redis_url, name="lenity-controller")
        self._stack.callback(client.close)
        now = self.clock.now()
        for path in config.policies:
            policy_file = PolicyFile(path)
            pool = policy_file.current[0].pool
            if any(loop.pool == pool for loop in self.loops):
                raise ValueError(f"{path}: pool {pool!r} has a policy already; one policy governs a pool")
            reader = StreamReader(client, pool)
            epoch = self.history.claim_epoch(pool, holder, now)
            loop = PoolLoop(
                policy_file,
                reader,
                LeaseStore(client),
                self.history,
                self.board,
                epoch=epoch,
                config=config.loop,
                now=now,
            )
            if loop.last_id is not None:
                reader.resume_from(loop.last_id)
            self.loops.append(loop)
            log.info("pool taken", pool=pool, epoch=epoch, policy=str(path))
        self.ticker = Ticker(
            self.tick, self.clock.now, config.loop.tick_s, stop_on=(FencedOff,), on_stop=self._on_fenced
        )
        registry = CollectorRegistry()
        ControllerMetrics(registry, self.board)
        self.app = create_app(
            self.board,
            self.history,
            ready=self.ready,
            clock=self.clock.now,
            registry=registry,
            tokens=Tokens.configured(config.tokens_file),
            read_tokens=None if config.read_token_file is None else Tokens(config.read_token_file),
        )
        options = uvicorn.Config(
            self.app,
            host=config.host,
            port=config.port,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=3,
        )
        self.server = BoardServer(options, self.board)

    def tick(self, now: float) -> None:
        """One tick of every pool."""
        for loop in self.loops:
            loop.tick(now)

    def ready(self) -> tuple[bool, list[str]]:
        """Whether the controller can act, and if not, why."""
        reasons = []
        if self._fenced is not None:
            reasons.append(f"fenced off: {self._fenced}")
        if self.ticker.late(self.clock.now()):
            reasons.append(
                "the loop is not ticking" + (f": {self.ticker.last_failure}" if self.ticker.last_failure else "")
            )
        for loop in self.loops:
            reasons += [f"{loop.pool}: {text}" for text in loop.degraded.values()]
        return not reasons, reasons

    def run(self) -> int:
        """Tick and serve until SIGTERM or SIGINT, or until a newer controller takes over; then close everything."""
        try:
            self.ticker.start()
            if self._fenced is None:
                self.server.run()
        finally:
            self.board.close()
            self.ticker.stop()
            self._stack.close()
        return 0 if self._fenced is None else 3

    def _on_fenced(self, error: Exception) -> None:
        self._fenced = str(error)
        log.error("a newer controller holds the pool; this one stops", error=str(error))
        self.server.should_exit = True
