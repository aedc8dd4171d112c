"""One traffic class of a pool: observe, estimate, govern, solve, decide. `now` is an argument and nothing is sent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from controller.costs import CostModel
from controller.estimate import CurveEstimator
from controller.governor import Allowance, Governor
from controller.solve import Solution, choose, gain_noise, solve
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
NOISE_FACTOR = 1.0
CAP_SHARES = (0.0, 0.25, 0.5, 0.75)
_KEPT_ARMS = 5_000


class Meter:
    """Sums that forget with time: what is happening now, not since the start."""

    def __init__(self, half_life_s: float):
        self._half_life_s, self._at = half_life_s, 0.0
        self._sums: dict[str, float] = {}

    def add(self, now: float, **amounts: float) -> None:
        """Add amounts that happened at `now` (steady seconds)."""
        self._decay(now)
        for name, amount in amounts.items():
            self._sums[name] = self._sums.get(name, 0.0) + amount

    def ratio(self, numerator: str, denominator: str) -> float | None:
        """A ratio of sums; None while the denominator is empty."""
        below = self._sums.get(denominator, 0.0)
        return self._sums.get(numerator, 0.0) / below if below > 1e-9 else None

    def rate(self, name: str, now: float) -> float:
        """Amount per second over the remembered past."""
        self._decay(now)
        return self._sums.get(name, 0.0) * float(np.log(2.0)) / self._half_life_s

    def to_state(self) -> dict[str, Any]:
        """JSON-able state."""
        return {"at": self._at, "sums": dict(self._sums)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the state that `to_state` wrote."""
        self._at, self._sums = float(state["at"]), dict(state["sums"])

    def _decay(self, now: float) -> None:
        if now > self._at:
            factor = 0.5 ** ((now - self._at) / self._half_life_s)
            self._sums = {name: amount * factor for name, amount in self._sums.items()}
            self._at = now


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
        self._held: dict[int, int] = {}  # block length in use, by batch bucket
        self.allowance: Allowance | None = None
        self.decision: Decision | None = None
        self.totals: dict[str, float] = {}
        self._arms: OrderedDict[str, str] = OrderedDict()

    def set_policy(self, policy: ClassPolicy, now: float) -> None:
        """Obey a new revision. A new first rule or longest block starts new estimates; a new rule also new evidence."""
        rule_changed = policy.rules[0] != self.rule
        if rule_changed or policy.g_max != self.policy.g_max:
            self.estimator = CurveEstimator(policy.rules[0], policy.g_max, half_life_rounds=self._half_life_rounds)
            self.solution = None
        if rule_changed:
            self.rule = policy.rules[0]
            self.governor.reset_evidence("rule", now, self.rule)
        self.governor.set_policy(policy, now)
        self.policy = policy

    def observe_block(self, block: TokenBlock, now: float) -> None:
        """Take in one telemetry block: the curve, the costs and the speed meters."""
        self.estimator.add(block)
        self.costs.add(block)
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

    def observe_request(self, record: RequestRecord, now: float) -> None:
        """Take in one served request."""
        self.governor.observe_request(record, now)
        self._arms[record.request_id] = record.arm
        while len(self._arms) > _KEPT_ARMS:
            self._arms.popitem(last=False)
        self.meter.add(now, requests=1.0, touches=float(record.touches), touched=float(record.touches > 0))
        self._count(
            {
                f"requests.{record.arm}": 1.0,
                "touches": float(record.touches),
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
        branch = arm if arm == "untouched" else "lenient" if lenient else "holdback"
        self._count({f"score_sum.{branch}.{score.metric}": score.score, f"scores.{branch}.{score.metric}": 1.0})

    def decide(self, now: float, fence: Fence) -> Decision:
        """The knobs for the next ttl seconds, and why."""
        allowance = self.allowance = self.governor.decide(now)
        try:
            if self.estimator.rounds_effective < LEARNING_ROUNDS or not self.costs.ready:
                raise SolveError("too few rounds measured")
            table, caps = self._solve(allowance)
            reason, explanation = allowance.reason, allowance.explanation
        except SolveError as e:
            self.solution = None
            self._held.clear()
            table, caps = [KnobRow(1, min(DEFAULT_G, self.policy.g_max), 0.0, 0.0)], []
            reason, explanation = "learning", f"Lossless while acceptance and costs are being measured: {e}."
        lenient = self.solution is not None and self.solution.theta > 0
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
            explore=self.policy.explore,
        )
        self.governor.leased(fence.epoch, fence.seq, self._planned_touches(allowance))
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
            estimates=self._estimates(),
            bounds=asdict(allowance),
            counterfactual=self._counterfactual(),
        )
        return self.decision

    def _solve(self, allowance: Allowance) -> tuple[list[KnobRow], list[CapRow]]:
        """Knobs per batch bucket, and per share of the loss budget. Sets `solution` to the one that touches most."""
        curve = self.estimator.curve()

        def best(rows: int, share: float = 1.0, fixed_g: int | None = None) -> Solution:
            return solve(
                curve,
                self.costs.draft_s(rows),
                self.costs.verify_s(rows),
                float(self.costs.overhead_s(rows)),
                d_allowed=allowance.d_allowed * share,
                max_theta=self.policy.max_theta,
                g_max=self.policy.g_max,
                fixed_g=fixed_g,
            )

        table: list[KnobRow] = []
        solutions: list[Solution] = []
        for rows in self.costs.seen_buckets:
            found = best(rows)
            held = self._held.get(rows)
            if held is not None and held != found.g:
                current = best(rows, fixed_g=held)
                found = choose(current, found, max(MIN_GAIN, NOISE_FACTOR * gain_noise(curve, current, found)))
            self._held[rows] = found.g
            solutions.append(found)
            table.append(KnobRow(rows, found.g, found.theta, found.rho))
        self.solution = max(solutions, key=lambda s: s.touches_per_token_upper)
        first = table[0]
        caps = [CapRow(share, s.theta, s.rho) for share in CAP_SHARES for s in (best(first.batch, share, first.g),)]
        return table, caps

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
    ) -> Self:
        """Continue from `state` under `policy`; evidence for another rule is not taken over."""
        self = cls(policy, costs, half_life_rounds=half_life_rounds, meter_s=meter_s)
        self.meter.restore(state["meter"])
        self.totals.update(state["totals"])
        self._arms.update(state["arms"])
        self.governor = Governor.from_state(state["governor"], policy, self.rule)
        if (state["rule"], state["g_max"]) == (self.rule, policy.g_max):
            self.estimator = CurveEstimator.from_state(state["estimator"])
            self._held.update(dict(state["held"]))
        return self
