"""What an edit of a policy would mean now: the same state, decided once under each policy.

The state is the last one that the loop saved: estimates, costs and the quality budget. From it the controller's own
code decides, first under the policy in force and then under the edit, as it would on a live reload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.costs import CostModel
from controller.steer import ClassSteer, Fence
from policies.alerts import rule_groups
from policies.model import Policy

HALF_LIFE_ROUNDS = 4000.0  # only what is observed later depends on it
_FENCE = Fence(epoch=0, seq=0, revision=0, ttl=5.0)


@dataclass(frozen=True)
class Knobs:
    """What one class would do: knobs for a batch of one, speeds that are predicted (None while unknown), and why."""

    g: int
    theta: float
    rho: float
    rule: str
    speed_plain: float | None
    speed_lossless: float | None
    touches_per_request: float
    remaining: float
    state: str
    reason: str
    explanation: str
    alerts: tuple[str, ...]


@dataclass(frozen=True)
class ClassPlan:
    """One class under the policy in force and under the edit."""

    traffic_class: str
    before: Knobs
    after: Knobs


def plan_knobs(state: Mapping[str, Any], old: Policy, new: Policy) -> list[ClassPlan]:
    """Each class of the saved loop ``state`` (`History.load_snapshot`) under both policies, at the state's time."""
    return [
        ClassPlan(name, _decide(state, name, old, old), _decide(state, name, old, new))
        for name in sorted(state["classes"], key=lambda name: (name != "default", name))
    ]


def changed_alerts(old: Policy, new: Policy) -> tuple[list[str], list[str]]:
    """Burn and budget alerts that end and that begin with the edit, as ``class: alert long/short: expression``."""
    before, after = _alerts(old), _alerts(new)
    return [name for name in before if name not in after], [name for name in after if name not in before]


def _decide(state: Mapping[str, Any], name: str, old: Policy, new: Policy) -> Knobs:
    now = float(state["time"])
    costs = CostModel.from_state(state["costs"]) if state["g_max"] == old.block.max else CostModel(old.block.max)
    steer = ClassSteer.from_state(state["classes"][name], old.for_class(name), costs, half_life_rounds=HALF_LIFE_ROUNDS)
    if new is not old:
        steer.set_policy(new.for_class(name), now)
    decision = steer.decide(now, _FENCE)
    allowance, solution = steer.allowance, steer.solution
    assert allowance is not None
    row = decision.lease.knobs(1)
    return Knobs(
        g=row.g,
        theta=row.theta,
        rho=row.rho,
        rule=decision.lease.rule,
        speed_plain=None if solution is None else solution.speedup_plain,
        speed_lossless=None if solution is None else solution.speedup_lossless,
        touches_per_request=allowance.tau_allowed,
        remaining=allowance.remaining,
        state=decision.state,
        reason=decision.reason,
        explanation=decision.explanation,
        alerts=tuple(alert.name for alert in allowance.alerts if alert.firing),
    )


def _alerts(policy: Policy) -> list[str]:
    lines = []
    for group in rule_groups(policy)[1:]:
        name = group["name"].removeprefix(f"lenity.{policy.pool}.")
        for rule in group["rules"]:
            if "alert" in rule:
                windows = "/".join(rule["labels"][w] for w in ("long", "short") if w in rule["labels"])
                lines.append(
                    f"{name}: {rule['alert']}{f' {windows}' if windows else ''}: {rule['annotations']['summary']}"
                )
    return lines
