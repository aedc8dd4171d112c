"""What the controller takes in on one core: ``python -m bench.ingest [--quick] --json``.

A real stream server (the embedded Valkey), a real history (SQLite in a new directory) and the controller's own loop;
blocks of 512 drafted positions with every column, in batches of eight rows, four workers, two classes.

    token_samples_per_s   drafted positions per CPU second of the process that reads, estimates, decides and saves,
                          database and stream client included; the blocks were on the stream before (goal 500,000)
    p99_block_to_lease_ms from a block's arrival on the stream to the lease that knows of it, at a 250 ms tick
                          (goal 600)
    rss_mb, rss_growth_mb memory after seven simulated days of 20 pools, and how much of it came after the second day
                          (goal 300, flat); a tick is half an hour long there
    db_mb_per_pool_day    what a day of one pool with one request a second adds at a tick of a second, before anything
                          is removed
    restart_s             from starting the process with 20 pools to its being ready with all they knew (goal 5)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from controller.desk import Desk
from controller.loop import LoopConfig, PoolLoop
from controller.saver import Saver
from controller.view import Board
from policies.reload import PolicyFile
from storage.embedded import EmbeddedServer
from storage.history import History
from storage.records import (
    ACCEPTED,
    EXAMINED,
    Lease,
    QualityScore,
    Record,
    RequestRecord,
    TokenBlock,
    to_fields,
)
from storage.spool import Spool
from storage.stream import LeaseStore, StreamReader, StreamWriter, connect, telemetry_key

POLICY = """\
version: lenity/v1
pool: {pool}
objective: {{metric: answer_correct, max_loss: 0.02, window: 28d}}
"""
GOALS = {"token_samples_per_s": 500_000, "p99_block_to_lease_ms": 600, "rss_mb": 300, "restart_s": 5}
POSITIONS, ROWS, G, WORKERS = 512, 8, 8, 4
PORTION = 500  # blocks in a tick of 250 ms at about a million positions a second
DAY = 86_400.0


def a_block(pool: str, seq: int, rng: np.random.Generator) -> TokenBlock:
    """Eight batched rounds of eight rows that drafted eight tokens each; workers and classes take turns."""
    rounds = POSITIONS // G
    timed = np.arange(rounds) % ROWS == 0
    target, draft = rng.random((2, POSITIONS), dtype=np.float32)
    accept = rng.random(POSITIONS) < 0.8
    alive = np.logical_and.accumulate(accept.reshape(rounds, G), axis=1)
    examined = np.concatenate((np.ones((rounds, 1), bool), alive[:, :-1]), axis=1).ravel()
    flags = (EXAMINED * examined + ACCEPTED * (examined & accept)).astype(np.uint8)
    seconds = {
        f"round_{part}_s": np.where(timed, mean * rng.lognormal(0, 0.05, rounds), 0).astype(np.float32)
        for part, mean in (("draft", 0.008), ("verify", 0.02), ("overhead", 0.001))
    }
    return TokenBlock(
        pool=pool,
        traffic_class=("default", "code")[seq // WORKERS % 2],
        worker=f"w{seq % WORKERS}",
        boot="b1",
        seq=seq // WORKERS,
        epoch=1,
        lease_seq=1,
        rule="threshold",
        rho=1.0,
        round_rows=np.where(timed, ROWS, 0).astype(np.uint16),
        round_width=np.full(rounds, G, np.uint16),
        round_emitted=(alive.sum(axis=1) + 1).astype(np.uint32),
        round_prefill=np.zeros(rounds, np.uint32),
        request=np.repeat(np.arange(rounds) % ROWS, G).astype(np.uint16),
        round=np.repeat(np.arange(rounds), G).astype(np.uint32),
        position=(np.arange(POSITIONS) % G + 1).astype(np.uint8),
        target_prob=target,
        draft_prob=draft,
        target_prob_raw=target,
        draft_prob_raw=draft,
        target_max_raw=np.maximum(target, 0.6),
        draft_max_raw=np.maximum(draft, 0.6),
        tv=np.full(POSITIONS, 0.2, np.float32),
        theta=np.full(POSITIONS, 0.5, np.float32),
        flags=flags,
        **seconds,
    )


def requests_of(pool: str, first: int, count: int, now: float, rng: np.random.Generator) -> list[Record]:
    """Finished requests; a tenth was touched, its label drawn and given."""
    made: list[Record] = []
    for i in range(first, first + count):
        touched = bool(rng.random() < 0.1)
        made.append(
            RequestRecord(
                request_id=f"{pool}-{i}", pool=pool, traffic_class="default", worker="w0", boot="b1", epoch=1,
                lease_seq=1, rule="threshold", theta=0.5, rho=1.0, arm="lenient" if touched else "untouched",
                holdback_prob=0.1, fork_prob=0.1, label_prob=1.0, fork_drawn=False, label_drawn=touched,
                touches=int(touched), first_touch_at=now if touched else None, started=now, prompt_tokens=200,
                tokens=200, target_passes=50, first_token_s=0.1, total_s=2.0, finish_reason="stop",
            )
        )  # fmt: skip
        if touched:
            label = ("answer_correct", float(rng.random() < 0.9), "judge", "1", now)
            made.append(QualityScore(f"{pool}-{i}", pool, "default", "served", *label))
    return made


class Rig:
    """A directory with policies, a database, and loops made from them."""

    def __init__(self, directory: Path, config: LoopConfig):
        self.directory, self.config = directory, config
        self.url = f"sqlite:///{directory / 'h.db'}"
        self.history = History(self.url)
        self.history.upgrade()
        self.saving = Desk("save")
        (directory / "policies").mkdir()

    def loop(self, pool: str, reader: Any, leases: Any, now: float) -> PoolLoop:
        """A loop of a pool of its own."""
        path = self.directory / "policies" / f"{pool}.yaml"
        path.write_text(POLICY.format(pool=pool))
        saver = Saver(self.history, Spool(self.directory / f"{pool}.ticks"), self.saving)
        return PoolLoop(
            PolicyFile(path), reader, leases, self.history, Board(), epoch=self.history.claim_epoch(pool, "bench", now),
            config=self.config, now=now, saver=saver,
        )  # fmt: skip

    def close(self) -> None:
        self.saving.close(10.0)
        self.history.close()


# -- how much and how soon ---------------------------------------------------------------------------------------------


def fill(url: str, pool: str, count: int) -> None:
    """Put blocks on the stream; a process of its own, so that its work is not measured."""
    client, rng = connect(url), np.random.default_rng(1)
    ready = [a_block(pool, seq, rng) for seq in range(64)]
    writer = StreamWriter(client, pool)
    for first in range(0, count, 32):
        blocks = [ready[n % 64] for n in range(first, min(count, first + 32))]
        numbered = range(first, first + len(blocks))
        writer.append([replace(b, seq=n // WORKERS) for b, n in zip(blocks, numbered, strict=True)])
    client.close()


def throughput(directory: Path, server: EmbeddedServer, count: int) -> dict[str, Any]:
    """Drafted positions per CPU second while there is more on the stream than the loop can take."""
    rig, client = Rig(directory, LoopConfig(tick_s=0.25, ttl_s=2.0)), connect(server.url)
    loop = rig.loop("full", Portions(StreamReader(client, "full")), LeaseStore(client), 0.0)
    filler = multiprocessing.get_context("spawn").Process(target=fill, args=(server.url, "full", count))
    filler.start()
    filler.join()
    now, ticks = 1000.0, []
    loop.tick(now)  # the first tick builds tables and fills caches
    before, cpu, wall = _drafted(loop), time.process_time(), time.perf_counter()
    while int(client.xinfo_groups(telemetry_key("full"))[0]["lag"] or 0) > 0:  # type: ignore[index]
        began, now = time.perf_counter(), now + 0.25
        loop.tick(now)
        ticks.append(time.perf_counter() - began)
    spent, took = time.process_time() - cpu, time.perf_counter() - wall
    samples = _drafted(loop) - before
    client.close()
    rig.close()
    assert _drafted(loop) == count * POSITIONS, "every block is counted once"
    return {
        "token_samples_per_s": round(samples / spent),
        "token_samples_per_wall_s": round(samples / took),
        "largest_tick_s": round(max(ticks), 3),
    }


def _drafted(loop: PoolLoop) -> float:
    return sum(steer.totals.get("drafted", 0.0) for steer in loop.classes.values())


class Portions:
    """A reader that gives as many blocks at a time as come in a tick at a million positions a second."""

    def __init__(self, reader: StreamReader):
        self._reader, self._given = reader, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read(self, max_entries: int = 1000, block_ms: int = 0) -> list[tuple[str, dict[bytes, bytes]]]:
        self._given = not self._given
        return self._reader.read(PORTION) if self._given else []


class Noting:
    """A reader that remembers which entries came in this tick."""

    def __init__(self, reader: StreamReader):
        self._reader, self.ids = reader, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read(self, max_entries: int = 1000, block_ms: int = 0) -> list[tuple[str, dict[bytes, bytes]]]:
        entries = self._reader.read(max_entries, block_ms)
        self.ids += [entry_id for entry_id, _ in entries]
        return entries


def latency(directory: Path, server: EmbeddedServer, seconds: float, per_second: int = 100) -> dict[str, Any]:
    """From arrival to the lease, with blocks coming evenly and a tick every 250 ms."""
    rig, client = Rig(directory, LoopConfig(tick_s=0.25, ttl_s=2.0)), connect(server.url)
    reader = Noting(StreamReader(client, "timed"))
    loop = rig.loop("timed", reader, LeaseStore(client), time.time())
    rng = np.random.default_rng(2)
    writer = StreamWriter(connect(server.url), "timed")
    blocks = [a_block("timed", seq, rng) for seq in range(64)]
    late: list[float] = []
    began, sent = time.monotonic(), 0
    next_tick = began + 0.25
    while (now := time.monotonic()) < began + seconds:
        while sent < (now - began) * per_second:
            writer.append([replace(blocks[sent % 64], seq=sent // WORKERS)])
            sent += 1
        if now >= next_tick:
            next_tick += 0.25
            reader.ids.clear()
            loop.tick(time.time())
            leased = time.time() * 1000
            late += [leased - int(entry_id.split("-")[0]) for entry_id in reader.ids]
        time.sleep(0.001)
    client.close()
    rig.close()
    return {"p99_block_to_lease_ms": round(float(np.percentile(late, 99)), 1), "blocks_timed": len(late)}


# -- for how long ------------------------------------------------------------------------------------------------------


class Memory:
    """A stream and a lease store in memory, for days that are simulated."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, dict[bytes, bytes]]] = []
        self.careful, self.set_aside, self.lost = False, list[str](), 0
        self._number = 0

    def put(self, records: list[Record]) -> None:
        for record in records:
            self._number += 1
            self.waiting.append((f"{self._number}-0", to_fields(record)))

    def read(self, max_entries: int = 1000, block_ms: int = 0) -> list[tuple[str, dict[bytes, bytes]]]:
        taken, self.waiting = self.waiting[:max_entries], self.waiting[max_entries:]
        return taken

    def ack(self, ids: list[str]) -> None: ...
    def ack_up_to(self, entry_id: str) -> None: ...
    def dead_letter(self, entry_id: str, fields: Mapping[bytes, bytes], reason: str) -> None: ...
    def write(self, lease: Lease) -> None: ...
    def lag(self) -> int:
        return len(self.waiting)


