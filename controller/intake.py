"""What a governor takes in: requests, forks, labels and orders, each counted once and charged to its lease.

Evidence about loss per touch is kept per rule (`controller.track`), what was spent in one account
(`controller.budget`). All times are steady seconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

from controller.budget import UNKNOWN, Ledger, level_of
from controller.burn import BurnMeter
from controller.calendar import period_start
from controller.evidence import LEAST_FORK, EvidenceBuffer, ScorerWatch, by_arm
from controller.floor import Floor
from controller.forkplan import ForkPlan
from controller.leasebook import LeaseBook
from controller.standing import Standing
from controller.track import Track
from storage.records import ForkRecord, OperatorAction, QualityScore, RequestRecord

if TYPE_CHECKING:
    from policies.model import ClassPolicy

K = 10  # sequences of evidence in a window
SLICES = 40  # slices of the account in it
FOREIGN = -1  # the evidence epoch of requests that no lease allowed: charged in full, never evidence
WORST_ALARM = 10.0  # a quality alarm raises the planned loss by at most this factor
SURE = 0.5  # share of a detected loss that burn rates take for granted


def arm_of(strategy: str, rule: str) -> str:
    """The name under which evidence is kept: the rule, with its strategy where that is not plain speculation."""
    return rule if strategy == "speculative" else f"{strategy}:{rule}"


class Intake:
    """The observing half of `controller.governor.Governor`; ``rule`` names what is leased (`arm_of`)."""

    def __init__(self, policy: ClassPolicy, rule: str):
        self.policy, self.rule = policy, rule
        self.counts: dict[str, int] = {}
        self.standing = Standing()
        self.forks = ForkPlan()
        self._now = -math.inf
        self._ledger = Ledger(policy.window_s, SLICES, 0.0)
        self._leases = LeaseBook()
        self._buffer = EvidenceBuffer(policy.label_deadline_s)
        self._tracks = {rule: Track(rule, 0, policy.window_s, K, 0.0)}
        self._epochs = 1  # evidence epochs so far, of all rules
        self._closed: dict[int, tuple[float, float]] = {}  # ended epoch -> its bound on loss per touch, its tau_seen
        self._burn = BurnMeter(policy, 0.0)
        self._floor = Floor(policy.window_s)
        self._scorers = ScorerWatch()
        self._planned = math.inf  # touches per request of the last lease
        self._last_request_at: float | None = None
        self._unlabelled_since: float | None = None
        self._jumped: tuple[float, float] | None = None  # loss per touch since a detected rise, until when it is news
        self._hold: tuple[str, float] | None = None  # ("fast_burn" | "exhausted" | "floor", earliest release)
        self._hold_detail = ""

    def observe_request(self, record: RequestRecord, now: float) -> None:
        """Count a served request and charge it to its lease; a drawn fork starts waiting for its labels."""
        now = self._at(now)
        epoch, level = self._charged_to(record)
        if not self._buffer.add_request(record, epoch, level, now):
            return
        touched, lenient = record.arm != "untouched", record.arm == "lenient"
        alone = by_arm(record)
        blind = touched and not alone and not record.fork_drawn and not LEAST_FORK <= record.fork_prob < 1
        touches = record.touches if lenient else 0
        self._served(now, epoch, level, 1, record.tokens, int(lenient), touches, blind=blind)
        self.forks.served(record.target_passes)
        awaited = record.label_drawn and self._buffer.last_label_at is not None if alone else record.fork_drawn
        if touched and awaited and self._unlabelled_since is None:
            self._unlabelled_since = now

    def observe_requests(
        self,
        now: float,
        lease: tuple[int, int],
        *,
        requests: int,
        tokens: int,
        touched: int,
        touches: int,
        fork_prob: float,
        arm: str | None = None,
        passes: float = 0.0,
    ) -> None:
        """Count many requests of one lease (epoch, seq) at once, ``touched`` of them with ``touches`` in all.

        Their drawn forks come by `observe_forks`. ``arm`` is the rule on trial that they got, None the leased one;
        ``passes`` the target passes of all, 0 where nobody counts them.
        """
        now = self._at(now)
        if passes:
            self.forks.served(passes, requests)
        plans = self._leases.find(*lease) or {}
        epoch, level = plans.get(arm or self.rule, (FOREIGN, UNKNOWN))
        self._served(now, epoch, level, requests, tokens, touched, touches, blind=fork_prob < LEAST_FORK)

    def observe_forks(
        self,
        key: str,
        now: float,
        lease: tuple[int, int],
        *,
        count: int,
        touches: int,
        weight: float,
        arm: str | None = None,
        passes: float = 0.0,
    ) -> None:
        """Many drawn forks of requests of one lease that arrived now; ``weight`` as in `controller.evidence`."""
        now = self._at(now)
        if passes:
            self.forks.ran(passes, count)
        plans = self._leases.find(*lease) or {}
        self._buffer.add_bundle(key, count, touches, weight, *plans.get(arm or self.rule, (FOREIGN, UNKNOWN)), now)
        if self._unlabelled_since is None:
            self._unlabelled_since = now

    def observe_labels(self, key: str, total: float, squares: float, now: float) -> None:
        """The labels of what `observe_forks` announced: sum of the score differences and of their squares."""
        self._buffer.settle_bundle(key, total, squares, self._at(now))

    def observe_fork(self, record: ForkRecord, now: float) -> None:
        """Take in how a drawn fork ended."""
        self._buffer.add_fork(record, self._at(now))
        self.forks.ran(record.target_passes)

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
        if score.branch == "served":
            self._floor.add(now, score.score)
        self._buffer.add_score(score, now)

    def leased(self, epoch: int, seq: int, tau: float, trial: tuple[str, float] | None = None) -> None:
        """Record the planned touches per request of a lease, and of a rule on trial in it; call it after each lease."""
        plans = {self.rule: (self._track.epoch, level_of(tau))}
        if trial is not None:
            plans[trial[0]] = (self.track(trial[0]).epoch, level_of(trial[1]))
        self._leases.add(epoch, seq, plans)
        self._planned = tau

    def set_policy(self, policy: ClassPolicy, now: float) -> None:
        """Obey a new policy from the next decision on; another metric starts new evidence."""
        now = self._at(now)
        metric_changed = policy.metric != self.policy.metric
        self.policy = policy
        self._buffer.deadline_s = policy.label_deadline_s
        self._set_window(now)
        self._burn.set_policy(policy, now)
        if metric_changed:
            self._other_metric()

    def reset_evidence(self, reason: str, now: float, rule: str | None = None) -> None:
        """Start new evidence for every rule, certified: ``reason`` is counted, ``rule`` is leased from now on.

        What was served stays on the account, and its own forks still settle it.
        """
        now = self._at(now)
        self._count(f"evidence_reset.{reason}")
        for track in self._tracks.values():
            self._close(track, now)
        self.rule = rule or self.rule
        self.track(self.rule)
        self._burn.reset_evidence(now)
        self._unlabelled_since = self._jumped = None

    def act(self, action: OperatorAction, now: float) -> None:
        """Obey an operator: freeze, lossless, resume, or a reset or adjustment of the budget."""
        now = self._at(now)
        self.standing.obey(action)
        if action.action == "reset_budget":
            self._ledger.forgive(now)
            self._hold = None
        elif action.action == "adjust_budget":
            self.standing.adjust(now, action.amount or 0.0)
        self._count(f"operator.{action.action}")

    def alarm(self, before: float, since: float, now: float) -> None:
        """The mean loss of forks has changed, by a detector's word. A rise tightens; a fall changes nothing.

        Until there are labels since then, planning goes by as much more loss; burn rates see half of it, which leaves
        room for the detector's own error.
        """
        now = self._at(now)
        if since <= before:
            return
        self._count("quality_alarm")
        planning = self._track.sequences.planning(now)
        self._track.rose(min(WORST_ALARM, since / max(before, 1e-3)), now)
        if planning.touches:
            self._jumped = (SURE * since * planning.n / planning.touches, now + self.policy.cooldown_s)

    # Which rule.

    def track(self, name: str) -> Track:
        """What is known about a rule; a new one starts without evidence."""
        if name not in self._tracks:
            self._tracks[name] = Track(name, self._epochs, self.policy.window_s, K, self._now)
            self._epochs += 1
        return self._tracks[name]

    def switch(self, name: str, now: float) -> None:
        """Lease another rule from now on, with the evidence there is about it; it starts where it was seen."""
        now = self._at(now)
        self._count("rule_switched")
        track = self.track(name)
        self._track.tau, self.rule = 0.0, name
        track.tau = min(track.tau, self._ledger.tau_seen(track.epoch, self.step_labels))
        self._burn.reset_evidence(now)

    def _settle(self, now: float) -> None:
        """Forks whose turn has come become evidence of their epoch, and settle the account."""
        ledger = self._ledger
        if self.policy.calendar is not None and (start := period_start(self.policy.calendar, now)) > ledger.since:
            ledger.forgive(start)
        ledger.advance(now)
        tracks = {track.epoch: track for track in self._tracks.values()}
        for track in self._tracks.values():
            track.sequences.advance(now)
        self._burn.advance(now)
        for e in self._buffer.release(now):
            ledger.add_fork(e)
            if e.epoch in tracks:
                tracks[e.epoch].add(e)
            if e.epoch == self._track.epoch and not e.arms:
                self._burn.add_fork(e, max(e.touched_at, self._track.began))
        ledger.flight.settle(self._buffer.oldest(now))
        live = ledger.epochs()
        self._closed = {epoch: known for epoch, known in self._closed.items() if epoch in live}
        label_at = self._buffer.last_label_at
        if label_at is not None and self._unlabelled_since is not None and label_at >= self._unlabelled_since:
            self._unlabelled_since = None
        ledger.aim = self.forks.aim(self.policy, self.policy.max_loss * ledger.lately(now))

    @property
    def step_labels(self) -> int:
        """Labelled forks that make a level of touches trusted."""
        return max(8, self.policy.min_labels // 10)

    @property
    def _track(self) -> Track:
        return self._tracks[self.rule]

    def _upper(self, track: Track, now: float) -> float:
        """Bound on a rule's loss per touch; 1 while it has too few labels."""
        if self._ledger.labelled(track.epoch) < self.step_labels:
            return 1.0
        return track.upper(track.sequences.planning(now), 1 - self.policy.confidence)

    def _close(self, track: Track, now: float) -> None:
        """End a rule's evidence epoch: what is still in flight from it stays priced as it was."""
        self._closed[track.epoch] = (self._upper(track, now), self._ledger.tau_seen(track.epoch, self.step_labels))
        track.restart(self._epochs, now)
        self._epochs += 1

    def _charged_to(self, record: RequestRecord) -> tuple[int, int]:
        """(evidence epoch, level) of the lease that served a request."""
        plans = self._leases.find(record.epoch, record.lease_seq)
        if plans is None:
            self._count("unknown_lease")
            known = record.rule == "lossless" or arm_of(record.strategy, record.rule) == self.rule
            return (self._track.epoch if known else FOREIGN, UNKNOWN)
        arm = arm_of(record.strategy, record.rule)
        if arm not in plans and record.arm != "untouched":
            return (FOREIGN, UNKNOWN)
        return plans.get(arm) or next(iter(plans.values()))

    def _served(
        self, now: float, epoch: int, level: int, requests: int, tokens: int, touched: int, touches: int, *, blind: bool
    ) -> None:
        if self._last_request_at is None:
            self._ledger.began = now
        self._last_request_at = now
        self._ledger.add_requests(
            now, epoch, level, requests=requests, tokens=tokens, touched=touched, touches=touches, blind=blind
        )
        self._burn.add_requests(now, requests, touched, touches)

    def _set_window(self, now: float) -> None:
        window_s = self.policy.window_s
        self._ledger.set_window(window_s, now)
        self._floor.window_s = window_s
        for track in self._tracks.values():
            track.sequences.window_s = window_s

    def _at(self, now: float) -> float:
        """Time never goes back; the first call begins the first epoch."""
        if self._now == -math.inf:
            self._ledger.began = now
            for track in self._tracks.values():
                track.restart(track.epoch, now)
            self._burn.reset_evidence(now)
        self._now = max(self._now, now)
        return self._now

    def _other_metric(self) -> None:
        self._scorers = ScorerWatch()
        self._floor = Floor(self.policy.window_s)
        self.reset_evidence("metric", self._now)

    def missing(self, limit: int) -> list[tuple[str, tuple[str, ...], float, float]]:
        """Requests that lack labels: id, branches without a score, time of touch, deadline."""
        return list(self._buffer.missing(limit))

    def slices(self) -> list[dict[str, Any]]:
        """The account's slices as rows, with the rule that each evidence epoch belongs to."""
        names = {track.epoch: track.name for track in self._tracks.values()}
        return [row | {"rule": names.get(row["evidence_epoch"], self.rule)} for row in self._ledger.rows()]

    def note(self, name: str) -> None:
        """Count an event."""
        self._count(name)

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def to_state(self) -> dict[str, Any]:
        """JSON-able state from which `from_state` continues exactly."""
        return {
            "rule": self.rule,
            "metric": self.policy.metric,
            "now": None if self._now == -math.inf else self._now,
            "counts": dict(self.counts),
            "standing": self.standing.to_state(),
            "forks": self.forks.to_state(),
            "ledger": self._ledger.to_state(),
            "leases": self._leases.to_state(),
            "buffer": self._buffer.to_state(),
            "tracks": [track.to_state() for track in self._tracks.values()],
            "epochs": self._epochs,
            "closed": [[epoch, *known] for epoch, known in self._closed.items()],
            "burn": self._burn.to_state(),
            "floor": self._floor.to_state(),
            "scorers": self._scorers.to_state(),
            "seen_at": [self._last_request_at, self._unlabelled_since],
            "jumped": self._jumped,
            "planned": None if self._planned == math.inf else self._planned,
            "hold": None if self._hold is None else [*self._hold, self._hold_detail],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], policy: ClassPolicy, rule: str) -> Self:
        """The governor that `to_state` described, under ``policy``; another rule or metric starts new evidence."""
        self = cls(policy, state["rule"])
        self.standing = Standing.from_state(state["standing"])
        if state["now"] is None:
            self.rule = rule
            self._tracks = {rule: Track(rule, 0, policy.window_s, K, 0.0)}
            return self
        self._now = float(state["now"])
        self.counts = dict(state["counts"])
        self.forks = ForkPlan.from_state(state["forks"])
        self._ledger = Ledger.from_state(state["ledger"])
        self._leases = LeaseBook.from_state(state["leases"])
        self._buffer = EvidenceBuffer.from_state(state["buffer"], policy.label_deadline_s)
        self._tracks = {track.name: track for track in map(Track.from_state, state["tracks"])}
        self._epochs = state["epochs"]
        self._closed = {epoch: (upper, seen) for epoch, upper, seen in state["closed"]}
        self._burn = BurnMeter.from_state(state["burn"], policy, self._now)
        self._floor = Floor.from_state(state["floor"])
        self._scorers = ScorerWatch.from_state(state["scorers"])
        self._last_request_at, self._unlabelled_since = state["seen_at"]
        self._planned = math.inf if state["planned"] is None else state["planned"]
        self._jumped = None if state["jumped"] is None else (state["jumped"][0], state["jumped"][1])
        if state["hold"] is not None:
            kind, until, self._hold_detail = state["hold"]
            self._hold = (kind, until)
        self._set_window(self._now)
        if rule != self.rule:
            self.switch(rule, self._now)
        if state["metric"] != policy.metric:
            self._other_metric()
        return self
