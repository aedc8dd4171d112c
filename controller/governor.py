"""The governor: budget, bounds, policy and time become the touches that leniency may cause.

Without labels a request loses at most the probability that it is touched, so a budget of touches is *certified* as it
stands. Paired forks bound the loss per touch, ``U_kappa``; then more touches fit the same budget (*measured*). Loss per
touch was learnt at touch rates up to `tau_seen`; touches beyond are charged one each until their own labels have come,
and a step up is taken only if the budget could bear every extra touch being harmful. Tightening is immediate; loosening
goes by one step per decision and only on new labels.

Sources: `docs/mathematics.md`; Google SRE Workbook, chapter 5, for burn rates.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from controller.allowance import (
    AlertState,
    Allowance,
    Reading,
    affordable_step,
    alerts_of,
    explain,
    headroom,
    labels_for,
    state_of,
)
from controller.bounds import Sequence, Staggered
from controller.budget import UNKNOWN, LeaseBook, Ledger, level_of, level_tau
from controller.burn import BurnMeter
from controller.evidence import EvidenceBuffer, ScorerWatch
from storage.records import ForkRecord, QualityScore, RequestRecord

if TYPE_CHECKING:
    from policies.model import ClassPolicy

__all__ = ["AlertState", "Allowance", "Governor"]

K = 10  # slices of the window, and sequences in it
U_FLOOR = 1e-4  # loss per touch is never believed to be below this
DEFAULT_LENGTH = 256.0  # tokens per request while unknown; long, so that few touches per token are allowed
FOREIGN = -1  # the evidence epoch of requests under another rule: charged in full, never evidence
STALE_S = 300.0
REST_TOLERANCE = 1.05  # a level within this factor of tau_seen has matured


class Governor:
    """Decides the touches per request of one traffic class under one accept rule. All times are steady seconds."""

    def __init__(self, policy: ClassPolicy, rule: str):
        self.policy, self.rule = policy, rule
        self.counts: dict[str, int] = {}
        self._now = -math.inf
        self._ledger = Ledger(policy.window_s, K, 0.0)
        self._leases = LeaseBook()
        self._buffer = EvidenceBuffer(policy.label_deadline_s)
        self._epoch, self._epoch_began = 0, 0.0
        self._sequences = Staggered(policy.window_s, K, 0.0)
        self._closed: dict[int, Sequence] = {}
        self._burn = BurnMeter(policy, 0.0)
        self._scorers = ScorerWatch()
        self._tau = 0.0
        self._matured = self._matured_at_step = 0
        self._last_request_at: float | None = None
        self._unlabelled_since: float | None = None
        self._hold: tuple[str, float] | None = None  # ("fast_burn" | "exhausted", earliest release)
        self._hold_detail = ""

    # What comes in.

    def observe_request(self, record: RequestRecord, now: float) -> None:
        """Count a served request and charge it to its lease; a drawn fork starts waiting for its labels."""
        now = self._at(now)
        lease = self._leases.find(record.epoch, record.lease_seq)
        if lease is None:
            lease = (self._epoch if record.rule in (self.rule, "lossless") else FOREIGN, UNKNOWN)
            self._count("unknown_lease")
        if not self._buffer.add_request(record, *lease, now):
            return
        if self._last_request_at is None:
            self._ledger.began = now
        self._last_request_at = now
        touches = record.touches if record.arm == "lenient" else 0
        touched = record.arm != "untouched"
        fork_prob = record.fork_prob if touched else None
        self._ledger.add_request(now, *lease, tokens=record.tokens, touches=touches, fork_prob=fork_prob)
        self._burn.add_request(now, touches)
        if touched and record.fork_drawn and self._unlabelled_since is None:
            self._unlabelled_since = now

    def observe_fork(self, record: ForkRecord, now: float) -> None:
        """Take in how a drawn fork ended."""
        self._buffer.add_fork(record, self._at(now))

    def observe_score(self, score: QualityScore, now: float) -> None:
        """Take in one branch's score; other metrics, impossible scores, retired scorers are set aside and counted."""
        now = self._at(now)
        if score.metric != self.policy.metric:
            self._count("other_metric")
            return
        if not 0 <= score.score <= 1:
            self._count("impossible_score")
            return
        version = f"{score.scorer}:{score.scorer_version}"
        verdict = self._scorers.admit(version, now, self.policy.label_deadline_s)
        if verdict == "retired":
            self._count("retired_scorer")
            return
        if verdict == "new":
            self.reset_evidence("scorer_version", now)
        self._buffer.add_score(score, now)

    def leased(self, epoch: int, seq: int, tau: float) -> None:
        """Record the planned touches per request of a lease; call it after each lease."""
        self._leases.add(epoch, seq, self._epoch, level_of(tau))

    def set_policy(self, policy: ClassPolicy, now: float) -> None:
        """Obey a new policy from the next decision on; another metric starts new evidence."""
        now = self._at(now)
        metric_changed = policy.metric != self.policy.metric
        self.policy = policy
        self._buffer.deadline_s = policy.label_deadline_s
        self._ledger.set_window(policy.window_s, now)
        self._sequences.window_s = policy.window_s
        self._burn.set_policy(policy, now)
        if metric_changed:
            self._other_metric()

    def reset_evidence(self, reason: str, now: float, rule: str | None = None) -> None:
        """Start a new evidence epoch, certified: ``reason`` is counted, ``rule`` names the accept rule from now on.

        Requests of the old epoch stay charged at its bound, which only their own outstanding forks still move.
        """
        now = self._at(now)
        self._count(f"evidence_reset.{reason}")
        self._closed[self._epoch] = self._sequences.planning(now)
        self._epoch, self._epoch_began = self._epoch + 1, now
        self._sequences = Staggered(self.policy.window_s, K, now)
        self._burn.reset_evidence(now)
        self._matured = self._matured_at_step = 0
        self._unlabelled_since = None
        self._tau = 0.0
        self.rule = rule or self.rule

    # What comes out.

    def decide(self, now: float) -> Allowance:
        """The allowance from now on. Tightens at once; loosens by at most one step, and only on new labels."""
        now = self._at(now)
        self._settle(now)
        if self.policy.max_loss <= 0:
            self._tau = 0.0
            return self._allowance("disabled", "disabled", "The policy allows no loss, so decoding is lossless.", now)
        reading = self._read(now)
        if self._held(reading, now):
            self._tau = 0.0
            return self._allowance("breached", self._hold[0] if self._hold else "", self._hold_detail, now, reading)
        if self._hold is not None:
            self._hold = None
            self.reset_evidence("released", now)
            reading = self._read(now)
        tau, reason = self._target(reading, now)
        self._tau, reason = self._loosen_slowly(tau, reason, reading)
        explanation = explain(reason, self._tau, reading, self.step_labels)
        return self._allowance(state_of(reading), reason, explanation, now, reading)

    def _settle(self, now: float) -> None:
        """Forks whose turn has come become evidence of their epoch."""
        self._ledger.advance(now)
        self._sequences.advance(now)
        self._burn.advance(now)
        for e in self._buffer.release(now):
            self._ledger.add_fork(e.arrived, e.epoch, e.level, e.z, e.touches, e.labelled)
            if e.epoch == self._epoch:
                touched_at = max(e.touched_at, self._epoch_began)
                self._sequences.update(e.z, e.touches, touched_at)
                self._burn.add_fork(e.z, e.touches, touched_at)
                self._matured += e.labelled
            elif e.epoch in self._closed and e.touched_at >= self._closed[e.epoch].began:
                self._closed[e.epoch].update(e.z, e.touches)
        live = self._ledger.epochs()
        self._closed = {epoch: s for epoch, s in self._closed.items() if epoch in live}
        label_at = self._buffer.last_label_at
        if label_at is not None and self._unlabelled_since is not None and label_at >= self._unlabelled_since:
            self._unlabelled_since = None

    def _read(self, now: float) -> Reading:
        p, ledger = self.policy, self._ledger
        labelled = ledger.labelled(self._epoch)
        measured = labelled >= self.step_labels
        uppers = {epoch: self._upper(s) for epoch, s in self._closed.items()}
        planning = self._sequences.planning(now)
        uppers[self._epoch] = self._upper(planning) if measured else 1.0
        seen = {epoch: ledger.tau_seen(epoch, self.step_labels) for epoch in uppers}

        def proven(epoch: int, level: int) -> float:
            tau = level_tau(level)
            return min(1.0, seen.get(epoch, 0.0) / tau) if tau > 0 else 1.0

        def price(epoch: int, level: int) -> float:
            share = proven(epoch, level)
            return uppers.get(epoch, 1.0) * share + (1 - share)

        means = {epoch: s.mean_per_touch for epoch, s in self._closed.items()} | {self._epoch: planning.mean_per_touch}
        spent_upper = ledger.spent_upper(price) + self._overdue(now)
        if ledger.uneven_forks():
            # Where forks were drawn more often counts more in a pooled mean; weigh slices by the touches they served.
            pooled = ledger.spent_upper(lambda epoch, _: max(0.0, means.get(epoch, 0.0)))
            spent_upper += max(0.0, ledger.spent(means[self._epoch], credit=True) - pooled)
        budget = p.max_loss * ledger.expected_requests(now)
        remaining = 1 - spent_upper / budget if budget > 0 else 1.0
        upper = uppers[self._epoch]
        recent = self._sequences.recent(now)
        split = self._sequences.split(1 - p.confidence)
        if measured and recent is not None and recent.lower_per_touch(split) > upper:
            upper = self._upper(recent)
        since = self._unlabelled_since
        return Reading(
            upper=upper,
            tau_seen=seen[self._epoch],
            labelled=labelled,
            measured=measured,
            spent=ledger.spent(max(0.0, means[self._epoch])),
            spent_upper=spent_upper,
            budget=budget,
            remaining=remaining,
            allowed=p.planned_loss * headroom(remaining, p.start, p.stop),
            unproven=ledger.unproven(lambda epoch, level: (1 - proven(epoch, level)) * (epoch == self._epoch)),
            stale=self._last_request_at is None or now - self._last_request_at > min(STALE_S, p.window_s / K),
            labels_stale=since is not None and now - since > p.label_deadline_s,
            burn=self._burn.read(now, p, enough=labelled >= p.min_labels, min_forks=self.step_labels),
        )

    def _held(self, r: Reading, now: float) -> bool:
        """Whether decoding stays lossless: for a fast burn's cooldown, or until an exhausted window recovers."""
        p = self.policy
        if r.burn.page is not None:
            self._hold = ("fast_burn", now + p.cooldown_s)
            self._hold_detail = f"Lossless: the error budget is {r.burn.page}."
        elif self._hold is None and r.budget > 0 and r.remaining <= p.stop:
            self._exhaust(r, now)
        if self._hold is None:
            return False
        kind, until = self._hold
        recovered = r.remaining >= (p.start + p.stop) / 2
        if kind == "fast_burn" and now >= until and not recovered:
            self._exhaust(r, now)
        return now < until or not recovered or r.stale

    def _exhaust(self, r: Reading, now: float) -> None:
        self._hold = ("exhausted", now)
        self._hold_detail = f"Lossless: {r.spent_upper:.1f} of {r.budget:.1f} loss units of the window may be spent."

    def _target(self, r: Reading, now: float) -> tuple[float, str]:
        """Touches per request that evidence and budget allow, and what limits them."""
        p = self.policy
        pulled = "pull_back" if r.remaining < p.start else ""
        if not r.measured:
            return r.allowed, pulled or ("few_labels" if r.labelled else "certified")
        steady = r.allowed / r.upper
        if r.unproven > p.max_step_up * r.budget:
            step, reason = 0.0, "unproven"
        else:
            waiting = self._ledger.rate(now) * (self._buffer.delay_s or 0.0)
            step, reason = affordable_step(p, r, steady - r.tau_seen, self.step_labels, waiting), "step_up"
        limit = max(r.allowed, r.tau_seen + step)
        return (steady, pulled or "steady") if steady <= limit else (limit, reason)

    def _loosen_slowly(self, tau: float, reason: str, r: Reading) -> tuple[float, str]:
        if tau <= self._tau:
            return tau, reason
        if r.stale:
            return self._tau, "no_traffic"
        if tau > r.allowed and (r.labels_stale or self._matured <= self._matured_at_step):
            held = max(min(tau, r.allowed), self._tau)
            return held, "labels_missing" if r.labels_stale else "waiting_for_labels"
        self._matured_at_step = self._matured
        return tau, reason

    def _allowance(
        self, state: str, reason: str, explanation: str, now: float, reading: Reading | None = None
    ) -> Allowance:
        p = self.policy
        r = reading or self._read(now)
        length = self._ledger.mean_length(DEFAULT_LENGTH)
        return Allowance(
            state=state,
            reason=reason,
            explanation=explanation,
            tau_allowed=self._tau,
            d_allowed=self._tau / length,
            u_kappa=r.upper,
            tau_seen=r.tau_seen,
            mean_length=length,
            spent=r.spent,
            spent_upper=r.spent_upper,
            budget=r.budget,
            remaining=r.remaining,
            burn=r.burn.by_window,
            alerts=alerts_of(r, self._hold, self._hold_detail, self._tau > 0),
            holdback=p.holdback,
            fork=self._fork(r, now),
            label=1.0,
            labels_needed=self._labels_needed(r, now) if self._hold is None else None,
            forks_matured=r.labelled,
            requests_in_window=self._ledger.requests,
            evidence_epoch=self._epoch,
            counts=dict(self.counts),
        )

    # Small parts.

    @property
    def step_labels(self) -> int:
        """Labelled forks that make a level of touches trusted."""
        return max(8, self.policy.min_labels // 10)

    def _upper(self, sequence: Sequence) -> float:
        return max(U_FLOOR, sequence.upper_per_touch(self._sequences.split(1 - self.policy.confidence)))

    def _overdue(self, now: float) -> int:
        """Drawn forks that are later than labels usually are: charged as lost before their deadline says so."""
        usual = self._buffer.label_delay_s
        after = self.policy.window_s / K if usual is None else 4 * usual
        return self._buffer.overdue(now, min(self.policy.label_deadline_s, max(after, self.policy.window_s / 100)))

    def _fork(self, r: Reading, now: float) -> float:
        """Probability of a fork: cold while the level or the evidence is young, then warm, or what keeps the bound.

        Touches of the whole window are charged at its bound, so evidence that thins out makes the past dearer: enough
        forks a window are drawn for the bound to stay where the touches in use need it.
        """
        p = self.policy
        if r.labelled < p.min_labels or self._tau > r.tau_seen * REST_TOLERANCE or self._tau <= 0:
            return p.fork_cold
        split = self._sequences.split(1 - p.confidence)
        total = labels_for(self._sequences.planning(now), r.allowed / self._tau, split, more=False)
        touched = -math.expm1(-self._tau) * self._ledger.expected_requests(now)
        keep = p.fork_cold if total is None or touched <= 0 else 1.25 * total / touched
        return min(max(p.fork_warm, keep), max(p.fork_cold, p.fork_warm))

    def _labels_needed(self, r: Reading, now: float) -> int | None:
        """About how many more labelled forks allow the next quarter of touches; None when labels would not."""
        p = self.policy
        if p.max_loss <= 0 or p.fork_cold <= 0:
            return None
        if not r.measured:
            return self.step_labels - r.labelled
        at_level = self.step_labels - self._ledger.labelled_at(self._epoch, self._tau / REST_TOLERANCE)
        planning = self._sequences.planning(now)
        target = r.allowed / (1.25 * self._tau) if self._tau > 0 else 1.0
        for_bound = labels_for(planning, target, self._sequences.split(1 - p.confidence))
        return None if for_bound is None else max(0, at_level, for_bound)

    def _at(self, now: float) -> float:
        """Time never goes back; the first call begins the first epoch."""
        if self._now == -math.inf:
            self._ledger.began = self._epoch_began = now
            self._sequences = Staggered(self.policy.window_s, K, now)
            self._burn.reset_evidence(now)
        self._now = max(self._now, now)
        return self._now

    def _other_metric(self) -> None:
        self._scorers = ScorerWatch()
        self.reset_evidence("metric", self._now)

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def to_state(self) -> dict[str, Any]:
        """JSON-able state from which `from_state` continues exactly."""
        return {
            "rule": self.rule,
            "metric": self.policy.metric,
            "now": None if self._now == -math.inf else self._now,
            "counts": dict(self.counts),
            "ledger": self._ledger.to_state(),
            "leases": self._leases.to_state(),
            "buffer": self._buffer.to_state(),
            "epoch": [self._epoch, self._epoch_began],
            "sequences": self._sequences.to_state(),
            "closed": [[epoch, s.to_state()] for epoch, s in self._closed.items()],
            "burn": self._burn.to_state(),
            "scorers": self._scorers.to_state(),
            "tau": self._tau,
            "matured": [self._matured, self._matured_at_step],
            "seen_at": [self._last_request_at, self._unlabelled_since],
            "hold": None if self._hold is None else [*self._hold, self._hold_detail],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], policy: ClassPolicy, rule: str) -> Governor:
        """The governor that `to_state` described, under ``policy``; another rule or metric starts new evidence."""
        self = cls(policy, state["rule"])
        if state["now"] is None:
            self.rule = rule
            return self
        self._now = float(state["now"])
        self.counts = dict(state["counts"])
        self._ledger = Ledger.from_state(state["ledger"])
        self._leases = LeaseBook.from_state(state["leases"])
        self._buffer = EvidenceBuffer.from_state(state["buffer"], policy.label_deadline_s)
        self._epoch, self._epoch_began = state["epoch"]
        self._sequences = Staggered.from_state(state["sequences"])
        self._closed = {epoch: Sequence.from_state(s) for epoch, s in state["closed"]}
        self._burn = BurnMeter.from_state(state["burn"], policy, self._now)
        self._scorers = ScorerWatch.from_state(state["scorers"])
        self._tau = state["tau"]
        self._matured, self._matured_at_step = state["matured"]
        self._last_request_at, self._unlabelled_since = state["seen_at"]
        if state["hold"] is not None:
            kind, until, self._hold_detail = state["hold"]
            self._hold = (kind, until)
        self._ledger.set_window(policy.window_s, self._now)
        self._sequences.window_s = policy.window_s
        if rule != self.rule:
            self.reset_evidence("rule", self._now, rule)
        if state["metric"] != policy.metric:
            self._other_metric()
        return self
