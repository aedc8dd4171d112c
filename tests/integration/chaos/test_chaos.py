"""Fifty random SIGKILLs under load: nothing accepted is lost, nothing counts twice, and no lease goes back."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.ingest import Boot
from controller.seating import place_of
from storage.connection import dead_key, lease_key
from storage.history import History
from storage.seats import Seat, SeatStore
from storage.stream import StreamReader, StreamWriter, connect
from tests.integration.chaos import parts
from tests.integration.chaos.parts import POOL, POSITIONS, TTL_S, Postgres, StreamServer
from tests.support import wait_until
from tests.support_control import POLICY
from tests.support_storage import a_block

KILLS, PAUSES, SEED = 50, 3, 20260
ROUNDING_S = 0.002  # leases end on whole milliseconds of the server's clock


class Fleet:
    """Two workers, two controllers, a stream server and a database, each of which can be killed and started again."""

    def __init__(self, directory: Path, postgres: Postgres):
        self.directory, self.postgres = directory, postgres
        (directory / "policy.yaml").write_text(POLICY.format(pool=POOL))
        (directory / "stream").mkdir()
        self.stream = StreamServer(directory / "stream")
        self.stream.start()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.integration.chaos.parts"])
        self.processes: dict[str, Any] = {}
        for name in ("c1", "c2", "w1", "w2"):
            self.start(name)

    def start(self, name: str) -> None:
        """Start one of the processes."""
        if name.startswith("w"):
            process = self._context.Process(
                target=parts.worker, args=(name, self.stream.url, self.directory / f"{name}.ledger"), daemon=True
            )
        else:
            process = self._context.Process(
                target=parts.controller, args=(name, self.stream.url, self.postgres.url, self.directory), daemon=True
            )
        process.start()
        self.processes[name] = process

    def kill(self, name: str) -> None:
        """SIGKILL, and start again."""
        if name == "stream":
            self.stream.kill()
            self.stream.start()
        elif name == "database":
            self.postgres.kill()
            self.postgres.start()
        else:
            self.processes[name].kill()
            self.processes[name].join()
            self.start(name)

    def end(self, *names: str) -> None:
        """SIGTERM, and wait."""
        for name in names:
            self.processes[name].terminate()
        for name in names:
            self.processes[name].join(60)
            assert self.processes[name].exitcode == 0, f"{name} did not end cleanly"

    def close(self) -> None:
        """End whatever still runs."""
        for process in self.processes.values():
            process.kill()
            process.join()
        self.stream.kill()

    def ledger(self) -> dict[str, list[list[Any]]]:
        """What the workers wrote down, by kind; the last line of a killed one may be torn."""
        lines: dict[str, list[list[Any]]] = defaultdict(list)
        for name in ("w1", "w2"):
            path = self.directory / f"{name}.ledger"
            for line in path.read_text().splitlines() if path.exists() else ():
                try:
                    kind, *values = json.loads(line)
                except ValueError:
                    continue
                lines[kind].append([name, *values])
        return lines

    def accepted(self) -> int:
        """How many blocks the server has taken."""
        return sum(
            path.read_text().count('"accepted"')
            for path in (self.directory / f"{name}.ledger" for name in ("w1", "w2"))
            if path.exists()
        )


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    with Postgres() as postgres:
        made = Fleet(tmp_path, postgres)
        yield made
        made.close()


@pytest.mark.peer("postgresql")
@pytest.mark.timeout(600)
def test_nothing_is_lost_and_nothing_counts_twice_over_fifty_kills(fleet: Fleet) -> None:
    """Controllers, workers, stream server and database, in random order, and three leaders that are paused."""
    rng = np.random.default_rng(SEED)
    client = connect(fleet.stream.url)
    seats = SeatStore(client)

    def until_accepted(more: int) -> None:
        goal = fleet.accepted() + more
        wait_until(lambda: fleet.accepted() >= goal, timeout=60)

    def leader() -> Seat | None:
        """Who leads under an epoch of its own, and not only sits down to claim one."""
        seat = _safely(lambda: seats.attend(POOL, "onlooker:0:x", 0.2))
        return seat if seat is not None and seat.epoch > 0 and place_of(seat.holder) in fleet.processes else None

    until_accepted(10)
    plan = [*rng.choice(["c1", "c2", "w1", "w2", "stream", "database"], KILLS), *["pause"] * PAUSES]
    rng.shuffle(plan)
    for victim in plan:
        if victim == "pause":
            _pause(fleet, leader)
        else:
            fleet.kill(victim)
        until_accepted(int(rng.integers(1, 25)))

    fleet.end("w1", "w2")
    wait_until(lambda: _safely(lambda: parts.unsettled(client) == 0), timeout=90, every=0.1)
    fleet.end("c1", "c2")
    assert client.xlen(dead_key(POOL)) == 0, "nothing is set aside for having been delivered often"
    _check_counts(fleet)
    _check_leases(fleet)
    wait_until(lambda: not client.exists(lease_key(POOL, "default")), timeout=10 * TTL_S)
    client.close()


def test_what_nobody_has_read_is_not_settled(tmp_path: Path) -> None:
    """What the end of the test above waits for: nothing is pending either while no controller reads."""
    server = StreamServer(tmp_path)
    server.start()
    try:
        client = connect(server.url)
        writer, reader = StreamWriter(client, POOL), StreamReader(client, POOL)
        writer.append([a_block(POOL, seq=seq) for seq in range(3)])
        assert parts.unsettled(client) == 3
        ids = [entry_id for entry_id, _ in reader.read(2)]
        assert parts.unsettled(client) == 3
        reader.ack(ids)
        assert parts.unsettled(client) == 1
        server.kill()
        server.start()
        assert parts.unsettled(client) == 1
        reader.ack([entry_id for entry_id, _ in reader.read()])
        assert parts.unsettled(client) == 0
        client.close()
    finally:
        server.kill()


def _pause(fleet: Fleet, leader: Callable[[], Seat | None]) -> None:
    """Stop the leader until the other one leads, then let it go on; what it still wants to do is refused."""
    before = wait_until(leader, timeout=60)
    assert before is not None and before.holder is not None
    process = fleet.processes[place_of(before.holder)].pid
    os.kill(process, signal.SIGSTOP)
    try:
        wait_until(lambda: (now := leader()) is not None and now.epoch > before.epoch, timeout=60)
    finally:
        os.kill(process, signal.SIGCONT)


def _check_counts(fleet: Fleet) -> None:
    """Every accepted block and request is in the state and in the database once, and nothing that was not sent."""
    history = History(fleet.postgres.url)
    saved = history.load_snapshot(POOL)
    assert saved is not None
    state, ledger = saved[0], fleet.ledger()
    seen = set()
    for worker, boot, first, last, missing in state["seen"]["boots"]:
        known = Boot(first, last, missing)
        seen |= {(worker, boot, seq) for seq in range(first, last + 1) if known.take(seq) is None}
    sent, accepted = ({tuple(line) for line in ledger[kind]} for kind in ("sent", "accepted"))
    assert len(accepted) > KILLS
    lost = sorted(accepted - seen)
    stored = [history.find_request(".".join(map(str, block))) is not None for block in lost]
    history.close()
    assert not lost, (
        f"{len(lost)} accepted blocks are not in the state, such as {lost[:9]}; their requests: {stored[:9]}"
    )
    assert seen <= sent
    totals = state["classes"]["default"]["totals"]
    assert totals["drafted"] == POSITIONS * len(seen), "each block counts once"
    assert totals["requests.untouched"] == len(seen), "and so does each request"
    assert (history.current_epoch(POOL) or 0) > PAUSES, "each paused leader was replaced"
    sums = history.requests_between(POOL, 0, 1e11)
    assert sums["requests"] == len(seen)
    assert sums["tokens"] == 10 * len(seen) == totals["tokens"]
    history.close()


def _check_leases(fleet: Fleet) -> None:
    """As each worker saw them: never older than before, and each ends when it was to end by the server's own clock."""
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    ends: dict[tuple[int, int], tuple[float, float]] = {}  # at the earliest and at the latest
    for worker, epoch, seq, left, ttl, asked, answered in fleet.ledger()["lease"]:
        assert left <= ttl == TTL_S
        seen[worker].append((epoch, seq))
        earliest, latest = ends.get((epoch, seq), (asked + left, answered + left))
        ends[epoch, seq] = max(earliest, asked + left), min(latest, answered + left)
    assert all(order == sorted(order) for order in seen.values()), "leases never go back"
    assert len({epoch for epoch, _ in ends}) > 1
    moved = {lease: earliest - latest for lease, (earliest, latest) in ends.items() if earliest > latest + ROUNDING_S}
    assert not moved, f"leases lasted longer than their first answer said: {moved}"


def _safely(ask: Callable[[], Any]) -> Any:
    """What the server says, None while it is away."""
    try:
        return ask()
    except Exception:
        return None
