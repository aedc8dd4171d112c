"""The governor: budget, bounds, policy and time become the touches that leniency may cause.

Without labels a request loses at most the probability that it is touched, so a budget of touches is *certified* as it
stands. Paired forks tell the loss per touch; then more touches fit the same budget (*measured*). What has been spent is
bounded by the account of `controller.budget` at the policy's confidence; as the bound nears the budget, leniency is
pulled back, and the promise rests on that alone. How fast to spend is planned with an estimate (`controller.track`)
that was learnt at touch rates up to `tau_seen`; touches beyond are charged one each until their own labels have come,
and a step up is taken only if the budget could bear every extra touch being harmful. Tightening is immediate; loosening
goes by one step per decision and only on new labels.

Sources: `docs/mathematics.md`; Google SRE Workbook, chapter 5, for burn rates.
"""

from __future__ import annotations

from collections import Counter

from controller.allowance import (
    AlertState,
    Allowance,
    Reading,
    affordable_step,
    alerts_of,
    explain,
    headroom,
    labels_for,
    stands,
    state_of,
)
from controller.bounds import Sequence
from controller.budget import level_tau
from controller.evidence import LEAST_FORK
from controller.floor import floor_alerts
from controller.forkplan import REST_TOLERANCE
from controller.intake import Intake, K, arm_of
from controller.track import Track, planned_per_touch

__all__ = ["AlertState", "Allowance", "Governor", "arm_of"]

SHORTFALL = 3.0  # times what the radius exceeds its aim by, because forks are too few, is left out of the plan
FALLEN = 0.9  # of the budget, below which that of a window that is not over yet counts as fallen
DEFAULT_LENGTH = 256.0  # tokens per request while unknown; long, so that few touches per token are allowed
STALE_S = 300.0
TRIAL = 0.3  # of the plan, what a rule on trial may spend: certified, or by its bound
TRIAL_STEP = 0.5  # of a step's share of the budget, what one of its steps up may cost


