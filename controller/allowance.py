"""What the governor says: an allowance with its state, numbers, alerts, and one plain sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scipy.optimize import brentq

from controller.burn import Burn

if TYPE_CHECKING:
    from controller.bounds import Sequence


@dataclass(frozen=True)
class AlertState:
    """One alert and whether it fires now."""

    name: str
    firing: bool
    detail: str


@dataclass(frozen=True)
class Allowance:
    """What leniency may do until the next decision, and why. Losses are in loss units: one is one request lost.

    ``tau_allowed`` and ``tau_seen`` are touches per request, ``d_allowed`` touches per emitted token. ``u_kappa`` is
    the bound on loss per touch, ``per_touch`` the loss per touch that is planned with, both in (0, 1]. ``remaining`` is
    a share of ``budget``, or of that of a window that is not over yet where that is tighter, and may be negative.
    ``burn_lower`` is the lower bound on loss per touch by long window. ``held_until`` is when the cooldown ends, in the
    clock of `now`; None where no cooldown runs.
    """

    state: str
    reason: str
    explanation: str
    tau_allowed: float
    d_allowed: float
    u_kappa: float
    tau_seen: float
    mean_length: float
    spent: float
    spent_upper: float
    budget: float
    remaining: float
    burn: dict[str, float]
    alerts: tuple[AlertState, ...]
    holdback: float
    fork: float
    label: float
    labels_needed: int | None
    forks_matured: int
    requests_in_window: int
    evidence_epoch: int
    counts: dict[str, int] = field(default_factory=dict)
    per_touch: float = 1.0
    burn_lower: dict[str, float] = field(default_factory=dict)
    held_until: float | None = None


@dataclass(frozen=True)
class Reading:
    """Everything that a decision rests on, at one time; the fields are those of `Allowance`, and

    ``allowed`` is the loss rate per request that may be planned, ``unproven`` the touches above `tau_seen` whose labels
    have not come, ``measured`` whether labelled forks carry a bound, ``alarmed`` whether a rise of loss was detected
    lately, and the stale flags say what has stopped coming.
    """

    upper: float
    per_touch: float
    alarmed: bool
    tau_seen: float
    labelled: int
    measured: bool
    spent: float
    spent_upper: float
    budget: float
    remaining: float
    allowed: float
    unproven: float
    stale: bool
    labels_stale: bool
    burn: Burn


def headroom(remaining: float, start: float, stop: float) -> float:
    """How much of the plan may be spent: 1 from ``start`` up, linear, 0 at ``stop``; shares of the budget."""
    if remaining >= start or remaining <= stop:
        return float(remaining >= start)
    return (remaining - stop) / (start - stop)


def affordable_step(afford: float, fork: float, r: Reading, most: float, step_labels: int, waiting: float) -> float:
    """The largest rise above `tau_seen`, up to ``most``, that ``afford`` loss units bear if every extra touch harms.

    Exposure lasts until ``step_labels`` forks of the new level are labelled, drawn at random with probability ``fork``
    (one deviation of bad luck is allowed for), and ``waiting`` more requests pass while their labels are under way.
    0 if none is affordable.
    """
    if most <= 0 or afford <= 0 or fork <= 0:
        return 0.0
    labels = step_labels + math.sqrt(step_labels)

    def excess(step: float) -> float:
        touched = -math.expm1(-(r.tau_seen + step))
        return step * (labels / (fork * touched) + waiting) - afford

    if excess(most) <= 0:
        return most
    least = most * 1e-9
    return float(brentq(excess, least, most)) if excess(least) < 0 else 0.0


def state_of(r: Reading) -> str:
    """The state of a governor that is neither disabled nor held."""
    if r.stale:
        return "no traffic"
    if r.labels_stale:
        return "uncertified"
    if r.measured:
        return "measured"
    return "insufficient data" if r.labelled else "certified"


def explain(reason: str, tau: float, r: Reading, step_labels: int) -> str:
    """One plain sentence with the numbers behind ``reason``."""
    fit = f"so {tau:.3g} touches per request fit the plan"
    if r.measured:
        known = f"{r.labelled} paired answers put the loss per touch at {r.per_touch:.3g}, at most {r.upper:.3g}"
    elif r.labelled:
        known = f"only {r.labelled} of {step_labels} paired answers have come, so every touch counts as a loss"
    else:
        known = "without paired answers every touch counts as a loss"
    endings = {
        "steady": f"Leniency is measured: {known}, {fit}.",
        "certified": f"Leniency is certified: {known}, {fit}.",
        "few_labels": f"Leniency is certified: {known}, {fit}.",
        "quality_alarm": f"Leniency is cut to {tau:.3g} touches per request: forked answers have begun to lose more.",
        "step_up": f"Leniency widens step by step: {known}, and {tau:.3g} touches per request are affordable next.",
        "waiting_for_labels": f"Leniency waits at {tau:.3g} touches per request for new paired answers: {known}.",
        "unproven": f"Leniency is back at {tau:.3g} touches per request: {r.unproven:.1f} touches above "
        f"{r.tau_seen:.3g} per request have no labels yet.",
        "pull_back": f"Leniency is pulled back to {tau:.3g} touches per request: {max(0.0, r.remaining):.0%} of the "
        "budget remains.",
        "labels_missing": f"Leniency is not certified by labels: none has come within the deadline, so it is held at "
        f"{tau:.3g} touches per request and shrinks as forks count as lost.",
        "no_traffic": f"No requests are coming, so leniency is held at {tau:.3g} touches per request.",
    }
    return endings[reason]


def stands(r: Reading) -> str:
    """How the budget stands now, one sentence."""
    return f"Now it is at most {r.spent_upper:.1f} of {r.budget:.1f}, and {max(0.0, r.remaining):.0%} remains."


def alerts_of(r: Reading, hold: tuple[str, float] | None, detail: str, lenient: bool) -> tuple[AlertState, ...]:
    """Every alert of the class, firing or not."""
    kind = hold[0] if hold else ""
    spent = f"{r.spent_upper:.1f} of {r.budget:.1f} loss units may be spent"
    silent = r.stale and (lenient or hold is not None)
    return (
        AlertState("LenityBudgetBurn", kind == "fast_burn", detail if kind == "fast_burn" else "within limits"),
        AlertState("LenityBudgetExhausted", kind == "exhausted", detail if kind == "exhausted" else spent),
        AlertState("LenityTelemetryStale", silent, "no request has been seen lately" if silent else "requests come"),
        AlertState(
            "LenityLabelsStale", r.labels_stale, "no label within the deadline" if r.labels_stale else "labels come"
        ),
    )


def labels_for(sequence: Sequence, target: float, significance: float, *, more: bool = True) -> int | None:
    """About how many labelled forks (more) bring the bound on loss per touch down to ``target``; None if none would.

    Takes the mean and variance so far as what is to come: ``mean + sqrt(2 v L / n) + L / n = target`` per fork, with
    ``L = ln(1/significance)`` and a little for the mixture.
    """
    if not sequence.n:
        return None
    per_fork = sequence.touches / sequence.n
    gap = target * per_fork - max(0.0, sequence.bound.mean)
    if gap <= 0:
        return None
    log = math.log(1 / significance) + 1.5
    spread = math.sqrt(2 * log * sequence.bound.variance_upper / sequence.n)
    root = (spread + math.sqrt(spread * spread + 4 * log * gap)) / (2 * gap)
    return max(0, math.ceil(root * root - sequence.n * more))
