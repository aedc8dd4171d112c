"""Controllers for tests: runners of one pool over a stream server and a database, ticked by hand."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import redis

from controller.desk import Desk
from controller.loop import LoopConfig, PoolLoop
from controller.runner import Parts, PoolRunner
from controller.seating import seat_name
from controller.view import Board, PoolView
from policies.reload import PolicyFile
from storage.history import History

POLICY = """\
version: lenity/v1
pool: {pool}
objective: {{metric: correct, max_loss: 0.2, window: 60s}}
evidence: {{min_labels: 40, label_deadline: 20s, fork_cold: 1}}
pull_back: {{cooldown: 12s}}
alerts: {{page: []}}
"""
_numbers = itertools.count(1)


class Controller:
    """One controller of one pool. `process` None: a number that no process has."""

    def __init__(
        self,
        name: str,
        client: redis.Redis,
        history: History,
        pool: str,
        directory: Path,
        *,
        ttl_s: float = 0.5,
        inline: bool = True,
        process: int | None = None,
    ):
        self.directory = directory / f"{name}-{next(_numbers)}"
        self.directory.mkdir()
        self.policy_path = self.directory / "policy.yaml"
        self.policy_path.write_text(POLICY.format(pool=pool))
        self.history, self.board = history, Board()
        self.parts = Parts(
            client=client,
            history=history,
            board=self.board,
            name=seat_name(name, 4_000_000 + next(_numbers) if process is None else process, "t"),
            spool=directory / name,
            config=LoopConfig(tick_s=0.1, ttl_s=ttl_s, snapshot_s=0.0),
            saving=Desk("save", inline=inline),
            claiming=Desk("claim", inline=inline),
            clock=time.time,
        )
        self.runner = PoolRunner(PolicyFile(self.policy_path), self.parts)

    def tick(self, now: float | None = None) -> bool:
        """One tick; whether this controller leads after it."""
        self.runner.tick(time.time() if now is None else now, patient=True)
        return self.runner.leads

    @property
    def loop(self) -> PoolLoop:
        """The loop, of a controller that leads."""
        assert self.runner.loop is not None
        return self.runner.loop

    @property
    def view(self) -> PoolView:
        """What it shows of the pool."""
        view = self.board.pool(self.runner.pool)
        assert view is not None
        return view
