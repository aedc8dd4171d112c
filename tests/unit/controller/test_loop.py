"""One pool's loop: what happens in a tick, and what happens when something it needs is away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.desk import Desk
from controller.loop import FencedOff, LoopConfig, PoolLoop
from controller.saver import Saver
from controller.steer import ClassSteer
from controller.view import Board
from policies.reload import PolicyFile
from storage.errors import LeaseRefused, StorageError
from storage.history import History
from storage.records import ForkRecord, Lease, QualityScore, Record, RequestRecord, TokenBlock, to_fields
from storage.spool import Spool
from tests.support_blocks import coin_scalars, make_block

POLICY = """\
version: lenity/v1
pool: p
objective: {metric: correct, max_loss: 0.2, window: 60s}
evidence: {min_labels: 40, label_deadline: 20s, fork_cold: 1}
pull_back: {cooldown: 12s}
alerts: {page: []}
"""
T0 = 1_000_000.0


class Stream:
    """A telemetry stream in memory; `away` makes every call fail."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, dict[bytes, bytes]]] = []
        self.acked: list[str] = []
        self.dead: list[str] = []
        self.careful, self.set_aside = False, list[str]()
        self.away = False
        self.lost = 0
        self._next = 1

    def put(self, *records: Record | dict[bytes, bytes]) -> None:
        for record in records:
            fields = record if isinstance(record, dict) else to_fields(record)
            self.waiting.append((f"{self._next}-0", fields))
            self._next += 1

    def read(self, max_entries: int = 1000, block_ms: int = 0) -> list[tuple[str, dict[bytes, bytes]]]:
        self._check()
        entries, self.waiting = self.waiting[:max_entries], self.waiting[max_entries:]
        return entries

    def ack(self, ids: list[str]) -> None:
        self._check()
        self.acked += ids

    def ack_up_to(self, entry_id: str) -> None:
        self._check()
        self.acked.append(f"<= {entry_id}")

    def dead_letter(self, entry_id: str, fields: Mapping[bytes, bytes], reason: str) -> None:
        self.dead.append(reason)

    def lag(self) -> int:
        self._check()
        return len(self.waiting)

    def _check(self) -> None:
        if self.away:
            raise StorageError("connection refused")


class Leases:
    """Remembers written leases; `error` makes writes fail."""

    def __init__(self) -> None:
        self.written: list[Lease] = []
        self.error: Exception | None = None

    def write(self, lease: Lease) -> None:
        if self.error is not None:
            raise self.error
        self.written.append(lease)


