"""From the loop's objects to what is shown and kept: one view and one history point per class and tick."""

from __future__ import annotations

from controller.steer import ClassSteer
from controller.view import AlertView, ClassView
from storage.history import Point
from storage.records import Decision


def class_view(steer: ClassSteer, epoch: int, seq: int, ttl_s: float) -> ClassView:
    """What the page, the API and the metrics show of one class; call after `decide`."""
    allowance, solution, meter, decision = steer.allowance, steer.solution, steer.meter, steer.decision
    if allowance is None or decision is None:
        raise ValueError("class_view before the first decision")
    row = decision.lease.knobs(1)
    return ClassView(
        traffic_class=steer.policy.traffic_class,
        state=allowance.state,
        reason=decision.reason,
        explanation=decision.explanation,
        rule=steer.rule,
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
        alerts=tuple(AlertView(name=a.name, firing=a.firing, detail=a.detail) for a in allowance.alerts),
        forks_matured=allowance.forks_matured,
        labels_needed=allowance.labels_needed,
        quality_lenient=meter.ratio("lenient_score", "lenient_labels"),
        quality_lossless=meter.ratio("lossless_score", "lossless_labels"),
        requests_in_window=allowance.requests_in_window,
        max_loss=steer.policy.max_loss,
        counters=dict(steer.totals),
    )


def point_of(steer: ClassSteer, decision: Decision, now: float) -> Point:
    """One row of history: the numbers that are plotted over time. Unknown ones are left out."""
    allowance, solution, meter = steer.allowance, steer.solution, steer.meter
    if allowance is None:
        raise ValueError("point_of before the first decision")
    row = decision.lease.knobs(1)
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
    }
    return Point(
        pool=steer.policy.pool,
        traffic_class=steer.policy.traffic_class,
        time=now,
        values={name: value for name, value in values.items() if value is not None},
    )
