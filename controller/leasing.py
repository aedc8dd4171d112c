"""From what is known about a traffic class to what its lease rests on: curve, seconds, allowance, a rule on trial."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace

from controller.contest import Contest, Verdict
from controller.costs import CostModel
from controller.curve import Curve
from controller.detect import REQUESTS_RUN_LENGTH, Detector, Watch
from controller.estimate import CurveEstimator
from controller.goals import Goals
from controller.governor import Allowance
from controller.replay import Fence, Inputs, Seconds, Traced, TrialInputs, limits_of
from controller.solve import Solution, plan_for
from policies.model import ClassPolicy
from storage.records import KnobRow, Lease, TokenBlock

LEARNING_ROUNDS = 100.0  # effective rounds below which the knobs stay lossless
FIRST_PLAIN = 10  # decisions from when there is enough to solve from to the first interval of plain decoding
PLAIN_COST = 0.2  # of the policy's share of exploration: what plain intervals may cost where drafting is far ahead
PLAIN_ROUNDS = 4.0  # plain rounds remembered, below which one interval is decoded plainly


class Leasing:
    """The deciding half of `controller.steer.ClassSteer`."""

    def __init__(self, policy: ClassPolicy, costs: CostModel, half_life_rounds: float):
        self.policy, self.costs = policy, costs
        self._half_life_rounds = half_life_rounds
        self.rule = policy.rules[0]
        self.estimator = CurveEstimator(self.rule, policy.g_max, half_life_rounds=half_life_rounds)
        self.governor = Goals(policy, self.rule)
        self.contest = Contest()
        self.allowance: Allowance | None = None
        self.solution: Solution | None = None
        self.trial_solution: Solution | None = None
        self.curve: Curve | None = None  # what the last decision solved on
        self.watch = Watch()
        self._rival: CurveEstimator | None = None  # of the rule on trial
        self._recent: deque[TokenBlock] = deque()
        self._half_pairs: OrderedDict[str, float] = OrderedDict()  # signed score of the branch that came first
        self._table: tuple[KnobRow, ...] | None = None  # of the last decision, without plain intervals
        self._held: dict[int, int] = {}  # block length in use, by batch bucket
        self._since_plain: float | None = None  # share of the wait for the next plain interval; None: none yet
        self._buckets: set[int] = set()  # batch buckets of the rounds since the last decision
        self._widest = 1  # the largest of them when there were any

    def _inputs(self, allowance: Allowance, now: float, fence: Fence, *, learnt: bool, solvable: bool) -> Inputs:
        """Everything the lease rests on. Sets `curve` to the one that is solved."""
        seconds: dict[int, Seconds] = {}
        self.curve = None
        if solvable:
            self.curve = Traced.of(self.estimator.curve())
            for rows in self.costs.seen_buckets:
                draft, verify = self.costs.draft_s(rows), self.costs.verify_s(rows)
                seconds[rows] = tuple(draft.tolist()), tuple(verify.tolist()), float(self.costs.overhead_s(rows))
        frozen = self.governor.standing.order is not None
        return Inputs(
            now=now,
            fence=fence,
            pool=self.policy.pool,
            traffic_class=self.policy.traffic_class,
            rule=self.rule,
            limits=limits_of(self.policy),
            d_allowed=allowance.d_allowed,
            holdback=allowance.holdback,
            fork=allowance.fork,
            label=allowance.label,
            learnt=learnt,
            curve=self.curve,
            seconds=seconds,
            held=dict(self._held),
            widest=self._widest,
            strategy=self.policy.strategies[0],
            frozen=self._table if frozen else None,
        )

    def _compete(self, x: Inputs, allowance: Allowance, now: float) -> tuple[Inputs, Verdict]:
        """Let another rule be tried or take over; the inputs that go with what came of it."""
        if len(self.policy.rules) < 2:
            return x, Verdict()

        def pace(rule: str, d_allowed: float) -> float | None:
            estimator = self.estimator if rule == self.rule else self._rival
            if estimator is None or estimator.rounds_effective < LEARNING_ROUNDS:
                return None
            seconds = x.seconds[max(at for at in x.seconds if at <= max(self._widest, min(x.seconds)))]
            curve = estimator.curve()
            plan = plan_for(curve, d_allowed=d_allowed, max_theta=x.limits["max_theta"], g_max=x.limits["g_max"])
            return plan.pick(*seconds).seconds_per_token

        before = self.contest.trial
        verdict = self.contest.decide(self.governor, self.policy.rules, allowance, pace, now)
        if verdict.reason == "rule_switched" and self._rival is not None:
            self.rule, self.estimator, self._rival = self.governor.rule, self._rival, None
            self._half_pairs.clear()  # what another rule's pairs lost is no news about this one
            self.watch.detectors["quality"] = Detector("quality", REQUESTS_RUN_LENGTH)
            self.allowance = allowance = self.governor.decide(now)
            self.curve = Traced.of(self.estimator.curve())
            return replace(
                x, rule=self.rule, d_allowed=allowance.d_allowed, fork=allowance.fork, curve=self.curve
            ), verdict
        if verdict.trial is None:
            self._rival = None
            return x, verdict
        if verdict.trial != before or self._rival is None:
            self._rival = CurveEstimator(verdict.trial, self.policy.g_max, half_life_rounds=self._half_life_rounds)
            for block in self._recent:
                self._rival.add(block)
        if self._rival.rounds_effective < LEARNING_ROUNDS or verdict.tau <= 0:
            return x, verdict
        d_allowed, curve = verdict.tau / allowance.mean_length, Traced.of(self._rival.curve())
        return replace(x, trial=TrialInputs(verdict.share, x.strategy, verdict.trial, d_allowed, curve)), verdict

    def _record(self, lease: Lease, allowance: Allowance) -> None:
        """Tell the governor what the lease is expected to touch, and the rule on trial in it."""
        lenient = not lease.lossless and self.solution is not None and any(row.theta for row in lease.table)
        tau = self._planned_touches(self.solution, allowance.mean_length, allowance.tau_allowed) if lenient else 0.0
        trial = None
        if lease.trial is not None:
            allowed = self.governor.track(lease.trial.rule).tau
            trial = lease.trial.rule, self._planned_touches(self.trial_solution, allowance.mean_length, allowed)
        self.governor.leased(lease.epoch, lease.seq, tau, trial)

    def _plain_is_due(self, table: Sequence[KnobRow]) -> set[int]:
        """The batch buckets to decode plainly for one interval: of those with traffic now, the ones whose plain pass,
        which drafting is compared with, was not measured for a while. Intervals are the policy's share of exploration
        at most."""
        buckets, self._buckets = self._buckets, set()
        if self.policy.explore == 0:
            return set()
        ahead = 1.0 if self.solution is None else self.solution.speedup_plain
        apart = max(1.0, (1 - 1 / max(1.0, ahead)) / PLAIN_COST) / self.policy.explore
        if self._since_plain is None:
            self._since_plain = 1 - FIRST_PLAIN * self.policy.explore
        self._since_plain += 1 / apart
        if self._since_plain < 1:
            return set()
        due = {row.batch for row in table if row.g > 0 and row.batch in buckets}
        due = {rows for rows in due if self.costs.narrow_rounds(rows) < PLAIN_ROUNDS}
        if due:
            self._since_plain = 0
        return due

    @staticmethod
    def _planned_touches(solution: Solution | None, length: float, allowed: float) -> float:
        """Touches per request that a solution is expected to cause, with the estimate's uncertainty added."""
        if solution is None or solution.theta == 0:
            return 0.0
        return min(solution.touches_per_token_upper * length, allowed)
