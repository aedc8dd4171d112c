"""The governor case by case: what it does with each kind of evidence, and with none."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from controller import evidence
from controller.governor import Allowance, Governor
from policies.model import ClassPolicy, PageRule
from storage.records import ForkRecord, QualityScore, RequestRecord

POLICY = ClassPolicy(
    pool="p",
    traffic_class="default",
    metric="correct",
    max_loss=0.2,
    window_s=100.0,
    confidence=0.95,
    rules=("token_v3",),
    max_theta=1.0,
    structured="lossless",
    holdback=0.1,
    fork_cold=1.0,
    fork_warm=0.25,
    label_deadline_s=20.0,
    min_labels=80,
    g_max=8,
    explore=0.0,
    start=0.2,
    stop=0.05,
    cooldown_s=30.0,
    max_step_up=0.1,
    page=(PageRule(20.0, 5.0, 0.4),),
)


class Feed:
    """Hands records to a governor; ``tick`` decides and leases what was allowed."""

    def __init__(self, policy: ClassPolicy = POLICY):
        self.governor = Governor(policy, "token_v3")
        self.number = self.seq = 0
        self.last: Allowance | None = None

    def tick(self, now: float) -> Allowance:
        self.last = self.governor.decide(now)
        self.seq += 1
        self.governor.leased(1, self.seq, self.last.tau_allowed)
        return self.last

    def request(
        self, now: float, touches: int = 0, *, arm: str = "lenient", fork: bool = True, touched_after: float = 0.5
    ) -> str:
        self.number += 1
        key = f"r{self.number}"
        self.governor.observe_request(record(key, touches, arm, fork, self.seq, touched_after), now)
        return key

    def settle(self, key: str, now: float, *, served: float = 1.0, fork: float = 1.0, touches: int = 1) -> None:
        self.governor.observe_fork(done(key, touches), now)
        self.governor.observe_score(score(key, "served", served), now)
        self.governor.observe_score(score(key, "fork", fork), now)

    def opened(self, until: float = 40.0, loss: float = 0.0, rate: int = 20) -> Feed:
        """Traffic that touches every second request once, labelled at once."""
        lost = 0.0
        for now in range(1, int(until) + 1):
            self.tick(float(now))
            for i in range(rate):
                key = self.request(float(now), i % 2)
                if i % 2:
                    lost += loss
                    self.settle(key, float(now), served=1.0 - (lost >= 1))
                    lost -= lost >= 1
        self.tick(until + 1)
        return self


def record(key: str, touches: int, arm: str, fork: bool, seq: int, touched_after: float = 0.5) -> RequestRecord:
    """A served request of one second."""
    return RequestRecord(
        request_id=key, pool="p", traffic_class="default", worker="w", boot="b", epoch=1, lease_seq=seq,
        rule="token_v3", theta=0.5, rho=1.0, arm=arm if touches else "untouched", holdback_prob=0.1, fork_prob=1.0,  # type: ignore[arg-type]
        label_prob=1.0, fork_drawn=fork and touches > 0, label_drawn=fork and touches > 0, touches=touches,
        first_touch_at=1e9 + touched_after if touches else None, started=1e9, prompt_tokens=10, tokens=40,
        target_passes=10, first_token_s=0.1, total_s=1.0, finish_reason="stop",
    )  # fmt: skip


def done(key: str, touches: int = 1, *, ran: bool = True) -> ForkRecord:
    """How a fork ended."""
    return ForkRecord(key, "p", "default", "w", "b", ran, touches, 30, 8, 0.8)


def score(key: str, branch: str, value: float, version: str = "1", metric: str = "correct") -> QualityScore:
    """One branch's score."""
    return QualityScore(key, "p", "default", branch, metric, value, "exact", version, 0.0)  # type: ignore[arg-type]


def released(buffer: evidence.EvidenceBuffer, now: float) -> list[float]:
    """Differences that leave the buffer now."""
    return [e.total for e in buffer.release(now)]


# Evidence.