class Governor(Intake):
    """Decides the touches per request of one traffic class under one accept rule, which it may change."""

    def decide(self, now: float) -> Allowance:
        """The allowance from now on. Tightens at once; loosens by at most one step, and only on new labels."""
        now = self._at(now)
        self._settle(now)
        track = self._track
        if self.policy.max_loss <= 0:
            track.tau = 0.0
            return self._allowance("disabled", "disabled", "The policy allows no loss, so decoding is lossless.", now)
        reading = self.read(track, now)
        if self._held(reading, now):
            track.tau = 0.0
            kind = self._hold[0] if self._hold else ""
            return self._allowance("breached", kind, f"{self._hold_detail} {stands(reading)}", now, reading)
        if self._hold is not None:
            self._hold = None
            self.reset_evidence("released", now)
            reading = self.read(track, now)
        before = track.tau
        tau, reason = self._target(reading, now)
        track.tau, reason = self._loosen_slowly(track, tau, reason, reading)
        explanation = explain(reason, track.tau, reading, self.step_labels)
        ordered = self.standing.limit(track.tau, before)
        if ordered is not None:
            track.tau, reason, explanation = ordered
        return self._allowance(state_of(reading), reason, explanation, now, reading)

    def read(self, track: Track, now: float) -> Reading:
        """Everything that a decision about one rule rests on."""
        p, ledger = self.policy, self._ledger
        significance = 1 - p.confidence
        known = dict(self._closed)
        for t in self._tracks.values():
            known[t.epoch] = (self._upper(t, now), ledger.tau_seen(t.epoch, self.step_labels))

        def proven(epoch: int, level: int) -> float:
            tau = level_tau(level)
            return min(1.0, known.get(epoch, (1.0, 0.0))[1] / tau) if tau > 0 else 1.0

        def price(epoch: int, level: int) -> float:
            share = proven(epoch, level)
            return known.get(epoch, (1.0, 0.0))[0] * share + (1 - share)

        labelled = ledger.labelled(track.epoch)
        measured = labelled >= self.step_labels
        planning = track.sequences.planning(now)
        upper = known[track.epoch][0]
        per_touch = planned_per_touch(planning) if measured else 1.0
        recent = None if track.arms else track.sequences.recent(now)
        if measured and recent is not None and recent.lower_per_touch(track.sequences.split(significance)) > per_touch:
            per_touch, upper = planned_per_touch(recent), max(upper, track.upper(recent, significance))
        since_rise = track.since_change(now, self.step_labels) if measured else None
        alarmed = since_rise is not None and since_rise > per_touch
        per_touch = max(per_touch, since_rise or 0.0)
        jumped = self._jumped[0] if self._jumped is not None and now < self._jumped[1] else 0.0
        budget = max(0.0, p.max_loss * ledger.budget_requests(now) + self.standing.adjusted(now - p.window_s))
        overdue = self._overdue(now)
        spent_upper = ledger.spent_upper(significance, price) + overdue
        remaining = 1 - spent_upper / budget if budget > 0 else float(spent_upper <= 0)
        for first in ledger.turns() if budget > 0 else ():
            most = p.max_loss * ledger.budget_requests(now, first)
            if most < FALLEN * budget:
                remaining = min(remaining, 1 - (ledger.spent_upper(significance, price, first) + overdue) / most)
        since = self._unlabelled_since
        return Reading(
            upper=upper,
            per_touch=per_touch,
            alarmed=alarmed,
            tau_seen=known[track.epoch][1],
            labelled=labelled,
            measured=measured,
            spent=ledger.spent(planning.mean_per_touch if measured else 1.0),
            spent_upper=spent_upper,
            budget=budget,
            remaining=remaining,
            allowed=self._plan(track, planning, budget, now, measured=measured) * headroom(remaining, p.start, p.stop),
            unproven=ledger.flight.touches(lambda epoch, level: (1 - proven(epoch, level)) * (epoch == track.epoch)),
            stale=self._last_request_at is None or now - self._last_request_at > min(STALE_S, p.window_s / K),
            labels_stale=since is not None and now - since > p.label_deadline_s,
            burn=self._burn.read(now, p, labels=labelled, min_forks=self.step_labels, jumped=jumped),
        )

    def _plan(self, track: Track, known: Sequence, budget: float, now: float, *, measured: bool) -> float:
        """The loss rate per request to spend while there is headroom: less where forks are too few for the radius."""
        p = self.policy
        if not measured:
            return p.planned_loss
        requests = self._ledger.lately(now)
        lately = min(budget, p.max_loss * requests)
        short = self.forks.shortfall(p, min(track.tau, self._planned), known, requests, lately)
        return max(p.planned_loss / 2, p.planned_loss - p.max_loss * SHORTFALL * short)

    def _held(self, r: Reading, now: float) -> bool:
        """Whether decoding stays lossless: for a fast burn's cooldown, or until an exhausted window recovers."""
        p = self.policy
        low = self._floor.below(p.floor, now, p.min_labels)
        if r.burn.page is not None:
            self._hold = ("fast_burn", now + p.cooldown_s)
            self._hold_detail = f"Lossless: the error budget is {r.burn.page}."
        elif self._hold is None and r.budget > 0 and r.remaining <= p.stop:
            self._exhaust(r, now)
        elif self._hold is None and low is not None:
            self._hold = ("floor", now + p.cooldown_s)
            self._hold_detail = f"Lossless: {p.metric} is {low:.3f} on served answers, below the floor of {p.floor:g}."
        if self._hold is None:
            return False
        kind, until = self._hold
        recovered = r.remaining >= (p.start + p.stop) / 2
        if kind == "fast_burn" and now >= until and not recovered:
            self._exhaust(r, now)
        return now < until or not recovered or r.stale or (kind == "floor" and low is not None)

    def _exhaust(self, r: Reading, now: float) -> None:
        self._hold = ("exhausted", now)
        self._hold_detail = (
            f"Lossless since the budget ran out: then {r.spent_upper:.1f} of {r.budget:.1f} loss units of the window "
            f"may have been spent, {max(0.0, r.remaining):.0%} remained."
        )

    def _target(self, r: Reading, now: float) -> tuple[float, str]:
        """Touches per request that evidence and budget allow, and what limits them."""
        p = self.policy
        pulled = "pull_back" if headroom(r.remaining, p.start, p.stop) < 1 / 2 else ""
        if not r.measured:
            return r.allowed, pulled or ("few_labels" if r.labelled else "certified")
        steady = r.allowed / r.per_touch / (1 - p.holdback)  # a holdback request loses nothing
        if r.unproven > p.max_step_up * r.budget:
            step, reason = 0.0, "unproven"
        else:
            waiting = self._ledger.rate(now) * (self._buffer.delay_s or 0.0)
            budget, most = p.max_step_up * r.budget, steady - r.tau_seen
            afford = min(budget, max(0.0, r.remaining - p.stop) * r.budget)
            drawn = p.fork_cold if p.fork_cold >= LEAST_FORK else 1.0  # where none can fork, every label is asked for
            step, reason = affordable_step(afford, drawn, r, most, self.step_labels, waiting), "step_up"
        limit = max(r.allowed, r.tau_seen + step)
        settled = pulled or ("quality_alarm" if r.alarmed else "steady")
        return (steady, settled) if steady <= limit else (limit, reason)

    def _loosen_slowly(self, track: Track, tau: float, reason: str, r: Reading) -> tuple[float, str]:
        if tau <= track.tau:
            return tau, reason
        if r.stale:
            return track.tau, "no_traffic"
        if tau > r.allowed and (r.labels_stale or track.matured <= track.matured_at_step):
            held = max(min(tau, r.allowed), track.tau)
            return held, "labels_missing" if r.labels_stale else "waiting_for_labels"
        track.matured_at_step = track.matured
        return tau, reason

    def _allowance(
        self, state: str, reason: str, explanation: str, now: float, reading: Reading | None = None
    ) -> Allowance:
        p = self.policy
        r = reading or self.read(self._track, now)
        length = self._ledger.mean_length(DEFAULT_LENGTH)
        tau = self._track.tau
        self._ledger.note_expected(now)
        return Allowance(
            state=state,
            reason=reason,
            explanation=explanation,
            tau_allowed=tau,
            d_allowed=tau / length,
            u_kappa=r.upper,
            per_touch=r.per_touch,
            tau_seen=r.tau_seen,
            mean_length=length,
            spent=r.spent,
            spent_upper=r.spent_upper,
            budget=r.budget,
            remaining=r.remaining,
            burn=r.burn.by_window,
            burn_lower=r.burn.lower,
            alerts=alerts_of(r, self._hold, self._hold_detail, tau > 0) + floor_alerts(self._floor, p, now),
            holdback=p.holdback,
            fork=self._fork(r, tau, now),
            label=1.0,
            labels_needed=self._labels_needed(r, now) if self._hold is None else None,
            forks_matured=r.labelled,
            requests_in_window=self._ledger.requests,
            evidence_epoch=self._track.epoch,
            counts=dict(Counter(self.counts) + Counter(self._buffer.counts)),
            held_until=self._hold[1] if self._hold is not None and self._hold[0] != "exhausted" else None,
        )

    def candidate(self, name: str, share: float, fork: float, now: float) -> tuple[Reading, float]:
        """How a rule on trial stands, and the touches that each of its ``share`` of the requests may get.

        Without evidence its touches cost `TRIAL` of the plan in all, each counted as lost; a step up is paid for like
        one of the leased rule and waits for new labels too. ``fork`` is the probability of its forks.
        """
        now = self._at(now)
        track = self.track(name)
        r = self.read(track, now)
        if share <= 0 or r.remaining <= self.policy.stop or self._hold is not None or fork <= 0:
            track.tau = 0.0
            return r, 0.0
        tau = TRIAL * r.allowed / share
        if r.measured:
            budget = TRIAL_STEP * self.policy.max_step_up * r.budget
            most = TRIAL * r.allowed / share / r.per_touch - r.tau_seen
            waiting = share * self._ledger.rate(now) * (self._buffer.delay_s or 0.0)
            step = affordable_step(budget, fork, r, most, self.step_labels, waiting) if r.unproven <= budget else 0.0
            tau = max(tau, r.tau_seen + step) if most > 0 else max(tau, r.tau_seen + most)
        if tau > track.tau and tau > TRIAL * r.allowed / share and track.matured <= track.matured_at_step:
            tau = max(track.tau, TRIAL * r.allowed / share)
        elif tau > track.tau:
            track.matured_at_step = track.matured
        track.tau = self.standing.limit_trial(tau)
        return r, track.tau

    def _fork(self, r: Reading, tau: float, now: float) -> float:
        """Probability of a fork, for the touches that the last lease was planned to cause where that is less."""
        ledger, p = self._ledger, self.policy
        known, requests = self._track.sequences.planning(now), ledger.lately(now)
        budget = min(r.budget, p.max_loss * requests)
        return self.forks.probability(p, r, min(tau, self._planned), known, requests, budget, ledger.severity)

    def _overdue(self, now: float) -> float:
        """What forks stand for that are later than labels usually are: charged as lost before their deadline."""
        usual = self._buffer.label_delay_s
        after = self.policy.window_s / K if usual is None else 4 * usual
        return self._buffer.overdue(now, min(self.policy.label_deadline_s, max(after, self.policy.window_s / 100)))

    def _labels_needed(self, r: Reading, now: float) -> int | None:
        """About how many more labelled forks allow the next quarter of touches; None when labels would not."""
        p, track = self.policy, self._track
        if p.max_loss <= 0 or (p.fork_cold < LEAST_FORK and not track.matured):
            return None
        if not r.measured:
            return self.step_labels - r.labelled
        at_level = self.step_labels - self._ledger.labelled_at(track.epoch, track.tau / REST_TOLERANCE)
        target = r.allowed / (1.25 * track.tau) if track.tau > 0 else 1.0
        split = track.sequences.split(1 - p.confidence)
        for_bound = labels_for(track.sequences.planning(now), target, split)
        return None if for_bound is None else max(0, at_level, for_bound)
