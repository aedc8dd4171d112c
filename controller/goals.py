"""Several metrics at once: each has its own budget and evidence, the tightest decides.

Every metric is held at ``1 - significance / n``, so that all of them hold together at the policy's confidence.
Requests, forks and leases concern all, a score only its own metric.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from controller.allowance import AlertState, Allowance, Reading
from controller.governor import Governor
from storage.records import ForkRecord, OperatorAction, QualityScore, RequestRecord

if TYPE_CHECKING:
    from policies.model import ClassPolicy


def goals_of(policy: ClassPolicy) -> list[ClassPolicy]:
    """One policy per metric, the objective's own first; the floor belongs to that one."""
    confidence = 1 - (1 - policy.confidence) / (1 + len(policy.also))
    own = replace(policy, also=(), confidence=confidence)
    return [own, *(replace(own, metric=g.metric, max_loss=g.max_loss, floor=None) for g in policy.also)]


class Goals(Governor):
    """The governor of a policy's own metric with those of its further metrics beside it; alone, a plain governor."""

    def __init__(self, policy: ClassPolicy, rule: str):
        own, *further = goals_of(policy)
        super().__init__(own, rule)
        self.others = [Governor(p, rule) for p in further]

    def observe_request(self, record: RequestRecord, now: float) -> None:
        """As `Governor.observe_request`, for every metric."""
        super().observe_request(record, now)
        for other in self.others:
            other.observe_request(record, now)

    def observe_fork(self, record: ForkRecord, now: float) -> None:
        """As `Governor.observe_fork`, for every metric."""
        super().observe_fork(record, now)
        for other in self.others:
            other.observe_fork(record, now)

    def observe_score(self, score: QualityScore, now: float) -> None:
        """As `Governor.observe_score`, for the metric that it is of."""
        for other in self.others:
            if other.policy.metric == score.metric:
                other.observe_score(score, now)
                return
        super().observe_score(score, now)

    def leased(self, epoch: int, seq: int, tau: float, trial: tuple[str, float] | None = None) -> None:
        """As `Governor.leased`, for every metric."""
        super().leased(epoch, seq, tau, trial)
        for other in self.others:
            other.leased(epoch, seq, tau, trial)

    def set_policy(self, policy: ClassPolicy, now: float) -> None:
        """As `Governor.set_policy`; metrics that stay keep their evidence, new ones start without."""
        own, *further = goals_of(policy)
        super().set_policy(own, now)
        known = {other.policy.metric: other for other in self.others}
        self.others = [known.get(p.metric) or Governor(p, self.rule) for p in further]
        for other, p in zip(self.others, further, strict=True):
            other.set_policy(p, now)

    def reset_evidence(self, reason: str, now: float, rule: str | None = None) -> None:
        """As `Governor.reset_evidence`; a new scorer concerns its own metric only, a release all."""
        super().reset_evidence(reason, now, rule)
        if reason != "scorer_version":
            for other in self.others:
                other.reset_evidence(reason, now, rule)

    def act(self, action: OperatorAction, now: float) -> None:
        """As `Governor.act`, for every metric."""
        super().act(action, now)
        for other in self.others:
            other.act(action, now)

    def switch(self, name: str, now: float) -> None:
        """As `Governor.switch`, for every metric."""
        super().switch(name, now)
        for other in self.others:
            other.switch(name, now)

    def candidate(self, name: str, share: float, fork: float, now: float) -> tuple[Reading, float]:
        """As `Governor.candidate`: the reading of the metric that allows the trial least."""
        found = [super().candidate(name, share, fork, now), *(o.candidate(name, share, fork, now) for o in self.others)]
        return min(found, key=lambda reading_and_tau: reading_and_tau[1])

    def decide(self, now: float) -> Allowance:
        """The tightest of the allowances, with every metric's alerts."""
        own = super().decide(now)
        if not self.others:
            return own
        every = [(self.policy.metric, own), *((o.policy.metric, o.decide(now)) for o in self.others)]
        metric, least = min(every, key=lambda named: named[1].tau_allowed)
        alerts = tuple(
            _worst([(m, x) for m, a in every for x in a.alerts if x.name == alert.name]) for alert in own.alerts
        )
        explanation = f"Tightest of {len(every)} metrics is {metric}. {least.explanation}"
        return replace(
            least, alerts=alerts, fork=max(a.fork for _, a in every), explanation=explanation, counts=own.counts
        )

    def to_state(self) -> dict[str, Any]:
        """JSON-able state from which `from_state` continues exactly."""
        return super().to_state() | {"others": [other.to_state() for other in self.others]}

    @classmethod
    def from_state(cls, state: dict[str, Any], policy: ClassPolicy, rule: str) -> Self:
        """As `Governor.from_state`."""
        own, *further = goals_of(policy)
        self = super().from_state(state, own, rule)
        saved = {other["metric"]: other for other in state.get("others", ())}
        self.others = [
            Governor.from_state(saved[p.metric], p, rule) if p.metric in saved else Governor(p, rule) for p in further
        ]
        return self


def _worst(alerts: list[tuple[str, AlertState]]) -> AlertState:
    """One alert of several metrics: the one that fires, named."""
    for metric, alert in alerts:
        if alert.firing:
            return replace(alert, detail=f"{metric}: {alert.detail}")
    return alerts[0][1]