def test_evidence_leaves_in_order_of_first_touch() -> None:
    """A quick label behind a slow one waits for it; at the deadline the slow one leaves at its worst."""
    buffer = evidence.EvidenceBuffer(20.0)
    for key, touched in (("late", 0.9), ("early", 0.1)):
        buffer.add_request(record(key, 1, "lenient", True, 1, touched), 0, 0, 10.0)
    for branch in ("served", "fork"):
        buffer.add_score(score("late", branch, 1.0), 11.0)
    assert released(buffer, 29.9) == []
    assert released(buffer, 30.0) == [1.0, 0.0]


def test_both_arms_give_lossless_minus_lenient() -> None:
    """Which branch is lenient depends on the arm, which judges never see."""
    buffer = evidence.EvidenceBuffer(20.0)
    for key, arm in (("a", "lenient"), ("b", "holdback")):
        buffer.add_request(record(key, 1, arm, True, 1), 0, 0, 1.0)
        buffer.add_fork(done(key, 7), 1.0)
        buffer.add_score(score(key, "served", 0.25), 1.0)
        buffer.add_score(score(key, "fork", 1.0), 1.0)
    settled = list(buffer.release(1.0))
    assert [e.total for e in settled] == [0.75, -0.75]
    assert [e.weight for e in settled] == [0.9, 0.9]
    assert [e.touches for e in settled] == [1, 7], "the lenient branch's touches, wherever it ran"


def test_a_fork_that_never_ran_is_the_worst_case() -> None:
    """Scores do not rescue it."""
    buffer = evidence.EvidenceBuffer(20.0)
    buffer.add_request(record("a", 3, "lenient", True, 1), 0, 0, 1.0)
    buffer.add_fork(done("a", ran=False), 1.0)
    (settled,) = buffer.release(1.0)
    assert (settled.total, settled.touches, settled.labelled) == (1.0, 3, 0)


def test_scores_may_come_before_their_request_and_twice() -> None:
    """Early ones are kept, the first counts, the number of early ones is bounded."""
    buffer = evidence.EvidenceBuffer(20.0)
    for value in (1.0, 0.0):
        buffer.add_score(score("a", "served", value), 1.0)
        buffer.add_score(score("a", "fork", 1.0), 1.0)
    buffer.add_request(record("a", 1, "lenient", True, 1), 0, 0, 2.0)
    assert not buffer.add_request(record("a", 1, "lenient", True, 1), 0, 0, 2.0)
    assert released(buffer, 2.0) == [0.0]
    assert buffer.set_aside == 3
    for i in range(evidence.MAX_EARLY + 5):
        buffer.add_score(score(f"x{i}", "fork", 1.0), 3.0)
    assert buffer.unknown == 5


def test_two_streams_that_disagree_are_counted_and_the_first_counts() -> None:
    """The same scorer and version with another value, before or after the pair is complete; a repeat is none."""
    feed = Feed()
    key = feed.request(1.0, 1)
    for value in (1.0, 1.0, 0.0):
        feed.governor.observe_score(score(key, "served", value), 1.0)
    feed.governor.observe_score(score(key, "fork", 1.0), 1.0)
    feed.governor.observe_score(score(key, "fork", 0.5), 1.0)
    counts = feed.tick(2.0).counts
    assert (counts["conflicting_score"], counts["set_aside"]) == (2, 3)


def test_two_scorer_versions_make_no_pair() -> None:
    """Until the same version has scored both branches."""
    buffer = evidence.EvidenceBuffer(20.0)
    buffer.add_request(record("a", 1, "lenient", True, 1), 0, 0, 1.0)
    buffer.add_score(score("a", "served", 1.0, "1"), 1.0)
    buffer.add_score(score("a", "fork", 0.0, "2"), 1.0)
    assert released(buffer, 2.0) == []
    buffer.add_score(score("a", "served", 0.0, "2"), 2.0)
    assert released(buffer, 2.0) == [0.0]


def test_too_many_waiting_forks_settle_the_oldest_at_its_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, and never to leniency's advantage."""
    monkeypatch.setattr(evidence, "MAX_PENDING", 10)
    buffer = evidence.EvidenceBuffer(20.0)
    for i in range(13):
        buffer.add_request(record(f"r{i}", 1, "lenient", True, 1), 0, 0, float(i) / 10)
    assert released(buffer, 2.0) == [1.0, 1.0, 1.0]
    assert len(buffer) == 10 and buffer.forced == 3


