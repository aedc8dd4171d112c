"""A real worker process on the bundled pair, over a real Valkey: what it says on the stream adds up."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import structlog
from typer.testing import CliRunner

from decoder.cli import app
from storage.embedded import EmbeddedServer
from storage.records import (
    ACCEPTED,
    EXAMINED,
    TOUCH,
    ForkRecord,
    KnobRow,
    Lease,
    QualityScore,
    Record,
    RequestRecord,
    TokenBlock,
    from_fields,
)
from storage.stream import LeaseStore, connect, telemetry_key
from tests.support import wait_until

ROOT = Path(__file__).parents[2]
LEASE = Lease(
    pool="demo", traffic_class="default", epoch=1, seq=1, policy_revision=1, issued=0.0, ttl=60.0, rule="token_v3",
    table=(KnobRow(1, 4, 0.8, 1.0),), holdback=0.3, fork=1.0, label=0.0,
)  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "valkey") as running:
        yield running


@contextmanager
def worker(tmp_path: Path, url: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A worker process; its log is in ``tmp_path/worker.log``. Killed at the end if it still runs."""
    command = [sys.executable, "-m", "decoder.cli", "worker", "--redis-url", url, "--worker-id", "w1"]
    command += ["--traffic", "demo", *options]
    with (tmp_path / "worker.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=log, stdout=log, text=True, env=os.environ | {"LC_ALL": "C"}
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(10)


def events(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "worker.log").read_text().splitlines() if line.startswith("{")]


def entries(client) -> list[Record]:
    return [from_fields(fields) for _, fields in client.xrange(telemetry_key("demo"))]


def of(records: list[Record], kind: type) -> list:
    return [r for r in records if isinstance(r, kind)]


