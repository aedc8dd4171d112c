"""Composition root of the controller: builds every part from a configuration and runs them until a signal."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import structlog
import uvicorn
from prometheus_client import CollectorRegistry

from controller.api import BoardServer, create_app
from controller.auth import Tokens
from controller.clock import SteadyClock
from controller.desk import Desk
from controller.jobs import Jobs, Ticker
from controller.loop import LoopConfig, PoolLoop
from controller.metrics import ControllerMetrics
from controller.runner import Parts, PoolRunner
from controller.seating import seat_name
from controller.view import Board, Wanted
from policies.recall import Accepted
from policies.reload import PolicySet
from storage import retention
from storage.errors import StorageError
from storage.history import History
from storage.leader import single_controller
from storage.records import Action, OperatorAction, QualityScore
from storage.seats import SeatStore
from storage.stream import StreamWriter, connect

log = structlog.get_logger(__name__)

STOP_WITHIN_S = 5.0  # from the signal to the end of the process, whatever hangs
ROLL_UP_S, RETENTION_S = 300.0, 3600.0
WITHOUT_RECORD: tuple[Action, ...] = ("freeze", "lossless", "resume")  # may be ordered while the database is away


@dataclass(frozen=True)
class ServiceConfig:
    """Where the controller finds its stream, database and policies (files and directories), where it listens, and how
    it ticks.

    `name` is the controller's own among several, this host's when empty; it should outlive a restart. `spool` is where
    decisions wait while the database is away: by default beside a SQLite file, else in the working directory.
    """

    redis_url: str
    database_url: str
    policies: tuple[Path, ...]
    host: str = "127.0.0.1"
    port: int = 8470
    loop: LoopConfig = field(default_factory=LoopConfig)
    tokens_file: Path | None = None
    read_token_file: Path | None = None
    name: str = ""
    spool: Path | None = None
    ages: retention.Ages = field(default_factory=retention.Ages)


class Service:
    """A running controller. `run()` returns the process's exit code."""

    def __init__(self, config: ServiceConfig):
        self.config = config
        self.clock = SteadyClock()
        self.board = Board()
        self.runners: dict[str, PoolRunner] = {}
        self._stack = ExitStack()
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise

    def _build(self) -> None:
        config = self.config
        self.history = History(config.database_url)
        self._stack.callback(self.history.close)
        self._stack.enter_context(single_controller(config.database_url))
        self.history.upgrade()
        self.policies = PolicySet(config.policies, self._known)
        for error in self.policies.rejected.values():
            log.warning("policy refused", error=str(error))
        self.client = connect(config.redis_url, name="lenity-controller")
        self._stack.callback(self.client.close)
        place = config.name or socket.gethostname()
        spool, lock = spool_directory(config.spool or _default_spool(self.history), place)
        self._stack.callback(lock.close)
        self.parts = Parts(
            client=self.client,
            history=self.history,
            board=self.board,
            name=seat_name(place, os.getpid(), uuid.uuid4().hex[:8]),
            spool=spool,
            config=config.loop,
            saving=Desk("lenity-save"),
            claiming=Desk("lenity-claim"),
            clock=self.clock.now,
        )
        self.runners = {pool: PoolRunner(policy, self.parts) for pool, policy in self.policies.files.items()}
        self.ticker = Ticker(self.tick, self.clock.now, config.loop.tick_s)
        self.jobs = Jobs(SeatStore(self.client).take_turn)
        self.jobs.add("roll up", ROLL_UP_S, lambda: self.history.roll_up(self.clock.now()))
        self.jobs.add("retention", RETENTION_S, self._retain)
        registry = CollectorRegistry()
        self.metrics = ControllerMetrics(registry, self.board)
        self.app = create_app(
            self.board,
            self.history,
            ready=self.ready,
            clock=self.clock.now,
            registry=registry,
            tokens=Tokens.configured(config.tokens_file),
            read_tokens=None if config.read_token_file is None else Tokens(config.read_token_file),
            submit=self.submit,
            wanted=self.wanted,
            act=self.act,
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

    # -- what runs -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """One tick of every pool; what goes wrong with one does not hold up the others."""
        self._follow_policies(now)
        failures = []
        for pool, runner in self.runners.items():
            runner.ticks_missed, runner.tick_failures = self.ticker.missed, self.ticker.failures
            try:
                runner.tick(now, patient=not any(r.leads for r in self.runners.values()))
            except Exception as e:
                log.exception("tick failed", pool=pool)
                failures.append(f"{pool}: {type(e).__name__}: {e}")
        if failures:
            raise RuntimeError("; ".join(failures))

    def _follow_policies(self, now: float) -> None:
        change = self.policies.poll()
        for error in change.rejected:
            log.warning("policy refused", error=str(error))
        for pool in change.removed:
            log.info("pool given up: its policy is gone", pool=pool)
            self.runners.pop(pool).close(now, self.config.loop.patience)
            self.board.remove(pool)
            self.metrics.forget(pool)
        self.metrics.files_rejected(sum(not self._in_force(path) for path in self.policies.rejected))
        for pool in change.added:
            self.runners[pool] = PoolRunner(self.policies.files[pool], self.parts)

    def _known(self) -> list[Accepted]:
        """What was in force when a controller last said so, for pools whose file cannot be used now."""
        return [Accepted(row["pool"], row["text"], row["source"]) for row in self.history.policies_in_force()]

    def _retain(self) -> None:
        policies = [policy.current[0] for policy in list(self.policies.files.values())]
        windows = [p.for_class(name).window_s for p in policies for name in ("default", *p.classes)]
        ages = self.config.ages.covering(max(windows, default=0.0))
        removed = retention.run(self.history, ages, self.clock.now(), stop=lambda: self.jobs.stopping)
        log.info("old rows removed", **{name: count for name, count in removed.items() if count})

    def run(self) -> int:
        """Tick and serve until SIGTERM or SIGINT; then close everything."""
        # The server raises what it caught again at its end; with the default handlers that would end the process there.
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, self._stop)
        try:
            self.ticker.start()
            self.jobs.start()
            self.server.run()
        finally:
            self.close()
        return 0

    def _stop(self, sign: int, frame: object) -> None:
        self.server.should_exit = True

    def close(self) -> None:
        """Save what can be saved, let others take the pools, and let go of everything, within `STOP_WITHIN_S`."""
        until = time.monotonic() + STOP_WITHIN_S
        self.board.close()
        ticked = self.ticker.stop(STOP_WITHIN_S / 2)
        for runner in self.runners.values() if ticked else ():
            runner.close(self.clock.now(), max(0.1, (until - time.monotonic()) / 2))
        for part in (self.jobs.stop, self.parts.saving.close, self.parts.claiming.close):
            part(max(0.0, until - time.monotonic()))
        self._stack.close()

    # -- what the API asks ---------------------------------------------------------------------------------------------

    @property
    def loops(self) -> list[PoolLoop]:
        """The loops of the pools that this controller leads."""
        return [runner.loop for runner in self.runners.values() if runner.loop is not None]

    def ready(self) -> tuple[bool, list[str]]:
        """Whether the controller can act or take over, and what there is to say about it."""
        wrong, said = [], []
        if self.ticker.late(self.clock.now()):
            wrong.append(
                "the loop is not ticking" + (f": {self.ticker.last_failure}" if self.ticker.last_failure else "")
            )
        wrong += [f"policy: {error}" for path, error in self.policies.rejected.items() if not self._in_force(path)]
        for pool, runner in self.runners.items():
            if runner.loop is not None:
                wrong += [f"{pool}: {text}" for text in runner.loop.degraded.values()]
            elif runner.trouble is not None:
                wrong.append(f"{pool}: {runner.trouble}")
            elif runner.seat is not None:
                said.append(f"{pool}: standby, epoch {runner.seat.highest} of {runner.seat.holder or 'nobody'} leads")
        return not wrong, [*wrong, *said]

    def _in_force(self, path: str) -> bool:
        """Whether the file of a refused edit has a policy in force all the same."""
        return any(str(policy.path) == path for policy in self.policies.files.values())

    def act(self, order: OperatorAction) -> bool:
        """Have the loop of a pool obey an order that cannot be written down yet; False where this process does not lead
        the pool, or for an order that must not be obeyed twice."""
        runner = self.runners.get(order.pool)
        if runner is None or runner.loop is None or order.action not in WITHOUT_RECORD:
            return False
        runner.loop.orders.give(order)
        return True

    def wanted(self, pool: str) -> Sequence[Wanted]:
        """Requests of a pool that are worth a label, as of the last tick."""
        runner = self.runners.get(pool)
        return () if runner is None or runner.loop is None else runner.loop.wanted

    def submit(self, scores: Sequence[QualityScore]) -> None:
        """Send labels to the streams of their pools. Raises StorageError."""
        for pool in dict.fromkeys(score.pool for score in scores):
            StreamWriter(self.client, pool).append([score for score in scores if score.pool == pool])


def _default_spool(history: History) -> Path:
    path = history.database.path
    return Path("lenity-spool") if path is None else path.with_name(path.name + ".spool")


def spool_directory(root: Path, place: str) -> tuple[Path, IO[bytes]]:
    """A directory below `root` that this process has to itself, the same after a restart, and the lock that says so."""
    clean = "".join(c if c.isalnum() or c in "._-" else "-" for c in place)
    try:
        for number in range(1, 100):
            directory = root / f"{clean}-{number}"
            directory.mkdir(parents=True, exist_ok=True)
            lock = (directory / "lock").open("wb")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
            else:
                return directory, lock
    except OSError as e:
        raise StorageError(f"spool {root}: {e.strerror}; choose a directory that can be written (--spool)") from e
    raise StorageError(f"spool {root}: all of its directories for {place} are taken")
