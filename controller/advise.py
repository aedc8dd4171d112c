"""What to do with a pair, from rounds measured on the spot: the decision procedure, with the numbers behind each step.

    1. acceptance     by position, from what was drafted; is it worth a draft at all?
    2. costs          a draft step and a wider pass against one target pass; is verification nearly free at this batch?
    3. block length   the fastest, and the speed over plain decoding that it is expected to give
    4. what would help most: each change alone, with the speed that it would give

All of it uses the controller's own estimator, cost model and solver, so the answer is what the controller would decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.costs import CostModel
from controller.curve import Curve
from controller.estimate import CurveEstimator
from controller.solve import Solution, solve
from controller.speedup import best_block, speedup
from policies.errors import TooFewSamples
from storage.records import TokenBlock

F = npt.NDArray[np.float64]
NEARLY_FREE = 0.05  # of a pass that one more token of width may cost where verification counts as nearly free
DEAR_DRAFT = 0.3  # of a pass that a draft step may cost before the draft counts as dear
LOW = 0.3  # acceptance below which hardly a draft survives
SMALL_GAIN = 1.05  # speed over plain decoding that is not worth the trouble
LESS_REJECTED, CHEAPER, ALLOWED = 0.5, 0.5, 0.01  # the changes tried: share of rejections, of draft seconds, touches


@dataclass(frozen=True)
class Step:
    """One step of the procedure: what was asked, the answer in a word, and a sentence with the numbers."""

    question: str
    answer: str
    because: str


@dataclass(frozen=True)
class Help:
    """A change, and the speed over plain decoding that it alone would give."""

    change: str
    speedup_plain: float
    gain: float  # over what the pair gives now


@dataclass(frozen=True)
class Advice:
    """The procedure's steps, the figures that they rest on, and what would help, most first."""

    steps: tuple[Step, ...]
    helps: tuple[Help, ...]
    acceptance: float
    by_position: tuple[float, ...]  # acceptance given that the position was reached
    draft_cost: float  # a draft step over a target pass of width 1
    width_cost: float  # one more token of width over the same
    rows: int
    g: int
    speedup_plain: float
    speedup_formula: float  # Eq. 3 at the mean acceptance and the draft's cost
    rounds: float
    rule: str

    def to_json(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return asdict(self)


def advise(blocks: Iterable[TokenBlock], *, rows: int = 1, rule: str = "token_v3", g_max: int = 12) -> Advice:
    """The advice for batches of ``rows`` from lossless telemetry; ``rule`` is the one that leniency would use.

    Raises TooFewSamples without drafted rounds or measured passes.
    """
    estimator, costs = CurveEstimator(rule, g_max, half_life_rounds=1e9), CostModel(g_max, half_life_rounds=1e9)
    for block in blocks:
        estimator.add(block)
        costs.add(block)
    if not costs.ready:
        raise TooFewSamples("too few rounds were measured; decode more prompts or longer answers")
    curve = estimator.curve()
    seconds = costs.draft_s(rows), costs.verify_s(rows), costs.overhead_s(rows)
    now = solve(curve, *seconds, d_allowed=0.0)
    draft, verify, _ = seconds
    one_pass = float(verify[0])
    reach = curve.reach[0]
    by_position = reach[1:] / np.where(reach[:-1] > 0, reach[:-1], 1.0)
    a = float(estimator.acceptance or 0.0)
    draft_cost = float(draft[-1] - draft[1]) / max(1, g_max - 1) / one_pass
    width_cost = float(verify[-1] - verify[0]) / g_max / one_pass
    seen = int(np.flatnonzero(curve.n_eff >= 1).max())
    formula = speedup(a, best_block(a, draft_cost, g_max), draft_cost)
    helps = _helps(curve, seconds, now)
    steps = (
        _acceptance(a, by_position, seen),
        _draft(draft_cost, a),
        _width(width_cost, rows),
        Step(
            "which block length?",
            f"g = {now.g}" if now.g else "none: decode plainly",
            f"A round of {now.g} drafts gives {now.tokens_per_round:.2f} tokens; per token that is "
            f"{now.seconds_per_token * 1e3:.2f} ms against {now.plain_seconds_per_token * 1e3:.2f} ms for plain "
            f"decoding: {now.speedup_plain:.2f} times as fast. The closed form, with one acceptance for all positions "
            f"and free verification, says {formula:.2f}.",
        ),
        _worth(now, helps),
    )
    return Advice(
        steps=steps,
        helps=helps,
        acceptance=a,
        by_position=tuple(float(v) for v in by_position[:seen]),
        draft_cost=draft_cost,
        width_cost=width_cost,
        rows=rows,
        g=now.g,
        speedup_plain=now.speedup_plain,
        speedup_formula=formula,
        rounds=estimator.rounds_effective,
        rule=estimator.rule,
    )


def _acceptance(a: float, by_position: F, seen: int) -> Step:
    listed = ", ".join(f"{v:.2f}" for v in by_position[:seen])
    answer = "too low" if a < LOW else "high" if a >= 0.8 else "middling"
    return Step(
        "is acceptance high enough?",
        answer,
        f"{a:.2f} of the examined drafts are accepted; by position, given that it is reached: {listed}.",
    )


def _draft(cost: float, a: float) -> Step:
    answer = "too dear" if cost >= a else "dear" if cost > DEAR_DRAFT else "cheap"
    return Step(
        "is the draft cheap enough?",
        answer,
        f"A draft step costs {cost:.2f} of a target pass; a draft that is accepted with {a:.2f} saves up to {a:.2f} of "
        f"one.",
    )


def _width(cost: float, rows: int) -> Step:
    free = cost <= NEARLY_FREE
    return Step(
        "is verification nearly free at this batch?",
        "nearly free" if free else "not free",
        f"With {rows} row{'s' if rows > 1 else ''} one more token of width adds {cost:.3f} of a pass: "
        + (
            "the pass waits for memory."
            if free
            else "the pass is limited by arithmetic or overhead, so blocks stay short."
        ),
    )


def _worth(now: Solution, helps: tuple[Help, ...]) -> Step:
    best = (
        f"{helps[0].change}: {helps[0].speedup_plain:.2f} times plain decoding" if helps else "nothing that was tried"
    )
    answer = "not as it is" if now.g == 0 or now.speedup_plain < SMALL_GAIN else "yes"
    return Step(
        "is it worth it?", answer, f"{now.speedup_plain:.2f} times plain decoding. What would help most: {best}."
    )


def _helps(curve: Curve, seconds: tuple[F, F, float], now: Solution) -> tuple[Help, ...]:
    """Every change alone, solved again; those that gain nothing are left out."""
    draft, verify, overhead = seconds
    flat = np.full_like(verify, float(verify[0]))
    tried = {
        "a better draft (half as many rejections, same price)": (_better(curve), draft, verify, overhead, 0.0),
        "a cheaper draft (half its seconds, same acceptance)": (curve, CHEAPER * draft, verify, overhead, 0.0),
        f"leniency within a budget of {ALLOWED:g} touches a token": (curve, draft, verify, overhead, ALLOWED),
        "verification that is free in width (a smaller batch, or an accelerator)": (curve, draft, flat, overhead, 0.0),
        "no overhead around the models": (curve, draft, verify, 0.0, 0.0),
    }
    found = []
    for change, (on, drafting, passes, rest, allowed) in tried.items():
        made = solve(on, drafting, passes, rest, d_allowed=allowed)
        speed = now.plain_seconds_per_token / made.seconds_per_token
        if "overhead" in change:  # plain decoding would gain as well
            speed = made.speedup_plain
        found.append(Help(change, speed, speed / now.speedup_plain))
    return tuple(sorted((h for h in found if h.gain > 1.005), key=lambda h: -h.gain))


def _better(curve: Curve) -> Curve:
    """The curve with `LESS_REJECTED` times as many rejections at every position, lossless."""
    reach = curve.reach[0]
    conditional = reach[1:] / np.where(reach[:-1] > 0, reach[:-1], 1.0)
    better = np.concatenate(([1.0], np.cumprod(1 - LESS_REJECTED * (1 - conditional))))
    same = np.tile(better, (len(curve.settings), 1))
    none = np.zeros_like(same)
    by_depth = np.broadcast_to(better, (*same.shape, len(better)))
    return Curve(curve.settings, same, none, none, none, by_depth, curve.n_eff, curve.starts)
