"""From what is known about a traffic class to what its lease rests on: curve, seconds, allowance, a rule on trial."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace

from controller.cascade import CascadeCurve, Option, cascade_option, choose_strategy
from controller.cascading import CASCADE_RULE, ROUNDS, Cascading, arms_of, strategy_of
from controller.contest import Contest, Verdict
from controller.costs import CostModel
from controller.curve import Curve
from controller.detect import REQUESTS_RUN_LENGTH, Detector, Watch
from controller.estimate import CurveEstimator
from controller.goals import Goals
from controller.governor import Allowance
from controller.intake import arm_of
from controller.replay import CascadeInputs, Fence, Inputs, Seconds, Solved, Traced, TrialInputs, limits_of
from controller.solve import Solution, plan_for
from policies.model import ClassPolicy
from storage.records import KnobRow, Lease, RequestRecord, TokenBlock

LEARNING_ROUNDS = 100.0  # effective rounds below which the knobs stay lossless
FIRST_PLAIN = 10  # decisions from when there is enough to solve from to the first interval of plain decoding
PLAIN_COST = 0.2  # of the policy's share of exploration: what plain intervals may cost where drafting is far ahead
PLAIN_ROUNDS = 4.0  # plain rounds remembered, below which one interval is decoded plainly


class Leasing:
    """The deciding half of `controller.steer.ClassSteer`."""

    def __init__(self, policy: ClassPolicy, costs: CostModel, half_life_rounds: float):
        self.policy, self.costs = policy, costs
        self._half_life_rounds = half_life_rounds
        self.rule = policy.rules[0]  # of the rounds, also while a cascade is leased
        self.strategy = ROUNDS  # or the cascade that is leased
        self.cascading = Cascading()
        self.estimator = CurveEstimator(self.rule, policy.g_max, half_life_rounds=half_life_rounds)
        self.governor = Goals(policy, self.rule)
        self.contest = Contest()
        self.allowance: Allowance | None = None
        self.solution: Solution | None = None
        self.trial_solution: Solution | None = None
        self.option: Option | None = None  # of the leased cascade
        self.trial_option: Option | None = None
        self._trial_arm: str | None = None  # in the last lease
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

    @property
    def arm(self) -> str:
        """What is leased, under the name by which evidence is kept."""
        return self.rule if self.strategy == ROUNDS else arm_of(self.strategy, CASCADE_RULE)

    def _measure(self, record: RequestRecord) -> None:
        """What a request says about the seconds of its strategy, where strategies compete."""
        if len(arms_of(self.policy)) == len(self.policy.rules):
            return
        solution, arm = None, arm_of(record.strategy, record.rule)
        if arm == self._trial_arm:
            solution = self.trial_solution
        elif self.strategy == ROUNDS and arm in (self.rule, "lossless"):
            solution = self.solution
        self.cascading.observe(record, None if solution is None else solution.seconds_per_token)

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
        cascade = None
        if self.strategy != ROUNDS:
            cascade = self._cascade(self.strategy, 1.0, allowance.tau_allowed)
        return Inputs(
            now=now,
            fence=fence,
            pool=self.policy.pool,
            traffic_class=self.policy.traffic_class,
            rule=self.rule if cascade is None else CASCADE_RULE,
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
            strategy=self.policy.strategies[0] if cascade is None else self.strategy,
            frozen=self._table if frozen else None,
            cascade=cascade,
        )

    def _cascade(self, strategy: str, share: float, allowed: float) -> CascadeInputs:
        return CascadeInputs(share, strategy, CASCADE_RULE, allowed, self._cascade_curve(strategy))

    def _cascade_curve(self, strategy: str) -> CascadeCurve | None:
        """A cascade's curve; where every answer was believed, the target's seconds are those of lossless rounds."""
        ratio, target_s = self.cascading.ratio, None
        if self.solution is not None and ratio is not None:
            target_s = self.solution.lossless_seconds_per_token * ratio[0]
        return self.cascading.curve(strategy, target_s)

    def _option(self, arm: str, d_allowed: float, x: Inputs, length: float, *, whole: bool) -> Option | None:
        """An arm at its best under an allowance of touches per token; None while too little is known.

        Seconds are those of rounds, of ``whole`` requests where strategies are compared.
        """
        strategy, ratio = strategy_of(arm), self.cascading.ratio if whole else (1.0, 0.0)
        if strategy == ROUNDS:
            estimator = self.estimator if arm == self.rule else self._rival
            if estimator is None or estimator.rounds_effective < LEARNING_ROUNDS or ratio is None:
                return None
            seconds = x.seconds[max(at for at in x.seconds if at <= max(self._widest, min(x.seconds)))]
            plan = plan_for(
                estimator.curve(), d_allowed=d_allowed, max_theta=x.limits["max_theta"], g_max=x.limits["g_max"]
            )
            s = plan.pick(*seconds)
            took = s.seconds_per_token if not whole else s.seconds_per_token * ratio[0]
            touches = s.touches_per_token * length, s.touches_per_token_upper * length
            return Option(ROUNDS, s.theta, took, s.seconds_per_token * ratio[1], *touches)
        curve = self._cascade_curve(strategy)
        if curve is None:
            return None
        allowed, most = d_allowed * length, x.limits["max_theta"]
        found = cascade_option(strategy, curve, allowed=allowed, max_theta=most, holdback=x.holdback)
        nothing = float(curve.seconds_per_token[0]), float(curve.seconds_se[0])
        return found or Option(strategy, 0.0, *nothing, 0.0, 0.0)

    def _compete(self, x: Inputs, allowance: Allowance, now: float) -> tuple[Inputs, Verdict]:
        """Let another rule or strategy be tried or take over; the inputs that go with what came of it."""
        arms, length = arms_of(self.policy), allowance.mean_length
        if len(arms) < 2:
            return x, Verdict()
        if len(arms) == len(self.policy.rules):
            whole = False
        else:
            trial = self.contest.trial
            whole = trial is not None and strategy_of(trial) != self.strategy

        def pace(arm: str, d_allowed: float) -> float | None:
            option = self._option(arm, d_allowed, x, length, whole=whole)
            return None if option is None else option.seconds_per_token

        def error(arm: str, d_allowed: float) -> float:
            ours = self._option(self.arm, allowance.d_allowed, x, length, whole=True)
            theirs = self._option(arm, d_allowed, x, length, whole=True)
            return math.hypot(*(0.0 if o is None else o.seconds_se for o in (ours, theirs)))

        before = self.contest.trial
        verdict = self._too_slow(x, allowance, now) or self.contest.decide(
            self.governor, arms, allowance, pace, now, error if whole else None
        )
        if verdict.reason == "rule_switched":
            return self._switched(x, now), verdict
        if verdict.trial is None:
            self._rival = None
            return x, verdict
        if strategy_of(verdict.trial) != ROUNDS:
            self._rival = None
            tried = self._cascade(strategy_of(verdict.trial), verdict.share, verdict.tau)
            return (replace(x, cascade_trial=tried) if verdict.tau > 0 else x), verdict
        known = self.estimator if verdict.trial == self.rule else self._rival if verdict.trial == before else None
        if known is None:
            known = self._rival = CurveEstimator(
                verdict.trial, self.policy.g_max, half_life_rounds=self._half_life_rounds
            )
            for block in self._recent:
                known.add(block)
        if known.rounds_effective < LEARNING_ROUNDS or verdict.tau <= 0:
            return x, verdict
        strategy = self.policy.strategies[0]
        curve = Traced.of(known.curve())
        return replace(
            x, trial=TrialInputs(verdict.share, strategy, verdict.trial, verdict.tau / length, curve)
        ), verdict

    def _switched(self, x: Inputs, now: float) -> Inputs:
        """Lease what the governor has switched to; the inputs that go with it."""
        arm = self.governor.rule
        self.strategy = strategy_of(arm)
        if self.strategy == ROUNDS and arm != self.rule and self._rival is not None:
            self.rule, self.estimator = arm, self._rival
        self._rival = None
        self._half_pairs.clear()  # what another rule's pairs lost is no news about this one
        self.watch.detectors["quality"] = Detector("quality", REQUESTS_RUN_LENGTH)
        self.allowance = self.governor.decide(now)
        return self._inputs(self.allowance, now, x.fence, learnt=x.learnt, solvable=True)

    def _too_slow(self, x: Inputs, allowance: Allowance, now: float) -> Verdict | None:
        """Go back to rounds where the leased cascade is measured to take longer than lossless ones, which need no
        evidence, by more than the noise."""
        resting = allowance.tau_allowed <= 0 or self.governor.standing.order is not None
        if self.strategy == ROUNDS or resting:
            return None
        length, arm = allowance.mean_length, self.arm
        ours = self._option(arm, allowance.d_allowed, x, length, whole=True)
        rounds = self._option(self.rule, 0.0, x, length, whole=True)
        if ours is None or rounds is None or choose_strategy(ours, [rounds]) is ours:
            return None
        took, other = ours.seconds_per_token, rounds.seconds_per_token
        said = f"{self.rule} takes over from {arm}: the cascade takes {1000 * took:.3g} ms a token within its budget, "
        said += f"lossless rounds {1000 * other:.3g}."
        numbers = {"rule": arm, "seconds_per_token": other, "incumbent_seconds_per_token": took}
        return self.contest.leave(self.governor, self.rule, said, numbers, now)

    def _record(self, lease: Lease, solved: Solved, allowance: Allowance) -> None:
        """Tell the governor what the lease is expected to touch, and the rule on trial in it."""
        self.solution, self.trial_solution = solved.solution, solved.trial
        self.option, self.trial_option = solved.option, solved.trial_option
        length = allowance.mean_length
        lenient = not lease.lossless and self.solution is not None and any(row.theta for row in lease.table)
        tau = self._planned_touches(self.solution, self.option, length, allowance.tau_allowed) if lenient else 0.0
        trial = self._trial_arm = None
        if lease.trial is not None:
            arm = self._trial_arm = arm_of(lease.trial.strategy, lease.trial.rule)
            allowed = self.governor.track(arm).tau
            trial = arm, self._planned_touches(self.trial_solution, self.trial_option, length, allowed)
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
    def _planned_touches(solution: Solution | None, option: Option | None, length: float, allowed: float) -> float:
        """Touches per request that a solution or a cascade is expected to cause, with the estimate's uncertainty."""
        if option is not None:
            return min(option.touches_upper, allowed)
        if solution is None or solution.theta == 0:
            return 0.0
        return min(solution.touches_per_token_upper * length, allowed)