class Rig:
    """A loop with its surroundings in one directory."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.policy_path = directory / "policy.yaml"
        self.policy_path.write_text(POLICY)
        self.history = History(f"sqlite:///{directory / 'h.db'}")
        self.history.upgrade()
        self.stream, self.leases, self.board = Stream(), Leases(), Board()
        self.loop = self.start(T0)

    def start(self, now: float) -> PoolLoop:
        epoch = self.history.claim_epoch("p", "test", now)
        self.loop = PoolLoop(
            PolicyFile(self.policy_path),
            self.stream,
            self.leases,
            self.history,
            self.board,
            epoch=epoch,
            config=LoopConfig(snapshot_s=0.0),
            now=now,
            saver=Saver(self.history, Spool(self.directory / "spool"), Desk("save", inline=True)),
            cpu_clock=lambda: 0.0,
        )
        return self.loop

    def view(self) -> Any:
        view = self.board.pool("p")
        assert view is not None
        return view


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def request(n: int, **changes: Any) -> RequestRecord:
    record = RequestRecord(
        request_id=f"r{n}",
        pool="p",
        traffic_class="default",
        worker="w0",
        boot="b0",
        epoch=0,
        lease_seq=0,
        rule="lossless",
        theta=0.0,
        rho=0.0,
        arm="untouched",
        holdback_prob=0.0,
        fork_prob=0.0,
        label_prob=0.0,
        fork_drawn=False,
        label_drawn=False,
        touches=0,
        first_touch_at=None,
        started=T0,
        prompt_tokens=10,
        tokens=50,
        target_passes=15,
        first_token_s=0.01,
        total_s=0.1,
        finish_reason="stop",
    )
    return replace(record, **changes)


def blocks(count: int, first_seq: int = 0) -> list[Record]:
    """Enough rounds of four drafted tokens, accepted with probability .6 to 1, to leave the learning phase."""
    rng = np.random.default_rng(7)
    return [
        make_block(coin_scalars(rng.uniform(0.6, 1.0, 40 * 4)), np.full(40, 4), rng=rng, pool="p", seq=first_seq + i)
        for i in range(count)
    ]


def test_the_first_lease_is_lossless_and_says_why(rig: Rig) -> None:
    """With nothing measured the knobs are lossless, and lease and decision are both in place."""
    rig.loop.tick(T0)
    (lease,) = rig.leases.written
    assert lease.lossless and lease.epoch == 1 and lease.ttl == LoopConfig().ttl_s
    (decision,) = rig.history.decisions("p")
    assert decision["reason"] == "learning"
    assert Lease.from_json(lease.to_json()) == lease
    assert rig.view().classes[0].theta == 0


def test_certified_leniency_opens_once_rounds_are_measured(rig: Rig) -> None:
    """Enough rounds, no labels: the touches that fit the budget if each cost a request."""
    rig.stream.put(*blocks(6), *[request(i) for i in range(40)])
    rig.loop.tick(T0 + 1)
    (lease,) = rig.leases.written
    shown = rig.view().classes[0]
    assert shown.state == "certified"
    assert 0 < lease.table[0].theta <= 0.9
    assert shown.touches_per_request_allowed == pytest.approx(0.16), "max_loss 0.2 less the share kept back"
    assert lease.fork == 1.0
    assert len(rig.stream.acked) == 46


def test_leases_only_move_forward(rig: Rig) -> None:
    """Each tick writes a newer (epoch, seq)."""
    for i in range(3):
        rig.loop.tick(T0 + i)
    order = [(lease.epoch, lease.seq) for lease in rig.leases.written]
    assert order == sorted(set(order))


def test_nothing_is_acknowledged_before_it_is_saved(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the database away the loop leases from memory, keeps what came, and saves it in order later."""
    rig.stream.put(request(1))
    real = rig.history.save_tick

    def away(*args: Any, **kwargs: Any) -> None:
        raise StorageError("database is away")

    monkeypatch.setattr(rig.history, "save_tick", away)
    rig.loop.tick(T0 + 1)
    assert rig.stream.acked == []
    assert len(rig.leases.written) == 1, "the lease is renewed from memory"
    assert "database is away" in rig.view().degraded[0]
    rig.stream.put(request(2))
    monkeypatch.setattr(rig.history, "save_tick", real)
    rig.loop.tick(T0 + 2)
    assert rig.stream.acked == ["1-0", "2-0"]
    assert rig.view().degraded == ()
    assert rig.history.requests_between("p", 0, T0 + 10)["requests"] == 2
    assert len(rig.history.decisions("p")) == 1, "the decision of the outage is recorded; the next said nothing new"


def test_a_stream_that_is_away_degrades_and_comes_back(rig: Rig) -> None:
    """No exception, a reason in the view, and normal work afterwards."""
    rig.stream.away = True
    rig.loop.tick(T0 + 1)
    assert any("connection refused" in text for text in rig.view().degraded)
    rig.stream.away = False
    rig.stream.put(request(1))
    rig.loop.tick(T0 + 2)
    assert rig.stream.acked == ["1-0"]


