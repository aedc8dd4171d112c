"""From the loop's objects to what is shown and kept: one view and one history point per class and tick."""

from __future__ import annotations

from typing import Any

from controller.allowance import Allowance
from controller.shown import frontier_points, of_curve, positions, short
from controller.solve import round_seconds
from controller.steer import ClassSteer
from controller.view import AlertView, ClassView, Estimate
from storage.history import Point
from storage.records import Decision

SHOWN_POSITIONS = (1, 2, 4, 8)  # of a block, whose acceptance is kept over time


def class_view(steer: ClassSteer, epoch: int, seq: int, ttl_s: float) -> ClassView:
    """What the page, the API and the metrics show of one class; call after `decide`."""
    allowance, solution, meter, decision = steer.allowance, steer.solution, steer.meter, steer.decision
    if allowance is None or decision is None:
        raise ValueError("class_view before the first decision")
    row, order = decision.lease.knobs(1), steer.governor.standing.order
    return ClassView(
        traffic_class=steer.policy.traffic_class,
        state=allowance.state,
        reason=decision.reason,
        explanation=decision.explanation,
        rule=decision.lease.rule,
        g=row.g,
        theta=row.theta,
        rho=row.rho,
        mu=1 / row.theta if row.theta > 0 and row.rho > 0 else None,
        lease_epoch=epoch,
        lease_seq=decision.lease.seq,
        lease_ttl_s=ttl_s,
        acceptance=steer.acceptance,
        block_efficiency=meter.ratio("emitted", "rounds"),
        tokens_per_second=meter.ratio("emitted", "seconds"),
        predicted_speedup_plain=None if solution is None else solution.speedup_plain,
        predicted_speedup_lossless=None if solution is None else solution.speedup_lossless,
        touches_per_request_allowed=allowance.tau_allowed,
        touches_per_request_seen=meter.ratio("touches", "requests"),
        u_kappa=allowance.u_kappa,
        spent=allowance.spent,
        spent_upper=allowance.spent_upper,
        budget=allowance.budget,
        remaining=allowance.remaining,
        burn=dict(allowance.burn),
        burn_lower=dict(allowance.burn_lower),
        alerts=tuple(AlertView(name=a.name, firing=a.firing, detail=a.detail) for a in allowance.alerts),
        forks_matured=allowance.forks_matured,
        labels_needed=allowance.labels_needed,
        held_until=allowance.held_until,
        quality_lenient=meter.ratio("lenient_score", "lenient_labels"),
        quality_lossless=meter.ratio("lossless_score", "lossless_labels"),
        requests_in_window=allowance.requests_in_window,
        max_loss=steer.policy.max_loss,
        metric=steer.policy.metric,
        window_s=steer.policy.window_s,
        confidence=steer.policy.confidence,
        seconds_per_request=meter.ratio("request_s", "requests"),
        seconds_to_first_token=meter.ratio("first_token_s", "requests"),
        lease=decision.lease,
        override=None if order is None else order.action,
        override_who=None if order is None else order.who,
        override_why=None if order is None else order.why,
        counters=dict(steer.totals),
        **_of_curve(steer, allowance),
    )


def _of_curve(steer: ClassSteer, allowance: Allowance) -> dict[str, Any]:
    """The fields that come from the curve of the last decision; without one, those that need none."""
    curve, solution = steer.curve, steer.solution
    loss, loss_upper = loss_per_request(allowance, steer.policy.max_loss)
    estimates = {
        "loss": Estimate(value=loss, high=loss_upper),
        "loss_per_touch": Estimate(value=None, high=short(allowance.u_kappa)),
    }
    if curve is None or solution is None or steer.decision is None:
        return {"estimates": estimates}
    table = steer.decision.lease.table
    rows = next((r.batch for r in table if (r.g, r.theta) == (solution.g, solution.theta)), table[0].batch)
    costs, lengths = steer.costs, steer.policy.g_max + 1
    seconds = round_seconds(costs.draft_s(rows), costs.verify_s(rows), float(costs.overhead_s(rows)), lengths)
    return {
        "estimates": estimates | of_curve(curve, solution, steer.estimator.acceptance, steer.estimator.examined),
        "positions": positions(curve, solution),
        "frontier": frontier_points(curve, seconds, steer.policy.max_theta),
        "frontier_at": (short(solution.touches_per_token_upper), short(solution.speedup_plain)),
        "frontier_allowed": short(allowance.d_allowed),
    }


def loss_per_request(allowance: Allowance, max_loss: float) -> tuple[float | None, float | None]:
    """Mean loss of the window's requests: estimate, and what it may be at most. None where nothing is tolerated."""
    expected = allowance.budget / max_loss if max_loss > 0 else 0.0
    if expected <= 0:
        return None, None
    return short(allowance.spent / expected), short(allowance.spent_upper / expected)


def point_of(steer: ClassSteer, decision: Decision, now: float) -> Point:
    """One row of history: the numbers that are plotted over time. Unknown ones are left out."""
    allowance, solution, meter = steer.allowance, steer.solution, steer.meter
    if allowance is None:
        raise ValueError("point_of before the first decision")
    row = decision.lease.knobs(1)
    loss, loss_upper = loss_per_request(allowance, steer.policy.max_loss)
    accepted = positions(steer.curve, solution) if steer.curve is not None and solution is not None else ()
    values: dict[str, float | None] = {
        "g": float(row.g),
        "theta": row.theta,
        "rho": row.rho,
        "acceptance": steer.acceptance,
        "block_efficiency": meter.ratio("emitted", "rounds"),
        "tokens_per_second": meter.ratio("emitted", "seconds"),
        "requests_per_second": meter.rate("requests", now),
        "touches_per_request": meter.ratio("touches", "requests"),
        "quality_lenient": meter.ratio("lenient_score", "lenient_labels"),
        "quality_lossless": meter.ratio("lossless_score", "lossless_labels"),
        "speedup_plain": None if solution is None else solution.speedup_plain,
        "speedup_lossless": None if solution is None else solution.speedup_lossless,
        "remaining": allowance.remaining,
        "spent": allowance.spent,
        "spent_upper": allowance.spent_upper,
        "budget": allowance.budget,
        "u_kappa": allowance.u_kappa,
        "tau_allowed": allowance.tau_allowed,
        "tau_seen": allowance.tau_seen,
        "burn": max(allowance.burn.values(), default=0.0),
        "forks_matured": float(allowance.forks_matured),
        "loss": loss,
        "loss_upper": loss_upper,
        "max_loss": steer.policy.max_loss,
        "seconds_per_request": meter.ratio("request_s", "requests"),
        "seconds_to_first_token": meter.ratio("first_token_s", "requests"),
    }
    values |= {f"accepted_{j}": accepted[j - 1] for j in SHOWN_POSITIONS if j <= len(accepted)}
    return Point(
        pool=steer.policy.pool,
        traffic_class=steer.policy.traffic_class,
        time=now,
        values={name: value for name, value in values.items() if value is not None},
    )
