"""A stored decision gives its lease again, bit for bit, and takes little room."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from controller.replay import pack, replay, rounded, significant, unpack
from policies.errors import SolveError
from storage.history import History, decision_of
from storage.records import Decision, OperatorAction, RequestRecord
from tests.support_storage import a_fork, a_request, a_score
from tests.unit.controller.test_steer import POLICY, Bed

LENIENT = dataclasses.replace(POLICY, max_loss=0.2, explore=0.05, max_theta=1.0)


def lenient_bed(policy=LENIENT, ticks: int = 60) -> Bed:  # type: ignore[no-untyped-def]
    """A steered class whose forked requests never lose."""
    bed = Bed(policy=policy)
    for i in range(ticks):
        bed.run(1, a=0.7)
        for n in range(6):
            serve(bed, f"r{i}-{n}")
    return bed


def serve(bed: Bed, key: str) -> RequestRecord:
    """A touched request of the newest lease, forked and scored."""
    lease = bed.log[-1].lease
    record = dataclasses.replace(
        a_request(request_id=key, pool="pool"),
        arm="lenient", touches=1, fork_drawn=True, label_drawn=True, fork_prob=1.0, holdback_prob=0.1, rule=lease.rule,
        epoch=lease.epoch, lease_seq=lease.seq, first_touch_at=0.5, started=0.0, total_s=0.8,
    )  # fmt: skip
    bed.steer.observe_request(record, bed.now)
    bed.steer.observe_fork(dataclasses.replace(a_fork(request_id=key, pool="pool"), done=True, touches=1), bed.now)
    for branch in ("served", "fork"):
        score = dataclasses.replace(
            a_score(request_id=key, pool="pool"), branch=branch, metric=POLICY.metric, score=1.0
        )
        bed.steer.observe_score(score, bed.now)
    return record


def test_every_decision_of_a_run_replays_to_its_lease() -> None:
    """Learning, plain intervals, hysteresis, certified and measured leniency: equal as canonical text."""
    bed = lenient_bed()
    assert any(d.lease.table[0].theta > 0 for d in bed.log), "leniency was in use"
    assert any(d.estimates["probe"] for d in bed.log), "a plain interval too"
    for decision in bed.log:
        stored = json.loads(json.dumps(decision.inputs, allow_nan=False))
        assert replay(dataclasses.replace(decision, inputs=stored)).to_json() == decision.lease.to_json()


def test_through_the_database_it_is_the_same_lease(tmp_path: Path) -> None:
    """Saved, read back with `decision_of`, and solved again."""
    bed = lenient_bed(ticks=30)
    history = History(f"sqlite:///{tmp_path / 'h.db'}")
    history.upgrade()
    history.claim_epoch("pool", "test", 0.0)
    history.save_tick("pool", 1, bed.now, decisions=bed.log, snapshot={}, last_id=None)
    rows = history.decisions("pool", None, -1.0, limit=100)
    assert len(rows) == 30
    for row, decision in zip(rows, reversed(bed.log), strict=True):
        assert replay(decision_of(row)).to_json() == decision.lease.to_json()


def test_a_stored_decision_is_small() -> None:
    """About ten kilobytes, at 40 levels and blocks of up to 8, and less than twice that at 16."""
    for g_max, most in ((8, 10_000), (16, 20_000)):
        bed = lenient_bed(dataclasses.replace(LENIENT, g_max=g_max), ticks=40)
        assert len(json.dumps(bed.log[-1].inputs["solve"])) < most


def test_a_frozen_table_is_only_tightened() -> None:
    """The block length stays, theta does not rise, and it replays."""
    bed = lenient_bed()
    before = bed.log[-1].lease
    bed.steer.act(OperatorAction(1, "pool", "default", "freeze", None, "ann", "a release", 0.0), bed.now)
    for a in (0.95, 0.95, 0.3, 0.3):
        decision = bed.run(1, a=a)[-1]
        serve(bed, f"f{a}{bed.seq}")
        if decision.estimates["probe"]:
            continue
        row, was = decision.lease.table[0], before.table[0]
        assert row.g == was.g and (row.theta, row.rho, row.depth) <= (was.theta, was.rho, was.depth)
        assert decision.reason == "frozen" and "ann" in decision.explanation
        assert replay(decision).to_json() == decision.lease.to_json()


def test_another_rule_is_tried_on_a_share_of_the_requests_and_replays() -> None:
    """The lease carries the trial with knobs of its own; two curves are stored."""
    bed = lenient_bed(dataclasses.replace(LENIENT, rules=("token_v3", "threshold"), min_labels=40), ticks=120)
    tried = [d for d in bed.log if d.lease.trial is not None]
    assert tried and tried[-1].lease.trial is not None
    trial = tried[-1].lease.trial
    assert (trial.rule, trial.strategy) == ("threshold", "speculative") and 0 < trial.share <= 0.3
    assert any(d.reason == "rule_trial" for d in bed.log)
    assert replay(tried[-1]).to_json() == tried[-1].lease.to_json()
    assert len(json.dumps(tried[-1].inputs["solve"])) < 20_000


def test_inputs_come_back_as_they_were() -> None:
    """Packed, through JSON, unpacked, and packed again."""
    packed = lenient_bed(ticks=20).log[-1].inputs["solve"]
    assert pack(unpack(json.loads(json.dumps(packed)))) == packed


def test_rounding_keeps_order_and_zero() -> None:
    """A relative 1e-4; what was equal stays equal."""
    values = np.sort(np.random.default_rng(1).random(1000)) * 5
    kept = rounded(values)
    assert np.all(np.diff(kept) >= 0) and np.allclose(kept, values, rtol=2e-4)
    assert rounded(np.array([0.0, 1.0, 0.5]))[:3].tolist() == [0.0, 1.0, 0.5]
    assert np.array_equal(rounded(kept), kept)


def test_a_decision_without_inputs_says_so() -> None:
    """One of an older controller."""
    bed = Bed()
    decision = bed.run(1, a=0.7)[-1]
    with pytest.raises(SolveError, match="older controller"):
        replay(dataclasses.replace(decision, inputs={}))


def test_only_news_are_worth_storing() -> None:
    """The number, the time and noise of the fork probability are none; a knob, a reason or a minute are."""
    decision = lenient_bed(ticks=20).log[-1]

    def later(seconds: float, **lease: object) -> Decision:
        changed = dataclasses.replace(decision.lease, seq=decision.lease.seq + 1, issued=1.0, **lease)  # type: ignore[arg-type]
        return dataclasses.replace(decision, time=decision.time + seconds, lease=changed)

    assert significant(None, decision)
    assert not significant(decision, later(1.0, fork=0.123))
    assert significant(decision, later(60.0))
    assert significant(decision, later(-5.0)), "a clock that went back"
    assert significant(decision, later(1.0, explore=0.5))
    assert significant(decision, dataclasses.replace(later(1.0), reason="pull_back"))
