"""One traffic class of a pool: observe, estimate, govern, solve, decide. `now` is an argument and nothing is sent."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

from controller.costs import CostModel, buckets_of
from controller.curve import Curve
from controller.detect import Alarm, Watch
from controller.estimate import CurveEstimator
from controller.governor import Allowance, Governor
from controller.meter import Meter
from controller.solve import Solution, choose, frontier, gain_noise, plan_for
from policies.errors import SolveError
from policies.model import ClassPolicy
from storage.records import (
    ACCEPTED,
    EXAMINED,
    CapRow,
    Decision,
    ForkRecord,
    KnobRow,
    Lease,
    QualityScore,
    RequestRecord,
    TokenBlock,
)

DEFAULT_G = 4  # block length while nothing has been measured
LEARNING_ROUNDS = 100.0  # effective rounds below which the knobs stay lossless
MIN_GAIN = 0.02  # a new block length must be faster by this, and by as many standard errors as NOISE_FACTOR says
NOISE_FACTOR = 0.35
FEW_FACTOR = 1.0  # the same while fewer than LEARNING_ROUNDS are known since a change
CAP_SHARES = (0.0, 0.25, 0.5, 0.75)
AGE_HALF_LIFE_S = 3600.0  # what was known before a pause weighs half after this long
REPLAYED_ROUNDS = 2000  # recent rounds kept, from which a changed class is estimated anew
KEPT_AFTER_CHANGE = 64.0  # rounds' weight of the past that stays where there is nothing to replay
MOST_EXPLORED = 4.0  # where nothing is drafted, rounds with one draft are up to this many times as frequent
COSTS_KEPT = 0.1  # share of the costs' memory that stays when costs have changed
FIRST_PLAIN = 10  # decisions from when there is enough to solve from to the first such interval
PLAIN_ROUNDS = 4.0  # plain rounds remembered, below which one interval is decoded plainly
_KEPT_ARMS = 5_000


@dataclass(frozen=True)
class Fence:
    """What makes a lease the newest one: the controller's epoch, the lease's number, the policy revision, its ttl."""

    epoch: int
    seq: int
    revision: int
    ttl: float


class ClassSteer:
    """Everything the controller knows about one (pool, class), and the decision it takes each tick."""

    def __init__(self, policy: ClassPolicy, costs: CostModel, *, half_life_rounds: float, meter_s: float = 10.0):
        self.policy, self.costs = policy, costs
        self._half_life_rounds = half_life_rounds
        self.rule = policy.rules[0]
        self.estimator = CurveEstimator(self.rule, policy.g_max, half_life_rounds=half_life_rounds)
        self.governor = Governor(policy, self.rule)
        self.meter = Meter(meter_s)
        self.solution: Solution | None = None
        self.curve: Curve | None = None  # what the last decision solved on
        self._held: dict[int, int] = {}  # block length in use, by batch bucket
        self.allowance: Allowance | None = None
        self.decision: Decision | None = None
        self.totals: dict[str, float] = {}
        self._arms: OrderedDict[str, str] = OrderedDict()
        self.watch = Watch()
        self._recent: deque[TokenBlock] = deque()
        self._learned = False  # whether there were ever enough rounds to solve from
        self._alarms: list[Alarm] = []  # since the last decision
        self._half_pairs: OrderedDict[str, float] = OrderedDict()  # signed score of the branch that came first
        self._since_plain: float | None = None  # decisions since the last interval of plain decoding; None: none yet
        self._buckets: set[int] = set()  # batch buckets of the rounds since the last decision
        self._widest = 1  # the largest of them when there were any

    def set_policy(self, policy: ClassPolicy, now: float) -> None:
        """Obey a new revision. A new first rule or longest block starts new estimates; a new rule also new evidence."""
        rule_changed = policy.rules[0] != self.rule
        if rule_changed or policy.g_max != self.policy.g_max:
            self.estimator = CurveEstimator(policy.rules[0], policy.g_max, half_life_rounds=self._half_life_rounds)
            self.solution, self._learned = None, False
        if rule_changed:
            self.rule = policy.rules[0]
            self.governor.reset_evidence("rule", now, self.rule)
        self.governor.set_policy(policy, now)
        self.policy = policy

    def observe_block(self, block: TokenBlock, now: float) -> None:
        """Take in one telemetry block: the curve, the costs, the speed meters, and whether something changed."""
        slower = self.costs.log_ratio(block) if block.worker not in self.costs.distrusted else np.zeros(0)
        self.estimator.add(block)
        self.costs.add(block)
        self._remember(block)
        self._buckets |= buckets_of(block)
        changed = self.watch.draft(block)
        if changed is not None:
            self._start_anew(changed)
        dearer = self.watch.cost(slower)
        if dearer is not None:
            self.costs.forget(COSTS_KEPT)
        self._note(changed, dearer)
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
        self._note(self.watch.mix(record.tokens))
        self._arms[record.request_id] = record.arm
        while len(self._arms) > _KEPT_ARMS:
            self._arms.popitem(last=False)
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

    def observe_fork(self, record: ForkRecord, now: float) -> None:
        """Take in the end of a fork."""
        self.governor.observe_fork(record, now)
        self._count({"forks": 1.0, "fork_target_passes": float(record.target_passes)})

    def observe_score(self, score: QualityScore, now: float) -> None:
        """Take in one label; an untouched request's score counts for both branches, since their texts are the same."""
        self.governor.observe_score(score, now)
        arm = self._arms.get(score.request_id)
        if arm is None or score.metric != self.policy.metric:
            return
        lenient = arm == "untouched" or (arm == "lenient") == (score.branch == "served")
        lossless = arm == "untouched" or not lenient
        if lenient:
            self.meter.add(now, lenient_score=score.score, lenient_labels=1.0)
        if lossless:
            self.meter.add(now, lossless_score=score.score, lossless_labels=1.0)
        if arm != "untouched":
            self._note(self._pair(score.request_id, -score.score if lenient else score.score))
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
        probe = False
        try:
            enough = self.estimator.rounds_effective >= LEARNING_ROUNDS
            if not (enough or self._learned) or not self.costs.ready:
                raise SolveError("too few rounds measured")
            self._learned = True
            table, caps = self._solve(allowance, lenient=enough)
            reason, explanation = allowance.reason, allowance.explanation
            unsure = self._plain_is_due(table)
            probe = bool(unsure)
            if probe:
                table = [replace(row, g=0, theta=0.0, rho=0.0) if row.batch in unsure else row for row in table]
                explanation += " One interval of plain decoding measures what drafting is compared with."
            elif not enough:
                reason = "learning"
                explanation = "Lossless, at the block length known so far, until enough rounds are measured again."
        except SolveError as e:
            self.solution = None
            self._held.clear()
            table, caps = [KnobRow(1, min(DEFAULT_G, self.policy.g_max), 0.0, 0.0)], []
            reason, explanation = "learning", f"Lossless while acceptance and costs are being measured: {e}."
        explanation += "".join(f" {sentence(alarm)}" for alarm in alarms)
        lenient = not probe and self.solution is not None and self.solution.theta > 0
        lease = Lease(
            pool=self.policy.pool,
            traffic_class=self.policy.traffic_class,
            epoch=fence.epoch,
            seq=fence.seq,
            policy_revision=fence.revision,
            issued=now,
            ttl=fence.ttl,
            rule=self.rule,
            table=tuple(table),
            caps=tuple(caps),
            holdback=allowance.holdback if lenient else 0.0,
            fork=allowance.fork if lenient else 0.0,
            label=allowance.label if lenient else 0.0,
            explore=self._explore(table, probe),
            strategy=self.policy.strategies[0],
            strategies=tuple(dict.fromkeys((*self.policy.strategies, "plain"))),
            rules=self.policy.rules,
            structured=self.policy.structured,
            label_deadline=self.policy.label_deadline_s,
        )
        self.governor.leased(fence.epoch, fence.seq, self._planned_touches(allowance) if lenient else 0.0)
        self.decision = Decision(
            pool=lease.pool,
            traffic_class=lease.traffic_class,
            time=now,
            lease=lease,
            state=allowance.state,
            reason=reason,
            explanation=explanation,
            inputs={
                "policy": asdict(self.policy),
                "d_allowed": allowance.d_allowed,
                "draft_s": self.costs.draft_s(1).tolist(),
                "verify_s": self.costs.verify_s(1).tolist(),
                "overhead_s": float(self.costs.overhead_s(1)),
            },
            estimates=self._estimates()
            | {"detected": [asdict(alarm) for alarm in alarms], "probe": "plain" if probe else ""},
            bounds=asdict(allowance),
            counterfactual=self._counterfactual(),
        )
        return self.decision

    def _solve(self, allowance: Allowance, *, lenient: bool) -> tuple[list[KnobRow], list[CapRow]]:
        """Knobs per batch bucket, and per share of the loss budget. Sets `solution` to the one that touches most."""
        curve = self.curve = self.estimator.curve()
        d_allowed = allowance.d_allowed if lenient else 0.0
        max_theta, g_max = self.policy.max_theta, self.policy.g_max
        plan = plan_for(curve, d_allowed=d_allowed, max_theta=max_theta, g_max=g_max)
        table: list[KnobRow] = []
        solutions: list[Solution] = []
        for rows in self.costs.seen_buckets:
            seconds = self.costs.draft_s(rows), self.costs.verify_s(rows), float(self.costs.overhead_s(rows))
            found = plan.pick(*seconds)
            held = self._held.get(rows)
            if held is not None and held != found.g:
                current = plan.pick(*seconds, fixed_g=held)
                factor = NOISE_FACTOR if lenient else FEW_FACTOR
                found = choose(current, found, max(MIN_GAIN, factor * gain_noise(curve, current, found)))
            self._held[rows] = found.g
            solutions.append(found)
            table.append(KnobRow(rows, found.g, found.theta, found.rho, found.depth))
        self.solution = max(solutions, key=lambda s: s.touches_per_token_upper)
        g = table[0].g
        caps = []
        for share in CAP_SHARES:
            front = frontier(curve, d_allowed=d_allowed * share, max_theta=max_theta, g_max=g_max)
            caps.append(CapRow(share, *front.knobs(curve, g)))
        return table, caps

    def _plain_is_due(self, table: list[KnobRow]) -> set[int]:
        """The batch buckets to decode plainly for one interval: of those with traffic now, the ones whose plain pass,
        which drafting is compared with, was not measured for a while. Intervals are the policy's share of exploration
        at most."""
        buckets, self._buckets = self._buckets, set()
        if self.policy.explore == 0:
            return set()
        if self._since_plain is None:
            self._since_plain = 1 / self.policy.explore - FIRST_PLAIN
        self._since_plain += 1
        if self._since_plain < 1 / self.policy.explore:
            return set()
        due = {row.batch for row in table if row.g > 0 and row.batch in buckets}
        due = {rows for rows in due if self.costs.narrow_rounds(rows) < PLAIN_ROUNDS}
        if due:
            self._since_plain = 0
        return due

    def _explore(self, table: list[KnobRow], probe: bool) -> float:
        """Probability that a row drafts one more. Each row tosses it and one longer block slows down all rows, so it is
        the policy's share of rounds over the rows. Where nothing is drafted, the only rounds that would notice a draft
        that has become good, a share of time is meant: a draft that is cheap is tried more often."""
        rows = self._widest
        share = self.policy.explore
        held = next((row for row in table if rows <= row.batch), table[-1])
        if held.g == 0 and not probe and self.costs.ready:
            draft, verify = self.costs.draft_s(rows), self.costs.verify_s(rows)
            plain, more = verify[0] + self.costs.overhead_s(rows), draft[1] + verify[1] - verify[0]
            share *= min(MOST_EXPLORED, max(1.0, plain / max(float(more), 1e-9)))
        return float(min(1.0, share) / rows)

    def _planned_touches(self, allowance: Allowance) -> float:
        """Touches per request that the lease is expected to cause, with the estimate's uncertainty added."""
        if self.solution is None or self.solution.theta == 0:
            return 0.0
        return min(self.solution.touches_per_token_upper * allowance.mean_length, allowance.tau_allowed)

    def _estimates(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "rounds_effective": float(self.estimator.rounds_effective),
            "acceptance": self.acceptance,
            "block_efficiency": self.meter.ratio("emitted", "rounds"),
        }
        if self.solution is not None:
            values["solution"] = asdict(self.solution)
        return values

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
            "g_max": self.policy.g_max,
            "estimator": self.estimator.to_state(),
            "governor": self.governor.to_state(),
            "meter": self.meter.to_state(),
            "totals": dict(self.totals),
            "arms": list(self._arms.items()),
            "held": [[rows, g] for rows, g in self._held.items()],
            "watch": self.watch.to_state(),
            "learned": self._learned,
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
        self.governor = Governor.from_state(state["governor"], policy, self.rule)
        if (state["rule"], state["g_max"]) == (self.rule, policy.g_max):
            self.estimator = CurveEstimator.from_state(state["estimator"])
            self.estimator.forget(kept_at_age(age_s))
            self._held.update(dict(state["held"]))
            self._learned = bool(state.get("learned", False))
        if "watch" in state:
            self.watch = Watch.from_state(state["watch"])
            self._half_pairs.update(state["half_pairs"])
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