def test_what_the_worker_reports_adds_up_and_it_turns_lossless_when_the_lease_ends(server, tmp_path):
    client = connect(server.url)
    leases = LeaseStore(client)
    leases.write(LEASE)
    with worker(tmp_path, server.url, "--seed", "1") as process:
        wait_until(lambda: len(of(entries(client), RequestRecord)) >= 20, timeout=60, every=0.1)
        leases.write(replace(LEASE, seq=2, ttl=0.4))  # the last one: it runs out by itself
        seen = len(of(entries(client), RequestRecord))
        # Some requests may still begin under the lease: wait for some after those.
        wait_until(lambda: len(of(entries(client), RequestRecord)) >= seen + 20, timeout=60, every=0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    records = entries(client)
    blocks, requests = of(records, TokenBlock), of(records, RequestRecord)

    # Blocks are numbered without gaps, and what they count is what the requests count.
    assert [b.seq for b in blocks] == list(range(len(blocks)))
    flags = np.concatenate([b.flags for b in blocks])
    touched = [r for r in requests if r.touches]
    assert np.count_nonzero(flags & TOUCH) == sum(r.touches for r in requests)
    assert sum(int(b.round_emitted.sum()) for b in blocks) == sum(r.tokens for r in requests)
    assert sum(b.round_rows.size for b in blocks) == sum(r.target_passes for r in requests)
    assert not np.any((flags & ACCEPTED).astype(bool) & ~(flags & EXAMINED).astype(bool))
    assert len(touched) >= 5 and all(r.fork_drawn and r.arm != "untouched" for r in touched)

    # Every touched request was forked and scored twice; every other one once.
    forks = {f.request_id: f for f in of(records, ForkRecord)}
    branches = {(s.request_id, s.branch) for s in of(records, QualityScore)}
    assert set(forks) == {r.request_id for r in touched}
    done = {name for name, fork in forks.items() if fork.done}
    assert len(done) >= len(forks) - 1
    assert branches == {(r.request_id, "served") for r in requests} | {(name, "fork") for name in done}

    # A request comes after the blocks of its rounds.
    tokens = asked = 0
    for record in records:
        tokens += int(record.round_emitted.sum()) if isinstance(record, TokenBlock) else 0
        asked += record.tokens if isinstance(record, RequestRecord) else 0
        assert tokens >= asked

    # After the lease: no knob, no touch, the block length stays.
    lenient = [r for r in requests if r.lease_seq > 0]
    after = [b for b in blocks if b.lease_seq == 0]
    last_lenient = max(i for i, r in enumerate(records) if isinstance(r, RequestRecord) and r.lease_seq > 0)
    late = of(records[last_lenient + 1 :], RequestRecord)
    assert len(lenient) >= 15 and len(late) >= 4
    assert all(r.rule == "lossless" and r.touches == 0 and r.arm == "untouched" for r in late)
    late_blocks = of(records[last_lenient + 1 :], TokenBlock)
    assert after and all(not b.theta.any() and not np.any(b.flags & TOUCH) for b in late_blocks)
    assert {int(w) for b in late_blocks for w in b.round_width} >= {4}
    assert events(tmp_path)[-1]["event"] == "worker: stopped"
    assert events(tmp_path)[-1]["lossless_fallbacks"] == {"expired": 1}


def test_an_outage_is_survived_losslessly_and_said(tmp_path, free_port):
    """No server, then a lease, then the server is killed: the worker serves all the while."""

    def metrics() -> dict[str, float]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return {}
        return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def served() -> float:
        return sum(v for k, v in metrics().items() if k.startswith("lenity_worker_requests_total"))

    leased = 'lenity_worker_leased{class="default"}'
    fallbacks = 'lenity_worker_lossless_fallbacks_total{reason="%s"}'
    server = EmbeddedServer(tmp_path / "valkey")
    with worker(tmp_path, server.url, "--drafter", "ngram", "--metrics-port", str(free_port)) as process:
        wait_until(lambda: served() >= 2, timeout=60, every=0.1)
        assert metrics()[leased] == 0 and metrics()[fallbacks % "unreachable"] == 1
        with server:
            client = connect(server.url)
            LeaseStore(client).write(replace(LEASE, ttl=2.0))
            wait_until(lambda: metrics()[leased] == 1, timeout=10, every=0.02)
            wait_until(lambda: of(entries(client), RequestRecord), timeout=20, every=0.1)
        wait_until(lambda: metrics()[leased] == 0, timeout=10, every=0.05)
        before = served()
        wait_until(lambda: served() >= before + 2, timeout=30, every=0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    said = {str(e["event"]): e for e in events(tmp_path)}
    assert any("away" in event and "losslessly" in event for event in said)
    end = said["worker: stopped"]
    assert not end["flushed"] and end["dropped_records"] >= 2
    assert end["lossless_fallbacks"]["unreachable"] == 2


def test_a_model_directory_that_is_missing_is_named(tmp_path):
    log = structlog.get_config()
    try:
        done = CliRunner().invoke(
            app,
            ["worker", "--redis-url", "unix:///nobody.sock", "--traffic", "demo", "--target", str(tmp_path / "no")],
        )
    finally:
        structlog.configure(**log)
    assert done.exit_code == 2 and f"no model in {tmp_path / 'no'}" in done.output


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--redis-url", "gopher://x", "--traffic", "demo"], "stream server URL"),
        (["--redis-url", "unix:///nobody.sock"], "exactly one"),
        (["--redis-url", "unix:///nobody.sock", "--traffic", "demo", "--serve", "127.0.0.1:0"], "exactly one"),
        (["--redis-url", "unix:///nobody.sock", "--serve", "8000"], "HOST:PORT"),
        (["--redis-url", "unix:///nobody.sock", "--pool", "a pool"], "not a short name"),
        (["--redis-url", "unix:///nobody.sock", "--traffic", "http"], "demo"),
        ([], "--redis-url"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_with_the_reason(options: list[str], complaint: str):
    log = structlog.get_config()
    try:
        done = CliRunner().invoke(app, ["worker", *options])
    finally:
        structlog.configure(**log)
    assert done.exit_code == 2 and complaint in done.output


@pytest.fixture
def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
