"""One traffic class of a pool: observe, estimate, govern, solve, decide. `now` is an argument and nothing is sent."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Self

import numpy as np

from controller.cascading import ROUNDS, Cascading, arms_of
from controller.contest import Contest, Verdict
from controller.costs import CostModel, buckets_of
from controller.detect import Alarm, Watch
from controller.estimate import CurveEstimator
from controller.goals import Goals
from controller.intake import arm_of
from controller.leasing import LEARNING_ROUNDS, Leasing
from controller.meter import Meter
from controller.replay import (
    Fence,
    knobs_of,
    lease_of,
    pack,
    solve_for,
)
from controller.view import Wanted
from policies.errors import SolveError
from policies.model import ClassPolicy
from storage.records import (
    ACCEPTED,
    EXAMINED,
    Decision,
    ForkRecord,
    KnobRow,
    OperatorAction,
    QualityScore,
    RequestRecord,
    TokenBlock,
)

FEW_ROUNDS = 16.0  # effective rounds below which the block length is not chosen either
AGE_HALF_LIFE_S = 3600.0  # what was known before a pause weighs half after this long
REPLAYED_ROUNDS = 2000  # recent rounds kept, from which a changed class is estimated anew
KEPT_AFTER_CHANGE = 64.0  # rounds' weight of the past that stays where there is nothing to replay
COSTS_KEPT = 0.02  # share of the costs' memory that stays when costs have changed
_KEPT_ARMS = 5_000

__all__ = ["LEARNING_ROUNDS", "ClassSteer", "Fence", "kept_at_age", "sentence"]


class ClassSteer(Leasing):
    """Everything the controller knows about one (pool, class), and the decision it takes each tick."""

    def __init__(self, policy: ClassPolicy, costs: CostModel, *, half_life_rounds: float, meter_s: float = 10.0):
        super().__init__(policy, costs, half_life_rounds)
        self.meter = Meter(meter_s)
        self.decision: Decision | None = None
        self.totals: dict[str, float] = {}
        self._arms: OrderedDict[str, str] = OrderedDict()
        self._tried: OrderedDict[str, None] = OrderedDict()  # requests under another rule than the leased one
        self._learned = False  # whether there were ever enough rounds to solve from
        self._alarms: list[Alarm] = []  # since the last decision

    def set_policy(self, policy: ClassPolicy, now: float) -> None:
        """Obey a new revision. Another first rule, or the end of the one in use, leases the first; that, or another
        longest block, starts new estimates. What is known about rules that stay on the list is kept."""
        rule_changed = self.rule not in policy.rules or policy.rules[0] != self.policy.rules[0]
        rule_changed = rule_changed and policy.rules[0] != self.rule
        if rule_changed or policy.g_max != self.policy.g_max:
            self.estimator = CurveEstimator(policy.rules[0], policy.g_max, half_life_rounds=self._half_life_rounds)
            self.solution, self._learned, self._rival = None, False, None
        if rule_changed:
            self.rule = policy.rules[0]
        if rule_changed or self.arm not in arms_of(policy):
            self.strategy = ROUNDS
            self.governor.switch(self.rule, now)
        self.governor.set_policy(policy, now)
        self.policy = policy

    def observe_block(self, block: TokenBlock, now: float) -> None:
        """Take in one telemetry block: the curve, the costs, the speed meters, and whether something changed."""
        slower = self.costs.log_ratio(block) if block.worker not in self.costs.distrusted else np.zeros(0)
        self.estimator.add(block)
        if self._rival is not None:
            self._rival.add(block)
        self.costs.add(block)
        self._remember(block)
        self._buckets |= buckets_of(block)
        changed = self.watch.draft(block)
        if changed is not None:
            self._start_anew(changed)
            self._rival = None
            self.contest.renew()
        dearer = self.watch.cost(slower)
        if dearer is not None:
            self.costs.forget(COSTS_KEPT)
        self._note(changed, dearer)
        self.count_block(block, now)

    def count_block(self, block: TokenBlock, now: float) -> None:
        """Count what a block brought, and estimate nothing from it; `observe_block` does both."""
        flags = block.flags
        seconds = block.round_draft_s + block.round_verify_s + block.round_overhead_s
        amounts = {
            "rounds": float(block.round_rows.sum()),
            "emitted": float(block.round_emitted.sum()),
            "seconds": float(seconds.sum()),
            "drafted": float(flags.size),
            "examined": float(np.count_nonzero(flags & EXAMINED)),
            "accepted": float(np.count_nonzero(flags & ACCEPTED)),
        }
        self.meter.add(now, **amounts)
        self._count({name: amounts[name] for name in ("drafted", "examined", "accepted")})

    def _remember(self, block: TokenBlock) -> None:
        """Keep the last blocks that drafted, up to REPLAYED_ROUNDS."""
        if len(block.position):
            self._recent.append(block)
            held = sum(len(kept.round_rows) for kept in self._recent)
            while len(self._recent) > 1 and held > REPLAYED_ROUNDS:
                held -= len(self._recent.popleft().round_rows)

    def _start_anew(self, alarm: Alarm) -> None:
        """Estimate the curve from the rounds since the change only; from a shortened memory where those are gone."""
        since: list[TokenBlock] = []
        missing = alarm.units
        for block in reversed(self._recent):
            if missing <= 0:
                break
            starts = np.flatnonzero(block.position == 1)
            if len(starts) > missing:
                block = _tail(block, int(starts[len(starts) - missing]))  # noqa: PLW2901
            since.append(block)
            missing -= min(missing, len(starts))
        if missing > alarm.units / 2:
            self.estimator.forget(min(1.0, KEPT_AFTER_CHANGE / max(1.0, self.estimator.rounds_effective)))
            return
        self.estimator = CurveEstimator(self.rule, self.policy.g_max, half_life_rounds=self._half_life_rounds)
        self._recent = deque(reversed(since))
        for block in self._recent:
            self.estimator.add(block)

    def _note(self, *alarms: Alarm | None) -> None:
        for alarm in alarms:
            if alarm is not None:
                self._alarms.append(alarm)
                self._count({f"detected.{alarm.signal}": 1.0})

    def observe_request(self, record: RequestRecord, now: float) -> None:
        """Take in one served request."""
        self.governor.observe_request(record, now)
        self._measure(record)
        self._note(self.watch.mix(record.tokens))
        self._arms[record.request_id] = record.arm
        while len(self._arms) > _KEPT_ARMS:
            self._arms.popitem(last=False)
        if arm_of(record.strategy, record.rule) != self.arm:
            self._tried[record.request_id] = None
            while len(self._tried) > _KEPT_ARMS:
                self._tried.popitem(last=False)
        self.meter.add(now, requests=1.0, touches=float(record.touches), touched=float(record.touches > 0))
        self.meter.add(now, request_s=record.total_s, first_token_s=record.first_token_s)
        self._count(
            {
                f"requests.{record.arm}": 1.0,
                "touches": float(record.touches),
                "lenient_touches": float(record.touches if record.arm == "lenient" else 0),
                "tokens": float(record.tokens),
                "target_passes": float(record.target_passes),
                "request_seconds": record.total_s,
            }
        )

    def act(self, action: OperatorAction, now: float) -> None:
        """Obey an operator's order for this class: freeze, lossless, resume, or a reset or adjustment of the budget."""
        self.governor.act(action, now)

    def wanted(self, now: float, limit: int = 100) -> tuple[Wanted, ...]:
        """Up to ``limit`` requests that are worth a label, oldest touch first; which branch is which is not told."""
        name = self.policy.traffic_class
        found = self.governor.missing(limit)
        return tuple(
            Wanted(key, name, branches, at, deadline) for key, branches, at, deadline in found if deadline > now
        )

    def slices(self) -> list[dict[str, Any]]:
        """The account's current slices, one row for each lease level in them (`controller.budget.Ledger.rows`)."""
        return [row | {"traffic_class": self.policy.traffic_class} for row in self.governor.slices()]

    def observe_fork(self, record: ForkRecord, now: float) -> None:
        """Take in the end of a fork."""
        self.governor.observe_fork(record, now)
        self._count({"forks": float(record.done), "fork_target_passes": float(record.target_passes)})

    def observe_score(self, score: QualityScore, now: float) -> None:
        """Take in one label; an untouched request's score counts for both branches, since their texts are the same."""
        epochs = self.governor.counts.get("evidence_reset.scorer_version", 0)
        self.governor.observe_score(score, now)
        if self.governor.counts.get("evidence_reset.scorer_version", 0) != epochs:
            self.contest.renew()
        arm = self._arms.get(score.request_id)
        if arm is None or score.metric != self.policy.metric:
            return
        lenient = arm == "untouched" or (arm == "lenient") == (score.branch == "served")
        lossless = arm == "untouched" or not lenient
        if lenient:
            self.meter.add(now, lenient_score=score.score, lenient_labels=1.0)
        if lossless:
            self.meter.add(now, lossless_score=score.score, lossless_labels=1.0)
        if arm != "untouched" and score.request_id not in self._tried:
            changed = self._pair(score.request_id, -score.score if lenient else score.score)
            if changed is not None:
                self.governor.alarm(changed.before, changed.since, now)
            self._note(changed)
        branch = arm if arm == "untouched" else "lenient" if lenient else "holdback"
        self._count({f"score_sum.{branch}.{score.metric}": score.score, f"scores.{branch}.{score.metric}": 1.0})

    def _pair(self, request_id: str, signed: float) -> Alarm | None:
        """The loss of a pair once both scores are there: lossless counts plus, lenient minus."""
        first = self._half_pairs.pop(request_id, None)
        if first is not None and first * signed <= 0:
            return self.watch.quality(first + signed)
        self._half_pairs[request_id] = signed
        while len(self._half_pairs) > _KEPT_ARMS:
            self._half_pairs.popitem(last=False)
        return None

    def decide(self, now: float, fence: Fence) -> Decision:
        """The knobs for the next ttl seconds, and why."""
        allowance = self.allowance = self.governor.decide(now)
        alarms, self._alarms = self._alarms, []
        self._widest = max(self._buckets, default=self._widest)
        reason, explanation = allowance.reason, allowance.explanation
        enough = self.estimator.rounds_effective >= LEARNING_ROUNDS
        solvable = (self.estimator.rounds_effective >= FEW_ROUNDS or self._learned) and self.costs.ready
        self._learned = self._learned or solvable
        x = self._inputs(allowance, now, fence, learnt=enough, solvable=solvable)
        verdict = Verdict()
        try:
            if not solvable:
                raise SolveError("too few rounds measured")
            if enough:
                x, verdict = self._compete(x, allowance, now)
                allowance = self.allowance or allowance
            solved = solve_for(x)
            self._table = knobs_of(x, solved)
            self._held = {row.batch: row.g for row in self._table}
            due = self._plain_is_due(solved.table) if x.cascade is None else ()
            x = replace(x, plain=tuple(sorted(due)))
            if x.plain:
                explanation += " One interval of plain decoding measures what drafting is compared with."
            elif not enough:
                learning = "Lossless, at the block length known so far, until enough rounds are measured again."
                ordered = self.governor.standing.order is not None
                reason, explanation = (reason, f"{explanation} {learning}") if ordered else ("learning", learning)
        except SolveError as e:
            x = replace(x, curve=None, trial=None, cascade_trial=None)
            solved = solve_for(x)
            self._held.clear()
            reason, explanation = "learning", f"Lossless while acceptance and costs are being measured: {e}."
        if verdict.reason:
            reason, explanation = verdict.reason, f"{verdict.explanation} {explanation}"
        explanation += "".join(f" {sentence(alarm)}" for alarm in alarms)
        lease = lease_of(x, solved)
        self._record(lease, solved, allowance)
        self.decision = Decision(
            pool=lease.pool,
            traffic_class=lease.traffic_class,
            time=now,
            lease=lease,
            state=allowance.state,
            reason=reason,
            explanation=explanation,
            inputs={"policy": asdict(self.policy), "solve": pack(x)},
            estimates=self._estimates()
            | {"detected": [asdict(alarm) for alarm in alarms], "probe": "plain" if x.plain else ""}
            | {"contest": verdict.numbers or {}},
            bounds=asdict(allowance),
            counterfactual=self._counterfactual(),
        )
        return self.decision

    def _estimates(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "rounds_effective": float(self.estimator.rounds_effective),
            "acceptance": self.acceptance,
            "block_efficiency": self.meter.ratio("emitted", "rounds"),
        }
        if self.solution is not None:
            values["solution"] = asdict(self.solution)
        options = {"cascade": self.option, "cascade_trial": self.trial_option}
        return values | {name: asdict(option) for name, option in options.items() if option is not None}

    def _counterfactual(self) -> dict[str, Any]:
        """What the decision beat: plain decoding, and the best lossless block."""
        s = self.solution
        if s is None:
            return {}
        return {
            "plain_seconds_per_token": s.plain_seconds_per_token,
            "lossless_seconds_per_token": s.lossless_seconds_per_token,
        }

    @property
    def acceptance(self) -> float | None:
        """Accepted / examined over the last seconds; None without traffic."""
        return self.meter.ratio("accepted", "examined")

    def _count(self, amounts: Mapping[str, float]) -> None:
        for name, amount in amounts.items():
            self.totals[name] = self.totals.get(name, 0.0) + amount

    def to_state(self) -> dict[str, Any]:
        """JSON-able state from which `from_state` continues exactly."""
        return {
            "rule": self.rule,
            "strategy": self.strategy,
            "cascading": self.cascading.to_state(),
            "trial_arm": self._trial_arm,
            "contest": self.contest.to_state(),
            "g_max": self.policy.g_max,
            "estimator": self.estimator.to_state(),
            "governor": self.governor.to_state(),
            "meter": self.meter.to_state(),
            "totals": dict(self.totals),
            "arms": list(self._arms.items()),
            "table": None if self._table is None else [asdict(row) for row in self._table],
            "held": [[rows, g] for rows, g in self._held.items()],
            "watch": self.watch.to_state(),
            "learned": self._learned,
            "tried": list(self._tried),
            "half_pairs": list(self._half_pairs.items()),
            "since_plain": self._since_plain,
            "buckets": sorted(self._buckets),
            "widest": self._widest,
        }

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Any],
        policy: ClassPolicy,
        costs: CostModel,
        *,
        half_life_rounds: float,
        meter_s: float = 10.0,
        age_s: float = 0.0,
    ) -> Self:
        """Continue from `state`, written ``age_s`` seconds ago, under `policy`.

        The curve weighs less with age (`AGE_HALF_LIFE_S`); evidence for another rule is not taken over. The caller ages
        the costs, which classes share.
        """
        self = cls(policy, costs, half_life_rounds=half_life_rounds, meter_s=meter_s)
        self.meter.restore(state["meter"])
        self.totals.update(state["totals"])
        self._arms.update(state["arms"])
        if state["rule"] in policy.rules:
            self.rule = state["rule"]
            self.estimator = CurveEstimator(self.rule, policy.g_max, half_life_rounds=half_life_rounds)
        self.strategy = state.get("strategy", ROUNDS)
        if self.arm not in arms_of(policy):
            self.strategy = ROUNDS
        if "cascading" in state:
            self.cascading = Cascading.from_state(state["cascading"])
        self.governor = Goals.from_state(state["governor"], policy, self.arm)
        if "contest" in state:
            self.contest = Contest.from_state(state["contest"])
        if (state["rule"], state["g_max"]) == (self.rule, policy.g_max):
            self.estimator = CurveEstimator.from_state(state["estimator"])
            self.estimator.forget(kept_at_age(age_s))
            self._held.update(dict(state["held"]))
            self._learned = bool(state.get("learned", False))
        if state.get("table") is not None:
            self._table = tuple(KnobRow(**row) for row in state["table"])
        if "watch" in state:
            self.watch = Watch.from_state(state["watch"])
            self._half_pairs.update(state["half_pairs"])
            self._tried.update(dict.fromkeys(state.get("tried", ())))
            self._since_plain, self._buckets = state["since_plain"], set(state["buckets"])
            self._widest = int(state.get("widest", 1))
        return self


def _tail(block: TokenBlock, first: int) -> TokenBlock:
    """The block with its drafted positions from index ``first`` on; its rounds stay."""
    return replace(block, **{name: getattr(block, name)[first:] for name in TokenBlock.POSITION_COLUMNS})


def kept_at_age(age_s: float) -> float:
    """Share of its weight that what was measured ``age_s`` seconds ago keeps; 1 for a clock that went back."""
    return float(0.5 ** (max(0.0, age_s) / AGE_HALF_LIFE_S))


def sentence(alarm: Alarm) -> str:
    """A detected change in plain words."""
    before, since = alarm.before, alarm.since
    if alarm.signal == "draft":
        return f"Acceptance changed from {before:.2f} to {since:.2f}; the curve is estimated anew."
    if alarm.signal == "cost":
        return f"Rounds became {'slower' if since > before else 'faster'}; costs are measured anew."
    if alarm.signal == "mix":
        return f"Requests became {'longer' if since > before else 'shorter'}."
    return f"Quality changed: forked requests now {'lose more' if since > before else 'lose less'} by leniency."
