"""A small stream for a controller of the documents: ordinary traffic first, then answers that leniency ruins."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from storage.records import ForkRecord, Lease, QualityScore, Record, RequestRecord
from storage.stream import LeaseStore, StreamWriter, connect
from tests.docs.commands import free_ports
from tests.support import wait_until
from tests.support_blocks import coin_scalars, make_block

METRIC = "answer_correct"
POOL = "chat-7b"
TOKEN = "a-token-of-sixteen-or-more"
# No paging rule, so that it is the spent budget that shows; short, so that few requests spend it.
POLICY = f"""\
version: lenity/v1
pool: {POOL}
objective: {{metric: {METRIC}, max_loss: 1%, window: 10m}}
pull_back: {{cooldown: 5m}}
evidence: {{min_labels: 50, label_deadline: 5m}}
alerts: {{page: []}}
"""


def rounds(pool: str, count: int = 8) -> list[Record]:
    """Blocks of rounds of four drafted tokens, accepted with probability .6 to 1: enough to know what they cost."""
    rng = np.random.default_rng(7)
    return [
        make_block(coin_scalars(rng.uniform(0.6, 1.0, 160)), np.full(40, 4), rng=rng, pool=pool, seq=i)
        for i in range(count)
    ]


def requests(pool: str, lease: Lease, now: float, touched: int, untouched: int, loss: float) -> Iterator[Record]:
    """Requests under ``lease``; of the touched ones, each forked and scored, a share of ``loss`` lost everything."""
    for i in range(touched + untouched):
        is_touched, name = i < touched, f"r{lease.seq}-{i}"
        yield RequestRecord(
            request_id=name,
            pool=pool,
            traffic_class="default",
            worker="w0",
            boot="b0",
            epoch=lease.epoch,
            lease_seq=lease.seq,
            rule=lease.rule if is_touched else "lossless",
            theta=lease.table[0].theta,
            rho=lease.table[0].rho,
            arm="lenient" if is_touched else "untouched",
            holdback_prob=lease.holdback if is_touched else 0.0,
            fork_prob=1.0 if is_touched else 0.0,
            label_prob=0.0,
            fork_drawn=is_touched,
            label_drawn=False,
            touches=int(is_touched),
            first_touch_at=now if is_touched else None,
            started=now,
            prompt_tokens=12,
            tokens=60,
            target_passes=20,
            first_token_s=0.02,
            total_s=0.5,
            finish_reason="stop",
        )
        if not is_touched:
            continue
        yield ForkRecord(name, pool, "default", "w0", "b0", True, 0, 60, 20, 0.5)
        for branch, score in (("served", float(i >= loss * touched)), ("fork", 1.0)):
            yield QualityScore(name, pool, "default", branch, METRIC, score, "judge", "1", now)  # type: ignore[arg-type]


@contextmanager
def spent_pool(directory: Path, redis_url: str) -> Iterator[dict[str, str]]:
    """A controller of the pool `POOL` whose budget has been spent; yields the variables that commands need."""
    (directory / "policy.yaml").write_text(POLICY)
    (directory / "tokens").write_text(f"operator sam {TOKEN}\n")
    (directory / "token").write_text(TOKEN)
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "controller.cli", "controller", "--policy", "policy.yaml", "--port", port,
               "--redis-url", redis_url, "--database", "sqlite:///lenity.db", "--tokens-file", "tokens",
               "--tick", "0.25", "--ttl", "5", "--log-format", "json"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, env=environment)
    client = connect(redis_url)
    try:
        spend(url, StreamWriter(client, POOL), LeaseStore(client), directory / "log")
        yield {"LENITY_URL": url, "LENITY_TOKEN_FILE": str(directory / "token"), "LENITY_REDIS_URL": redis_url}
    finally:
        process.terminate()
        process.wait(30)
        for key in client.keys(f"lenity:{{{POOL}}}:*"):
            client.delete(key)
        client.close()


def spend(url: str, writer: StreamWriter, leases: LeaseStore, log: Path) -> None:
    """Feed rounds until leniency opens, then touched requests that lose everything until the budget is spent."""

    def seen() -> dict[str, Any]:
        try:
            answer = httpx.get(f"{url}/v1/pools/{POOL}", timeout=5)
            return dict(answer.json()["classes"][0]) if answer.status_code == 200 else {}
        except (httpx.HTTPError, IndexError):
            return {}

    def lease() -> Lease:
        found = wait_until(lambda: leases.read(POOL, "default"), timeout=60)
        assert found is not None
        return found[0]

    def spent() -> bool:
        if seen().get("reason") == "exhausted":
            return True
        writer.append(list(requests(POOL, lease(), time.time(), 40, 0, 1.0)))
        return False

    try:
        wait_until(seen, timeout=120, every=0.2)
        writer.append(rounds(POOL))
        writer.append(list(requests(POOL, lease(), time.time(), 0, 20, 0.0)))
        wait_until(lambda: seen().get("theta", 0) > 0, timeout=60, every=0.2)
        wait_until(spent, timeout=60, every=0.5)
    except AssertionError as e:
        raise AssertionError(f"{e}; the controller's log ends:\n{log.read_text()[-2000:]}") from e
