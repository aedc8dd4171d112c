"""A real worker process on the bundled pair, over a real Valkey: what it says on the stream adds up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

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
    command = [sys.executable, "-m", "decoder.cli", "worker", "--redis-url", url, "--worker-id", "w1", *options]
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
        client.delete("lenity:{demo}:lease:default")
        seen = len(of(entries(client), RequestRecord))
        # One request may have begun under the lease and one may be on its way: wait for some after those.
        wait_until(lambda: len(of(entries(client), RequestRecord)) >= seen + 8, timeout=60, every=0.1)
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
    lenient = [r for r in requests if r.lease_seq == 1]
    after = [b for b in blocks if b.lease_seq == 0]
    last_lenient = max(i for i, r in enumerate(records) if isinstance(r, RequestRecord) and r.lease_seq == 1)
    late = of(records[last_lenient + 1 :], RequestRecord)
    assert len(lenient) >= 15 and len(late) >= 4
    assert all(r.rule == "lossless" and r.touches == 0 and r.arm == "untouched" for r in late)
    late_blocks = of(records[last_lenient + 1 :], TokenBlock)
    assert after and all(not b.theta.any() and not np.any(b.flags & TOUCH) for b in late_blocks)
    assert {int(w) for b in late_blocks for w in b.round_width} >= {4}
    assert events(tmp_path)[-1]["event"] == "worker: stopped"
    assert events(tmp_path)[-1]["lossless_fallbacks"] == {"expired": 1}


def test_without_a_stream_server_the_worker_says_so_and_serves_losslessly(tmp_path):
    nowhere = f"unix://{tmp_path}/nobody.sock"
    with worker(tmp_path, nowhere, "--max-requests", "2") as process:
        assert process.wait(60) == 0
    said = {str(e["event"]): e for e in events(tmp_path)}
    assert any("away" in event and "losslessly" in event for event in said)
    end = said["worker: stopped"]
    assert end["served"] == 2 and not end["flushed"] and end["dropped_records"] >= 4


def test_a_model_directory_that_is_missing_is_named(tmp_path):
    with worker(tmp_path, "unix:///nobody.sock", "--target", str(tmp_path / "no-model")) as process:
        assert process.wait(60) == 2
    assert f"no model in {tmp_path / 'no-model'}" in (tmp_path / "worker.log").read_text()


def test_the_workers_metrics_are_served_and_ngram_drafts_work(server, tmp_path, free_port):
    with worker(tmp_path, server.url, "--drafter", "ngram", "--metrics-port", str(free_port)) as process:
        client = connect(server.url)
        wait_until(lambda: len(of(entries(client), RequestRecord)) >= 3, timeout=60, every=0.1)
        with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        process.terminate()
        assert process.wait(20) == 0
    assert 'lenity_worker_requests_total{arm="untouched",traffic_class="default"}' in text
    assert 'lenity_worker_lossless_fallbacks_total{reason="no lease"} 1.0' in text


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