def week(directory: Path, pools: int, tick_s: float) -> dict[str, Any]:
    """Memory of the process over seven days of ``pools`` pools."""
    rig, rng = Rig(directory, LoopConfig(tick_s=tick_s, ttl_s=3 * tick_s)), np.random.default_rng(3)
    start = 1_800_000_000.0
    streams = [Memory() for _ in range(pools)]
    loops = [rig.loop(f"pool-{i}", stream, stream, start) for i, stream in enumerate(streams)]
    seen: dict[int, float] = {}
    for step in range(int(7 * DAY / tick_s)):
        now = start + step * tick_s
        for i, (loop, stream) in enumerate(zip(loops, streams, strict=True)):
            stream.put([a_block(f"pool-{i}", 8 * step + n, rng) for n in range(2)])
            stream.put(requests_of(f"pool-{i}", 20 * step, 20, now, rng))
            loop.tick(now)
        seen[int((now - start) // DAY)] = _rss_mb()
    rig.close()
    return {"rss_mb": round(seen[6], 1), "rss_growth_mb": round(seen[6] - seen[1], 1)}


def growth(directory: Path, ticks: int) -> dict[str, Any]:
    """What the database grows by in a day, from ``ticks`` ticks of a second each."""
    rig, rng, stream = Rig(directory, LoopConfig()), np.random.default_rng(4), Memory()
    now = 1_800_000_000.0
    loop = rig.loop("pool", stream, stream, now)
    sizes = {}
    for step in range(2 * ticks):
        stream.put([a_block("pool", 4 * step + n, rng) for n in range(2)])
        stream.put(requests_of("pool", step, 1, now + step, rng))
        loop.tick(now + step)
        if step + 1 in (ticks, 2 * ticks):
            sizes[step + 1] = _database_mb(rig)
    rig.close()
    per_tick = (sizes[2 * ticks] - sizes[ticks]) / ticks
    return {"db_mb_per_pool_day": round(per_tick * DAY, 1)}


def _database_mb(rig: Rig) -> float:
    with rig.history.database.reading("size") as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        free = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
        size = connection.exec_driver_sql("PRAGMA page_size").scalar_one()
    return float((pages - free) * size) / 1e6


def restart(directory: Path, server: EmbeddedServer, pools: int) -> dict[str, Any]:
    """Seconds until a controller of ``pools`` pools is ready again after SIGKILL."""
    (directory / "policies").mkdir()
    for i in range(pools):
        (directory / "policies" / f"p{i}.yaml").write_text(POLICY.format(pool=f"again-{i}"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = {"--policy": directory / "policies", "--redis-url": server.url, "--port": port, "--tick": 1, "--ttl": 5}
    options |= {"--database": f"sqlite:///{directory / 'h.db'}", "--spool": directory / "spool"}
    command = [sys.executable, "-m", "controller.cli", "controller", *(str(p) for kv in options.items() for p in kv)]
    with _running(command) as first:
        _until(lambda: _all_led(port, pools), 120)
        rng, client = np.random.default_rng(5), connect(server.url)
        for i in range(pools):
            StreamWriter(client, f"again-{i}").append([a_block(f"again-{i}", n, rng) for n in range(8)])
        client.close()
        time.sleep(2.5)
        first.send_signal(signal.SIGKILL)
        first.wait()
    began = time.perf_counter()
    with _running(command):
        _until(lambda: _all_led(port, pools), 60)
        return {"restart_s": round(time.perf_counter() - began, 2)}


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def _all_led(port: int, pools: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/pools", timeout=2) as answer:
            views = json.load(answer)["pools"]
    except (urllib.error.URLError, OSError):
        return False
    return sum(view["leader"] for view in views) == pools


def _until(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit("the controller did not become ready")
        time.sleep(0.02)


def _rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    """Print the figures, as one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller samples: within 45 seconds")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    structlog.configure(processors=[_drop])
    quick = args.quick
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="lenity-bench-") as temporary:
        root = Path(temporary)
        directories = [root / name for name in ("stream", "full", "timed", "week", "growth", "again")]
        for directory in directories[1:]:
            directory.mkdir()
        stream, full, timed, days, grown, again = directories
        # First, so that nothing else counts as memory of the pools.
        found |= week(days, 20, 8 * 3600.0 if quick else 1800.0)
        with EmbeddedServer(stream) as server:
            found |= throughput(full, server, 6_000 if quick else 15_000)
            found |= latency(timed, server, 5.0 if quick else 30.0)
            found |= growth(grown, 60 if quick else 600)
            found |= restart(again, server, 20)
    found |= {"quick": quick, "goals": GOALS}
    print(json.dumps(found) if args.json else "\n".join(f"{name}: {value}" for name, value in found.items()))


def _drop(logger: Any, method: str, event: Any) -> Any:
    raise structlog.DropEvent


if __name__ == "__main__":
    main()