@pytest.mark.parametrize("how", ["lease", "database"])
def test_a_newer_controller_fences_this_one_off(rig: Rig, how: str) -> None:
    """A refused lease or a newer epoch in the database ends this loop; its write changes nothing."""
    if how == "lease":
        rig.leases.error = LeaseRefused("lease (1, 1) refused: (2, 1) was leased before")
    else:
        rig.history.claim_epoch("p", "another", T0)
    with pytest.raises(FencedOff):
        rig.loop.tick(T0 + 1)
    assert rig.leases.written == []


def test_a_restart_continues_where_it_was_and_counts_nothing_twice(rig: Rig) -> None:
    """State comes from the database; entries that come again are dropped as duplicates; the epoch is newer."""
    rig.stream.put(*blocks(6), *[request(i) for i in range(40)])
    rig.loop.tick(T0 + 1)
    before = rig.view().classes[0]
    rig.start(T0 + 5)
    rig.stream.put(*blocks(6), *[request(i) for i in range(40)])
    rig.loop.tick(T0 + 5)
    after = rig.view().classes[0]
    assert after.counters == before.counters
    assert after.requests_in_window == 40
    assert after.lease_epoch == before.lease_epoch + 1
    assert after.state == "certified", "it did not have to learn again"
    assert rig.history.requests_between("p", 0, T0 + 10)["requests"] == 40
    assert rig.loop.last_id == "92-0"


def test_a_bad_edit_is_refused_with_its_place_and_a_good_one_obeyed(rig: Rig) -> None:
    """The last good revision stays active; both edits are recorded."""
    rig.loop.tick(T0)
    revision = rig.view().policy_revision
    rig.policy_path.write_text(POLICY.replace("max_loss", "max_los"))
    rig.loop.tick(T0 + 1)
    assert "policy.yaml:3" in rig.view().policy_rejected
    assert rig.view().policy_revision == revision
    rig.policy_path.write_text(POLICY.replace("0.2", "0.1"))
    rig.loop.tick(T0 + 2)
    assert rig.view().policy_rejected is None
    assert rig.view().policy_revision > revision
    assert rig.view().classes[0].max_loss == 0.1
    assert [r["accepted"] for r in rig.history.policy_revisions("p")] == [True, False, True]


def test_a_bad_edit_is_recorded_once_however_long_it_stays(rig: Rig) -> None:
    """Ten ticks over the same bad text make one record."""
    rig.policy_path.write_text("nonsense: [")
    for i in range(10):
        rig.loop.tick(T0 + i)
    assert len(rig.history.policy_revisions("p")) == 2


def test_between_two_states_entries_wait_and_come_again_after_a_crash(rig: Rig) -> None:
    """Their rows are saved at once; what they changed is part of the next state, and they count once."""
    rig.loop.config = LoopConfig(snapshot_s=5.0)
    rig.loop.tick(T0)
    rig.stream.put(*blocks(2), request(1))
    rig.loop.tick(T0 + 1)
    assert rig.stream.acked == []
    assert rig.history.requests_between("p", 0, T0 + 10)["requests"] == 1
    rig.start(T0 + 2)
    rig.stream.put(*blocks(2), request(1))
    rig.loop.tick(T0 + 2)
    assert rig.stream.acked == ["4-0", "5-0", "6-0"]
    assert rig.view().classes[0].counters["requests.untouched"] == 1
    assert rig.view().classes[0].counters["drafted"] == 320
    rig.loop.tick(T0 + 10)
    assert rig.history.requests_between("p", 0, T0 + 10)["requests"] == 1


