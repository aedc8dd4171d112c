"""Labels and orders, all the way: over HTTP, through stream and database, into what the loop decides."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from controller.loop import LoopConfig
from controller.service import Service, ServiceConfig
from controller.view import ClassView
from storage.embedded import EmbeddedServer
from storage.stream import StreamWriter, connect
from tests.support import wait_until
from tests.support_blocks import coin_scalars, make_block
from tests.support_storage import a_fork, a_request, touched

POOL = "judged"
POLICY = f"""\
version: lenity/v1
pool: {POOL}
objective: {{metric: correct, max_loss: 0.2, window: 10m}}
leniency: {{rules: [token_v3]}}
evidence: {{min_labels: 40, label_deadline: 2m, fork_cold: 1}}
block: {{max: 8}}
pull_back: {{cooldown: 1m}}
alerts: {{page: []}}
"""
OPERATOR, LABELLER = "operator-secret-0001", "labeller-secret-0001"


class Judged:
    """A service ticked by hand, and its API."""

    def __init__(self, service: Service, writer: StreamWriter):
        self.service, self.writer = service, writer
        self.now = service.clock.now()

    def tick(self) -> bool:
        self.now += 0.25
        self.service.tick(self.now)
        return POOL in [loop.pool for loop in self.service.loops]

    def until(self, reached: Any) -> ClassView:
        """Tick until the class's view is as wanted."""

        def there() -> ClassView | None:
            self.tick()
            view = self.service.board.pool(POOL)
            return view.classes[0] if view is not None and view.classes and reached(view.classes[0]) else None

        found = wait_until(there, timeout=30)
        assert found is not None
        return found

    def ask(self, method: str, path: str, token: str = OPERATOR, body: Any = None) -> Any:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.service.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://lenity") as client:
                return await client.request(method, path, json=body, headers={"authorization": f"Bearer {token}"})

        answer = asyncio.run(send())
        assert answer.is_success, answer.text
        return answer.json()


@pytest.fixture
def judged(valkey: EmbeddedServer, tmp_path: Path) -> Iterator[Judged]:
    """A pool whose leniency has opened, certified, and 60 touched requests that were forked and have no label yet."""
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "tokens").write_text(f"operator alice {OPERATOR}\nlabeller judge {LABELLER}\n")
    config = ServiceConfig(
        valkey.url,
        f"sqlite:///{tmp_path / 'h.db'}",
        (tmp_path / "policy.yaml",),
        loop=LoopConfig(ttl_s=60.0),
        tokens_file=tmp_path / "tokens",
    )
    service, client = Service(config), connect(valkey.url)
    judged = Judged(service, StreamWriter(client, POOL))
    wait_until(judged.tick, timeout=30)
    rng = np.random.default_rng(7)
    judged.writer.append(
        [
            make_block(coin_scalars(rng.uniform(0.6, 1.0, 160)), np.full(40, 4), rng=rng, pool=POOL, seq=i)
            for i in range(10)
        ]
    )
    judged.writer.append([a_request(POOL, f"before-{i}") for i in range(20)])
    lease = judged.until(lambda c: c.theta > 0).lease
    assert lease is not None
    for i in range(60):
        made = touched(
            POOL,
            f"r{i}",
            epoch=lease.epoch,
            lease_seq=lease.seq,
            rule=lease.rule,
            touches=1,
            fork_drawn=True,
            fork_prob=1.0,
            first_touch_at=judged.now,
            started=judged.now,
        )
        judged.writer.append([made, replace(a_fork(POOL, f"r{i}"), done=True)])
    yield judged
    service.close()
    client.delete(*client.keys(f"lenity:{{{POOL}}}:*"))
    client.close()


def test_a_judge_labels_what_is_wanted(judged: Judged) -> None:
    """It asks, scores both branches blind, the evidence grows by as much; sending all of it again changes nothing."""
    judged.until(lambda c: c.requests_in_window >= 80)
    wanted = judged.ask("GET", f"/v1/quality/wanted?pool={POOL}", LABELLER)["wanted"]
    assert {w["request_id"] for w in wanted} == {f"r{i}" for i in range(60)}
    assert {tuple(sorted(w["branches"])) for w in wanted} == {("fork", "served")}
    assert len({tuple(w["branches"]) for w in wanted}) == 2, "in random order"
    labels = [
        {"request_id": w["request_id"], "branch": branch, "metric": w["metric"], "score": 1, "scorer_version": "v1"}
        for w in wanted
        for branch in w["branches"]
    ]
    assert judged.ask("POST", "/v1/quality", LABELLER, {"labels": labels})["accepted"] == 120
    view = judged.until(lambda c: c.forks_matured > 0)
    assert judged.until(lambda c: c.forks_matured >= 60).forks_matured == 60
    assert view.state in ("measured", "insufficient data")
    assert judged.ask("GET", f"/v1/quality/wanted?pool={POOL}", LABELLER)["wanted"] == []
    assert judged.ask("POST", "/v1/quality", LABELLER, {"labels": labels})["duplicates"] == 120


def test_orders_are_obeyed_and_shown(judged: Judged) -> None:
    """Lossless until resumed; who and why stand in the view, in the reasons, and on the record."""
    path = f"/v1/pools/{POOL}/actions"
    judged.ask("POST", path, body={"action": "lossless", "why": "wrong sums reported"})
    view = judged.until(lambda c: c.override is not None)
    assert (view.override, view.override_who, view.theta, view.reason) == ("lossless", "alice", 0, "forced_lossless")
    (why,) = judged.ask("GET", f"/v1/pools/{POOL}/why")
    assert "ordered by alice: wrong sums reported" in why["sentences"][0]
    assert why["returns"] == "Only when an operator resumes it."
    judged.ask("POST", path, body={"action": "freeze", "traffic_class": "default", "why": "wait for the night"})
    assert judged.until(lambda c: c.override == "freeze").theta == 0
    judged.ask("POST", path, body={"action": "resume", "why": "the sums are right"})
    assert judged.until(lambda c: c.override is None and c.theta > 0).reason != "frozen"
    assert [row["action"] for row in judged.ask("GET", path)] == ["resume", "freeze", "lossless"]
    changed = judged.ask("GET", f"/v1/pools/{POOL}/decisions?changes=true&brief=true")
    assert "forced_lossless" in [row["reason"] for row in changed]
