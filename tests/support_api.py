"""A controller's API over a board and a history in memory, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from controller.api import create_app
from controller.auth import Tokens
from controller.view import Board, ClassView, PoolView, Wanted
from storage.errors import StorageError
from storage.records import Action, OperatorAction, QualityScore

NOW = 1_700_000_000.0
OPERATOR, LABELLER, VIEWER = "operator-secret-0001", "labeller-secret-0001", "viewer-secret-000001"
TOKENS = f"operator alice {OPERATOR}; labeller judge {LABELLER}; viewer guest {VIEWER}"

CLASS = ClassView(
    traffic_class="default",
    state="measured",
    reason="steady",
    explanation="Leniency is measured: 950 paired answers bound the loss per touch at 0.03.",
    rule="token_v3",
    g=5,
    theta=0.4,
    rho=1.0,
    mu=2.5,
    lease_epoch=3,
    lease_seq=17,
    lease_ttl_s=10.0,
    u_kappa=0.03,
    spent_upper=2.8,
    budget=10.0,
    remaining=0.72,
    max_loss=0.01,
    window_s=86_400.0,
    confidence=0.95,
    metric="answer_correct",
    requests_in_window=1000,
    touches_per_request_allowed=0.27,
    predicted_speedup_plain=2.13,
    predicted_speedup_lossless=1.19,
    forks_matured=950,
    labels_needed=400,
)
POOL = PoolView(
    pool="demo",
    policy_revision=1,
    policy_source="policy.yaml",
    policy_rejected=None,
    epoch=3,
    leader=True,
    time=NOW,
    tick_seconds=0.02,
    interval_s=1.0,
    last_telemetry_age_s=0.4,
    stream_lag=0,
    dead_letters=0,
    classes=(CLASS,),
)


@dataclass
class MemoryHistory:
    """What the API asks of the history, in lists; ``requests`` are (pool, class) by request id."""

    requests: dict[str, tuple[str, str]] = field(default_factory=dict)
    log: list[OperatorAction] = field(default_factory=list)
    newest: list[dict[str, Any]] = field(default_factory=list)
    broken: bool = False

    def points(self, pool: str, cls: str, since: float, limit: int, *_: object) -> list[Any]:
        return []

    def decisions(self, pool: str, cls: str | None, since: float | None, limit: int) -> list[dict[str, Any]]:
        self._check()
        return self.newest[:limit]

    def decision_changes(self, pool: str, cls: str | None, since: float, limit: int) -> list[dict[str, Any]]:
        return self.newest[:limit]

    def alerts(self, pool: str, cls: str | None, since: float | None, limit: int) -> list[Any]:
        return []

    def policy_revisions(self, pool: str, limit: int) -> list[dict[str, Any]]:
        return []

    def find_request(self, request_id: str, pool: str | None = None) -> dict[str, Any] | None:
        self._check()
        found = self.requests.get(request_id)
        if found is None or pool not in (None, found[0]):
            return None
        return {"request_id": request_id, "pool": found[0], "traffic_class": found[1], "arm": "holdback"}

    def operator_log(self, pool: str, limit: int) -> list[OperatorAction]:
        return self.log[::-1][:limit]

    def add_operator_action(
        self,
        pool: str,
        traffic_class: str,
        action: Action,
        who: str,
        why: str,
        now: float,
        amount: float | None = None,
    ) -> int:
        self._check()
        self.log.append(OperatorAction(len(self.log) + 1, pool, traffic_class, action, amount, who, why, now))
        return len(self.log)

    def _check(self) -> None:
        if self.broken:
            raise StorageError("sqlite:///secret/path is locked")


@dataclass
class ApiWorld:
    """The application with everything it can be given, and what it sent on."""

    tokens: Tokens | None = field(default_factory=lambda: Tokens(text=TOKENS))
    read_tokens: Tokens | None = None
    history: MemoryHistory = field(default_factory=MemoryHistory)
    board: Board = field(default_factory=Board)
    sent: list[QualityScore] = field(default_factory=list)
    wanted: tuple[Wanted, ...] = ()
    stream_down: bool = False
    leads: bool = False
    seconds: float = 0.0  # of the clock that times the rate of writes
    obeyed: list[OperatorAction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.board.publish(POOL)
        self.app: FastAPI = create_app(
            self.board,
            self.history,
            ready=lambda: (True, []),
            clock=lambda: NOW,
            registry=CollectorRegistry(),
            tokens=self.tokens,
            read_tokens=self.read_tokens,
            submit=self.submit,
            wanted=lambda pool: self.wanted,
            act=self.act,
            monotonic=lambda: self.seconds,
        )

    def act(self, action: OperatorAction) -> bool:
        if self.leads:
            self.obeyed.append(action)
        return self.leads

    def submit(self, scores: Sequence[QualityScore]) -> None:
        if self.stream_down:
            raise StorageError("redis://secret:6379 refuses")
        self.sent += scores

    def show(self, **changes: Any) -> None:
        """Publish the class with ``changes``."""
        self.board.publish(replace(POOL, classes=(replace(CLASS, **changes),)))

    def ask(self, method: str, path: str, token: str | None = None, **more: Any) -> httpx.Response:
        """One request, in this thread."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://lenity") as client:
                headers = {} if token is None else {"authorization": f"Bearer {token}"}
                return await client.request(method, path, headers=headers | more.pop("headers", {}), **more)

        return asyncio.run(send())

    def get(self, path: str, token: str | None = None) -> httpx.Response:
        """GET it."""
        return self.ask("GET", path, token)

    def post(self, path: str, body: Any, token: str | None = None) -> httpx.Response:
        """POST ``body`` as JSON."""
        return self.ask("POST", path, token, json=body)