def test_an_entry_that_cannot_be_handled_is_set_aside_and_the_others_count(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of ours, in a request and in one of many blocks; the tick goes on and says how many."""
    real = ClassSteer.observe_block

    def fail(self: ClassSteer, block: TokenBlock, now: float) -> None:
        if block.seq == 2:
            raise ZeroDivisionError("odd block")
        real(self, block, now)

    def refuse(self: ClassSteer, record: RequestRecord, now: float) -> None:
        raise KeyError(record.request_id)

    monkeypatch.setattr(ClassSteer, "observe_block", fail)
    monkeypatch.setattr(ClassSteer, "observe_request", refuse)
    rig.stream.put(*blocks(3), request(1))
    rig.loop.tick(T0 + 1)
    assert rig.view().handler_failures == 2
    assert sorted(rig.stream.dead) == [
        "the handler failed: KeyError: 'r1'",
        "the handler failed: ZeroDivisionError: odd block",
    ]
    assert rig.view().classes[0].counters["drafted"] == 320
    assert len(rig.leases.written) == 1


def test_bad_entries_are_counted_and_good_ones_flow(rig: Rig) -> None:
    """Malformed telemetry does not stop the tick."""
    rig.stream.put({b"kind": b"junk"}, request(1))
    rig.loop.tick(T0 + 1)
    assert rig.view().dead_letters == 1
    assert rig.history.requests_between("p", 0, T0 + 10)["requests"] == 1


def test_a_class_appears_with_its_traffic(rig: Rig) -> None:
    """A class that the policy does not name gets the policy's values, its own estimates and its own lease."""
    rig.stream.put(request(1, traffic_class="code"))
    rig.loop.tick(T0 + 1)
    assert {lease.traffic_class for lease in rig.leases.written} == {"default", "code"}


def test_labels_of_unknown_requests_do_no_harm(rig: Rig) -> None:
    """A label for a request nobody served is kept aside and changes no knob."""
    rig.stream.put(QualityScore("ghost", "p", "default", "served", "correct", 0.0, "s", "1", T0))
    rig.loop.tick(T0 + 1)
    assert rig.leases.written[0].lossless
    assert rig.view().classes[0].forks_matured == 0


@pytest.mark.parametrize("style_lost", [False, True])
def test_a_second_metric_pulls_leniency_back(rig: Rig, style_lost: bool) -> None:
    """From the policy file to the lease: `correct` is as good as ever, and touched answers lose `style`."""
    rig.policy_path.write_text(POLICY.replace("window: 60s", "window: 60s, also: [{metric: style, max_loss: 0.2}]"))
    loop = rig.start(T0)
    rig.stream.put(*blocks(6), *[request(i) for i in range(40)])
    loop.tick(T0 + 1)
    widest = 0.0
    for now in range(2, 16):
        lease, widest = rig.leases.written[-1], max(widest, rig.view().classes[0].theta)
        for i in range(20):
            key, lost = f"t{now}-{i}", style_lost and now > 8 and i % 2 == 0
            sent = {"epoch": lease.epoch, "lease_seq": lease.seq, "rule": lease.rule, "theta": 0.5, "rho": 1.0}
            drawn = {"arm": "lenient", "holdback_prob": 0.1, "fork_prob": 1.0, "label_prob": 1.0, "touches": 1}
            coins = {"fork_drawn": True, "label_drawn": True, "first_touch_at": T0 + now, "started": T0 + now}
            rig.stream.put(replace(request(0), request_id=key, **sent, **drawn, **coins))  # type: ignore[arg-type]
            rig.stream.put(ForkRecord(key, "p", "default", "w0", "b0", True, 1, 30, 8, 0.8))
            for metric, served in (("correct", 1.0), ("style", 1.0 - lost)):
                for branch, value in (("served", served), ("fork", 1.0)):
                    score = QualityScore(key, "p", "default", branch, metric, value, "exact", "1", T0 + now)  # type: ignore[arg-type]
                    rig.stream.put(score)
        loop.tick(T0 + now)
    explanation, end = rig.history.decisions("p")[0]["explanation"], rig.view().classes[0]
    assert "Tightest of 2 metrics" in explanation
    if style_lost:
        assert "is style" in explanation
        assert end.touches_per_request_allowed < 1.5, "was above 5"
        assert end.theta < widest
    else:
        assert end.touches_per_request_allowed > 5
        assert end.theta == widest