# Certified and measured.


def test_the_start_is_certified() -> None:
    """Without labels the touches allowed are the planned loss: 0.2 * (1 - 0.2)."""
    feed = Feed()
    assert feed.tick(0.0).tau_allowed == 0.0, "nothing is loosened before traffic comes"
    feed.request(1.0)
    a = feed.tick(1.0)
    assert (a.state, a.reason, a.u_kappa, a.fork) == ("certified", "certified", 1.0, 1.0)
    assert a.tau_allowed == pytest.approx(0.16)
    assert a.d_allowed == pytest.approx(0.16 / 256)
    assert a.labels_needed == 8
    assert "every touch counts as a loss" in a.explanation and "0.16" in a.explanation


def test_harmless_labels_open_it_and_harmful_ones_do_not() -> None:
    """The same traffic, once without loss and once with every touch lost."""
    good, bad = Feed().opened().last, Feed().opened(loss=1.0).last
    assert good is not None and bad is not None
    assert good.state == "measured" and good.u_kappa < 0.1 and good.tau_allowed > 0.5
    assert bad.tau_allowed <= 0.16 + 1e-12


def test_a_few_labels_are_insufficient_data_and_page_nobody() -> None:
    """3 labelled requests with 1 bad."""
    feed = Feed()
    for i in range(3):
        feed.tick(float(i))
        feed.settle(feed.request(float(i), 1), float(i), served=float(i > 0))
    a = feed.tick(3.0)
    assert a.state == "insufficient data"
    assert not any(alert.firing for alert in a.alerts)


def test_many_bad_labels_page_at_once() -> None:
    """3,000 labelled requests with 1,000 bad: twice the plan, and more than the rule's 1."""
    feed = Feed(dataclasses.replace(POLICY, page=(PageRule(20.0, 5.0, 0.2),)))
    feed.request(0.0)
    feed.tick(0.0)
    for i in range(3000):
        now = i / 100
        feed.settle(feed.request(now, 1), now, served=float(i % 3 > 0))
    a = feed.tick(30.0)
    assert (a.state, a.reason, a.tau_allowed) == ("breached", "fast_burn", 0.0)
    assert [alert.name for alert in a.alerts if alert.firing] == ["LenityBudgetBurn"]


def test_a_step_is_affordable_if_every_extra_touch_is_harmful() -> None:
    """The touches charged above the proven level never exceed the step's share of the budget by more than a tick's."""
    feed = Feed()
    rng = np.random.default_rng(0)
    for now in range(1, 60):
        a = feed.tick(float(now))
        for _ in range(10):
            touches = int(rng.poisson(a.tau_allowed))
            key = feed.request(float(now), touches)
            if touches:
                feed.settle(key, float(now), touches=touches)
        if a.tau_seen:
            step = a.tau_allowed - max(a.tau_seen, 0.16)
            touched = 1 - math.exp(-a.tau_allowed)
            assert step * 8 / touched <= 0.1 * a.budget + 1e-6
    assert feed.last is not None and feed.last.tau_seen > 0.5


def test_loosening_needs_new_labels() -> None:
    """Decisions in a row without a label in between change nothing upwards."""
    feed = Feed().opened(20.0)
    first = feed.tick(21.5).tau_allowed
    for i in range(5):
        feed.request(21.5 + i / 10)
        assert feed.tick(21.6 + i / 10).tau_allowed <= first


def test_tightening_is_immediate() -> None:
    """One decision after bad labels the allowance is smaller."""
    feed = Feed(dataclasses.replace(POLICY, page=())).opened(30.0)
    before = feed.last
    for _ in range(40):
        feed.settle(feed.request(31.5, 1), 31.5, served=0.0)
    after = feed.tick(31.6)
    assert before is not None and after.tau_allowed < 0.5 * before.tau_allowed


def test_forks_become_rare_when_the_level_is_proven() -> None:
    """Cold while young, warm or what keeps the bound when it is not."""
    feed = Feed(dataclasses.replace(POLICY, max_step_up=1e-6)).opened(90.0)
    assert feed.last is not None and feed.last.forks_matured >= 80
    assert 0.25 <= feed.last.fork < 1.0


