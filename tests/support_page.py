"""A controller without a loop behind the status page: what a test publishes is what the page sees."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry

from controller.api import ApiServer, create_app
from controller.auth import Tokens
from controller.view import AlertView, Board, ClassView, PoolView

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
CLASS = ClassView(
    traffic_class="default",
    state="measured",
    reason="steady",
    explanation="Leniency is open within the budget.",
    rule="token_v3",
    g=5,
    theta=0.4,
    rho=1.0,
    mu=2.5,
    lease_epoch=3,
    lease_seq=17,
    lease_ttl_s=10.0,
    acceptance=0.875,
    predicted_speedup_plain=2.13,
    predicted_speedup_lossless=1.19,
    spent_upper=2.8,
    budget=10.0,
    remaining=0.72,
    alerts=(AlertView(name="burn 1h/5m", firing=False, detail="Burn 0.2 of 14.4 allowed."),),
)


@dataclass(frozen=True)
class Row:
    time: float
    values: dict[str, float | None]


SECRET = "operator-secret-0001"


@dataclass
class World:
    """A controller without a loop: what the test publishes is what the page sees."""

    board: Board = field(default_factory=Board)
    rows: list[Row] = field(default_factory=list)
    fired: list[dict[str, object]] = field(default_factory=list)
    revisions: list[dict[str, object]] = field(default_factory=list)
    decided: list[dict[str, object]] = field(default_factory=list)
    ordered: list[dict[str, object]] = field(default_factory=list)
    lag: float = 0.0
    interval_s: float = 60.0  # long, so that a slow machine is not taken for a stopped loop
    read_tokens: Tokens | None = None
    server: ApiServer | None = None
    url: str = ""

    def serve(self, port: int = 0) -> None:
        app = create_app(
            self.board,
            self,
            ready=lambda: (True, []),
            clock=lambda: time.time() + self.lag,
            registry=CollectorRegistry(),
            tokens=Tokens(text=f"operator alice {SECRET}; viewer guest viewer-secret-000001"),
            read_tokens=self.read_tokens,
        )
        self.server = ApiServer(app, self.board, port=port)
        self.url = self.server.start()

    def stop(self) -> None:
        assert self.server is not None
        assert self.server.stop()

    def publish(self, *classes: ClassView, pool: str = "demo", **changes: object) -> None:
        now = time.time() + self.lag
        self.rows += [Row(now, {"theta": c.theta, "remaining": c.remaining, "g": float(c.g)}) for c in classes[:1]]
        view = PoolView(
            pool=pool,
            policy_revision=1,
            policy_source="policy.yaml",
            policy_rejected=None,
            epoch=3,
            leader=True,
            time=now,
            tick_seconds=0.02,
            interval_s=self.interval_s,
            last_telemetry_age_s=0.4,
            stream_lag=0,
            dead_letters=0,
            classes=classes,
        )
        self.board.publish(replace(view, **changes))  # type: ignore[arg-type]

    def points(self, pool: str, cls: str, since: float, limit: int, *_: object) -> list[Row]:
        return [row for row in self.rows if row.time > since][-limit:]

    def decisions(self, pool: str, cls: str | None, since: float | None, limit: int) -> list[object]:
        return []

    def decision_changes(self, pool: str, cls: str | None, since: float, limit: int) -> list[dict[str, object]]:
        return self.decided[::-1]

    def alerts(self, pool: str, cls: str | None, since: float | None, limit: int) -> list[dict[str, object]]:
        return self.fired

    def policy_revisions(self, pool: str, limit: int) -> list[dict[str, object]]:
        return self.revisions

    def find_request(self, request_id: str, pool: str | None = None) -> None:
        return None

    def operator_log(self, pool: str, limit: int) -> list[dict[str, object]]:
        return self.ordered[::-1]

    def add_operator_action(
        self, pool: str, traffic_class: str, action: str, who: str, why: str, now: float, amount: float | None = None
    ) -> int:
        row = {"pool": pool, "traffic_class": traffic_class, "action": action, "who": who, "why": why, "time": now}
        self.ordered.append(row | {"id": len(self.ordered) + 1, "amount": amount})
        return len(self.ordered)