# What breaks.


def test_no_loss_allowed_is_lossless_without_a_division() -> None:
    """`max_loss: 0`."""
    feed = Feed(dataclasses.replace(POLICY, max_loss=0.0))
    for now in range(5):
        feed.request(float(now), 1)
        a = feed.tick(float(now))
    assert (a.state, a.tau_allowed, a.d_allowed) == ("disabled", 0.0, 0.0)
    assert json.dumps(dataclasses.asdict(a), allow_nan=False)


def test_no_traffic_holds_and_is_no_good_news() -> None:
    """The allowance stays, the state says so, the alert fires, no number is NaN."""
    feed = Feed().opened(30.0)
    before = feed.last
    a = feed.tick(60.0)
    assert a.state == "no traffic" and before is not None and a.tau_allowed <= before.tau_allowed
    assert [alert.name for alert in a.alerts if alert.firing] == ["LenityTelemetryStale"]
    later = feed.tick(5000.0)
    assert later.requests_in_window == 0 and later.tau_allowed <= before.tau_allowed
    assert json.dumps(dataclasses.asdict(later), allow_nan=False)


def test_after_a_window_without_labels_the_bound_is_forgotten() -> None:
    """Old evidence does not vouch for new traffic."""
    feed = Feed().opened(30.0)
    feed.tick(5000.0)
    feed.request(5001.0)
    a = feed.tick(5001.0)
    assert a.u_kappa == 1.0 and a.tau_allowed <= 0.16 + 1e-12


def test_missing_labels_shrink_leniency_and_say_so() -> None:
    """The scorer dies: within the deadline leniency falls to certified or below, and the state is never good."""
    feed = Feed().opened(30.0)
    for now in range(32, 75):
        for i in range(20):
            feed.request(float(now), i % 2)
        a = feed.tick(float(now))
    assert a.tau_allowed <= 0.16 + 1e-12
    assert a.state in ("uncertified", "breached")
    assert any(alert.name == "LenityLabelsStale" and alert.firing for alert in a.alerts)


def test_an_exhausted_budget_is_lossless_until_the_window_recovers() -> None:
    """Then it starts again from certified, with new evidence."""
    feed = Feed(dataclasses.replace(POLICY, page=())).opened(30.0)
    for _ in range(1500):
        feed.settle(feed.request(31.5, 1), 31.5, served=0.0)
    a = feed.tick(31.6)
    assert (a.state, a.reason, a.tau_allowed) == ("breached", "exhausted", 0.0)
    assert a.remaining <= 0.05
    assert any(alert.name == "LenityBudgetExhausted" and alert.firing for alert in a.alerts)
    for now in range(32, 150):
        for _ in range(20):
            feed.request(float(now))
        a = feed.tick(float(now))
    assert (a.state, a.evidence_epoch, a.u_kappa) == ("certified", 1, 1.0)


def test_a_hold_is_not_released_without_telemetry() -> None:
    """Silence is no recovery; requests are, from the certified level on."""
    feed = Feed()
    feed.request(0.0)
    feed.tick(0.0)
    for i in range(300):
        feed.settle(feed.request(i / 30, 1), i / 30, served=0.0)
    assert feed.tick(10.0).reason == "fast_burn"
    assert feed.tick(300.0).state == "breached"
    feed.request(301.0)
    a = feed.tick(301.0)
    assert a.state == "certified" and a.tau_allowed <= 0.16 + 1e-12


def test_an_unrecorded_lease_is_charged_in_full() -> None:
    """Its touches cost one each, whatever has been measured, and are no proof for any level."""
    feed = Feed().opened(30.0)
    before = feed.tick(31.0)
    feed.seq += 1000
    for _ in range(10):
        feed.request(31.1, 1, fork=False)
    feed.seq -= 1000
    after = feed.tick(31.2)
    assert after.spent_upper - before.spent_upper > 9.0
    assert after.counts["unknown_lease"] == 10


def test_a_new_scorer_version_starts_new_evidence_once() -> None:
    """Late scores of the old one are set aside; they do not restart it again."""
    feed = Feed().opened(30.0)
    key = feed.request(31.5, 1)
    feed.governor.observe_score(score(key, "served", 1.0, "2"), 31.5)
    a = feed.tick(31.6)
    assert a.evidence_epoch == 1 and a.u_kappa == 1.0 and a.tau_allowed <= 0.16 + 1e-12
    feed.governor.observe_score(score(key, "fork", 1.0, "1"), 31.7)
    assert feed.tick(31.8).evidence_epoch == 1
    assert feed.governor.counts["retired_scorer"] == 1


def test_the_old_epochs_requests_stay_charged() -> None:
    """New evidence is no amnesty."""
    feed = Feed(dataclasses.replace(POLICY, page=())).opened(30.0, loss=0.2)
    before = feed.tick(31.0)
    feed.governor.reset_evidence("rule", 31.0, "threshold")
    after = feed.tick(31.1)
    assert after.spent_upper == pytest.approx(before.spent_upper, rel=0.05)
    assert feed.governor.rule == "threshold"


@pytest.mark.parametrize("value", [1.2, -0.1, math.nan, math.inf])
def test_impossible_scores_are_set_aside(value: float) -> None:
    """And counted."""
    feed = Feed()
    key = feed.request(1.0, 1)
    feed.governor.observe_score(score(key, "served", value), 1.0)
    feed.governor.observe_score(score(key, "served", 1.0, metric="style"), 1.0)
    assert feed.governor.counts == {"impossible_score": 1, "other_metric": 1, "unknown_lease": 1}


def test_a_step_of_the_workers_clock_changes_nothing() -> None:
    """Only differences on the worker's clock are used."""
    plain, stepped = Feed(), Feed()
    for feed, offset in ((plain, 0.0), (stepped, 86_400.0)):
        feed.request(0.0)
        feed.tick(0.0)
        for i in range(40):
            r = record(f"k{i}", 1, "lenient", True, 1)
            shift = offset * (i % 2)
            r = dataclasses.replace(r, started=r.started + shift, first_touch_at=(r.first_touch_at or 0) + shift)
            feed.governor.observe_request(r, 1.0 + i)
            feed.settle(f"k{i}", 1.0 + i)
    assert plain.tick(42.0) == stepped.tick(42.0)


def test_a_smaller_budget_tightens_at_the_next_decision() -> None:
    """And zero disables leniency."""
    feed = Feed().opened(30.0)
    before = feed.last
    feed.governor.set_policy(dataclasses.replace(POLICY, max_loss=0.02), 31.0)
    a = feed.tick(31.0)
    assert before is not None and a.tau_allowed <= before.tau_allowed / 5
    feed.governor.set_policy(dataclasses.replace(POLICY, max_loss=0.0), 32.0)
    assert feed.tick(32.0).state == "disabled"


def test_saved_and_restored_it_decides_the_same() -> None:
    """Through JSON at several moments, with labels outstanding: every later allowance is equal."""
    straight, saved = Feed(), Feed()
    rng = np.random.default_rng(4)
    waiting: list[tuple[str, float]] = []
    for now in range(1, 140):
        assert straight.tick(float(now)) == saved.tick(float(now))
        due, waiting = waiting[:6], waiting[6:]
        touches = rng.poisson(0.6, 10)
        bad = rng.random(6) < (0.5 if 60 < now < 80 else 0.02)
        for feed in (straight, saved):
            for (key, _), lost in zip(due, bad, strict=False):
                feed.settle(key, float(now), served=float(not lost))
        for t in touches:
            keys = [feed.request(now + 0.5, int(t), fork=bool(t)) for feed in (straight, saved)]
            if t:
                waiting.append((keys[0], float(now)))
        if now % 17 == 0:
            state = json.loads(json.dumps(saved.governor.to_state(), allow_nan=False))
            saved.governor = Governor.from_state(state, POLICY, "token_v3")
    assert straight.governor.to_state() == saved.governor.to_state()


def test_a_state_of_another_rule_starts_new_evidence() -> None:
    """Loss per touch differs between rules by two orders of magnitude."""
    feed = Feed().opened(30.0)
    feed.governor = Governor.from_state(feed.governor.to_state(), POLICY, "threshold")
    a = feed.tick(31.5)
    assert a.evidence_epoch == 1 and a.u_kappa == 1.0
