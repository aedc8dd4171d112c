"""The block length and knob that give the most tokens per second within an allowed drift.

With reach and touches by level of theta, depth k and block length g (`controller.curve`) and measured seconds,

    tokens per round   N = 1 + S_1 + ... + S_g
    time per round     T(g)    = draft(g) + verify(g + 1 wide) + overhead
    touches per token  D = touches of a round up to min(k, g) / N
    solve              min T / N  over integer g in [0, g_max], levels, real k in [0, g],  subject to  D <= d_allowed

`frontier` finds, for each g, the knob that emits the most tokens within the allowance. Levels are climbed with leniency
at all positions until the first that breaks it; estimates that dip again further on are noise. On that level the depth
is brought down until the allowance is met: touches and tokens are straight lines between whole depths, so where they
meet is a quotient. Where a level breaks only because too few rounds are known to rule touches out, no touch would be
spent there: the next level whose touches were seen (at least as many as the error is large) is tried beside it.
T does not enter, so one `Plan` serves every batch size; its `pick` takes the fastest g and certifies it. `solve` does
both. g = 0 is plain decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from controller.curve import Curve, F, Ints
from policies.errors import Infeasible, SolveError, TooFewSamples
from storage.records import MAX_DEPTH

_SLACK = 1e-9  # relative tolerance of the constraint, for rounding


@dataclass(frozen=True)
class Solution:
    """A block length and knob with what they are expected to do. Seconds and passes are per emitted token.

    ``s`` in [0, 1] says how far up the path that is: ``(level - 1 + depth / g) / levels``. ``rho`` is 1, or 0 without
    leniency; ``depth`` is as in `storage.records.KnobRow`. ``touches_per_token`` is the estimate,
    ``touches_per_token_upper`` the pessimistic value that was held to ``d_allowed`` (kept here, at most 1).
    ``plain_*`` is g = 0, ``lossless_*`` the best g without leniency; speedups are over those. ``budget_value`` is
    -dL/d(d_allowed): passes of plain decoding (L = seconds per token / plain seconds per token) saved per unit of
    drift; finite also at zero allowance, 0 where the knob is at its limit. ``certified``: checked afresh, the
    constraint holds and no neighbouring block length is faster.
    """

    g: int
    theta: float
    rho: float
    depth: float
    s: float
    tokens_per_round: float
    touches_per_token: float
    touches_per_token_upper: float
    seconds_per_token: float
    plain_seconds_per_token: float
    lossless_seconds_per_token: float
    speedup_plain: float
    speedup_lossless: float
    target_passes_per_token: float
    budget_value: float
    certified: bool
    d_allowed: float


@dataclass(frozen=True)
class Frontier:
    """For each block length (arrays of shape [g_max + 1]) the knob with the most tokens within the allowance.

    ``depth`` is 0 where ``level`` is, g where the rule is lenient at all positions.
    """

    level: Ints
    depth: F
    tokens: F
    touches_upper: F  # per round

    def knobs(self, curve: Curve, g: int) -> tuple[float, float, float]:
        """(theta, rho, depth) as a lease says them, at block length ``g``."""
        level, depth = int(self.level[g]), float(self.depth[g])
        if g == 0 or level == 0 or depth == 0:
            return 0.0, 0.0, MAX_DEPTH
        return float(curve.settings.theta[level]), 1.0, depth if depth < g else MAX_DEPTH


def frontier(
    curve: Curve, *, d_allowed: float, max_theta: float = 1.0, pessimism: float = 1.0, g_max: int | None = None
) -> Frontier:
    """The best knob for each block length up to ``g_max`` (the curve's by default).

    ``d_allowed`` is touches per emitted token, >= 0, held by touches plus ``pessimism`` standard errors. ``max_theta``
    closes the levels above it. Raises as `solve` does.
    """
    g_max = _check(curve, d_allowed, max_theta, pessimism, g_max)
    columns, every = slice(0, g_max + 1), np.arange(g_max + 1)
    upper, tokens = curve.touches_upper(pessimism)[:, columns], curve.tokens[:, columns]
    open_ = (curve.settings.theta <= max_theta + 1e-12)[:, None]
    broken = (upper > d_allowed * tokens * (1 + _SLACK)) & open_
    # Levels before the first broken one are free to take; lossless is never broken.
    stop = np.where(broken.any(axis=0), broken.argmax(axis=0), np.count_nonzero(open_))
    level = np.where(np.arange(len(open_))[:, None] < stop, tokens, -1.0).argmax(axis=0)
    depth = np.where(level > 0, every, 0).astype(np.float64)
    most, touches = tokens[level, every].copy(), upper[level, every].copy()
    if d_allowed > 0:
        seen = broken & (2 * curve.touches[:, columns] >= upper)
        for which in (broken, seen):
            tried, some = which.argmax(axis=0), which.any(axis=0)
            at, count, touched = _as_deep_as_allowed(curve, tried, upper, g_max, d_allowed)
            better = some & (count > most)
            level[better], depth[better] = tried[better], at[better]
            most[better], touches[better] = count[better], touched[better]
    return Frontier(level, depth, most, touches)


def _as_deep_as_allowed(curve: Curve, level: Ints, upper: F, g_max: int, d_allowed: float) -> tuple[F, F, F]:
    """(depth, tokens, touches) with the most tokens on ``level[g]``, for each g, before D first exceeds the allowance.

    Candidates are the whole depths up to there and the place itself, since in between both are straight lines.
    """
    every = np.arange(g_max + 1)
    tokens = curve.tokens_by_depth(level)[every, : g_max + 1, every]  # [g, depth]
    touches = upper[level]
    excess = touches - d_allowed * tokens
    within = (excess <= d_allowed * tokens * _SLACK) & (every <= every[:, None])
    first = np.where(within.all(axis=1), g_max + 1, np.logical_not(within).argmax(axis=1))  # depth, beyond the place
    best = np.where(every < first[:, None], tokens, -1.0).argmax(axis=1)
    depth, most, touched = best.astype(np.float64), tokens[every, best], touches[every, best]
    low = np.maximum(first - 1, 0)
    high = np.minimum(first, g_max)
    rise = excess[every, high] - excess[every, low]
    crossed = (first > 0) & (first <= every) & (rise > 0)
    part = np.where(crossed, np.clip(-excess[every, low] / np.where(rise > 0, rise, 1.0), 0.0, 1.0), 0.0)
    count = (1 - part) * tokens[every, low] + part * tokens[every, high]
    better = crossed & (count > most)
    spent = (1 - part) * touches[every, low] + part * touches[every, high]
    return np.where(better, low + part, depth), np.where(better, count, most), np.where(better, spent, touched)


def solve(
    curve: Curve,
    draft_s: npt.ArrayLike,
    verify_s: npt.ArrayLike,
    overhead_s: npt.ArrayLike,
    *,
    d_allowed: float,
    max_theta: float = 1.0,
    pessimism: float = 1.0,
    g_max: int | None = None,
    fixed_g: int | None = None,
) -> Solution:
    """The fastest block length and knob within the allowance.

    ``draft_s[g]``, ``verify_s[g]`` (a pass of width g + 1) and ``overhead_s`` (a number, or per g) are seconds per
    round for g = 0 to at least ``g_max`` (the curve's by default). ``d_allowed >= 0`` is touches per emitted token,
    with ``pessimism`` standard errors added to the estimate. ``fixed_g`` solves for the knob only. The shorter block
    and the smaller knob win ties.

    At ``d_allowed = 0``, and for a rule that cannot drift, lossless with the best g. With reach zero everywhere, g = 0;
    with reach one, the g with the best ``T / (g + 1)``. Raises TooFewSamples for a curve with no effective rounds,
    Infeasible for a negative allowance, SolveError for numbers that are not finite, for seconds that are negative or
    (per round) zero, and for reach outside [0, 1]; ValueError for misuse (lengths, ranges of the options).
    """
    plan = plan_for(curve, d_allowed=d_allowed, max_theta=max_theta, pessimism=pessimism, g_max=g_max)
    return plan.pick(draft_s, verify_s, overhead_s, fixed_g=fixed_g)


@dataclass(frozen=True)
class Plan:
    """What one allowance buys on one curve, before any seconds: one plan serves every batch size (`plan_for`)."""

    curve: Curve
    front: Frontier
    relaxed: Frontier  # with a little more drift, for the value of budget
    d_allowed: float
    more: float  # what ``relaxed`` was allowed beyond that
    pessimism: float

    def pick(
        self,
        draft_s: npt.ArrayLike,
        verify_s: npt.ArrayLike,
        overhead_s: npt.ArrayLike,
        *,
        fixed_g: int | None = None,
    ) -> Solution:
        """The fastest block length and its knob at these seconds; arguments and errors as those of `solve`."""
        lengths = len(self.front.depth)
        seconds = round_seconds(draft_s, verify_s, overhead_s, lengths)
        if fixed_g is not None and not 0 <= fixed_g < lengths:
            raise ValueError(f"fixed_g must lie in [0, {lengths - 1}], not {fixed_g!r}")
        shift = self.curve.shift[:lengths]
        per_token = seconds / (self.front.tokens * shift)
        g = int(per_token.argmin()) if fixed_g is None else fixed_g
        lossless = seconds / (self.curve.tokens[0, :lengths] * shift)
        solution = _describe(self.curve, self.front, g, per_token, seconds, lossless, self.d_allowed)
        after = seconds / (self.relaxed.tokens * shift)
        gain = solution.seconds_per_token - float(after.min() if fixed_g is None else after[g])
        return replace(
            solution,
            budget_value=max(0.0, gain / solution.plain_seconds_per_token / self.more),
            certified=_certify(
                self.curve, self.front, g, seconds, self.d_allowed, self.pessimism, free_g=fixed_g is None
            ),
        )


def plan_for(
    curve: Curve, *, d_allowed: float, max_theta: float = 1.0, pessimism: float = 1.0, g_max: int | None = None
) -> Plan:
    """The part of `solve` that does not depend on seconds; arguments and errors as there."""
    front = frontier(curve, d_allowed=d_allowed, max_theta=max_theta, pessimism=pessimism, g_max=g_max)
    more = max(1e-4, 0.1 * d_allowed)
    relaxed = frontier(curve, d_allowed=d_allowed + more, max_theta=max_theta, pessimism=pessimism, g_max=g_max)
    return Plan(curve, front, relaxed, d_allowed, more, pessimism)


def _describe(
    curve: Curve, front: Frontier, g: int, per_token: F, seconds: F, lossless: F, d_allowed: float
) -> Solution:
    level, depth, tokens = int(front.level[g]), float(front.depth[g]), float(front.tokens[g])
    theta, rho, leased = front.knobs(curve, g)
    _, touches = curve.at(level, depth)
    plain, best_lossless = float(seconds[0]), float(lossless.min())
    return Solution(
        g=g,
        theta=theta,
        rho=rho,
        depth=leased,
        s=(level - 1 + depth / g) / curve.settings.levels if theta > 0 else 0.0,
        tokens_per_round=tokens * float(curve.shift[g]),
        touches_per_token=float(touches[g]) / tokens,
        touches_per_token_upper=float(front.touches_upper[g]) / tokens,
        seconds_per_token=float(per_token[g]),
        plain_seconds_per_token=plain,
        lossless_seconds_per_token=best_lossless,
        speedup_plain=plain / float(per_token[g]),
        speedup_lossless=best_lossless / float(per_token[g]),
        target_passes_per_token=1.0 / (tokens * float(curve.shift[g])),
        budget_value=0.0,
        certified=False,
        d_allowed=min(float(d_allowed), 1.0),
    )


def _certify(
    curve: Curve, front: Frontier, g: int, seconds: F, d_allowed: float, pessimism: float, *, free_g: bool
) -> bool:
    """Read the answer and its neighbours off the curve again: within the allowance, and no neighbour faster."""
    value = {}
    for other in range(max(0, g - 1), min(len(front.depth), g + 2)):
        reach, touches = curve.at(int(front.level[other]), float(front.depth[other]), pessimism)
        tokens = float(reach[: other + 1].sum())
        if touches[other] > d_allowed * tokens * (1 + 10 * _SLACK) + 1e-15:
            return False
        value[other] = float(seconds[other]) / (tokens * float(curve.shift[other]))
    return not free_g or value[g] <= min(value.values()) * (1 + 1e-9)


def enumerate_solve(
    curve: Curve,
    draft_s: npt.ArrayLike,
    verify_s: npt.ArrayLike,
    overhead_s: npt.ArrayLike,
    *,
    d_allowed: float,
    max_theta: float = 1.0,
    pessimism: float = 1.0,
    g_max: int | None = None,
    steps: int = 8,
) -> tuple[int, int, float, float]:
    """Brute force for tests: (g, level, depth, seconds per token) over every g and the path.

    Walks the levels at full depth up to the first that breaks the allowance. On it, and on the first broken level whose
    touches are at least half of their upper bound, walks depths in ``steps`` per position and halves the last step down
    to the last place that holds. Slow, and shares only `Curve.at` with `solve`.
    """
    g_max = _check(curve, d_allowed, max_theta, pessimism, g_max)
    seconds = round_seconds(draft_s, verify_s, overhead_s, g_max + 1)
    best = (math.inf, 0, 0, 0.0)

    def value(g: int, level: int, depth: float) -> float:
        reach, touches = curve.at(level, depth, pessimism)
        tokens = float(reach[: g + 1].sum())
        spent = float(seconds[g]) / (tokens * float(curve.shift[g]))
        return spent if touches[g] <= d_allowed * tokens * (1 + _SLACK) else math.inf

    for g in range(g_max + 1):
        broken: list[int] = []
        for level in range(curve.settings.levels + 1):
            if curve.settings.theta[level] > max_theta + 1e-12:
                break
            found = value(g, level, g)
            if math.isinf(found):
                seen = 2 * curve.at(level, g)[1][g] >= curve.at(level, g, pessimism)[1][g]
                if not broken or seen:
                    broken.append(level)
                if seen:
                    break
            elif not broken:
                best = min(best, (found, g, level, float(g if level else 0)))
        for level in broken if d_allowed > 0 and g > 0 else []:
            inside, outside = 0.0, float(g)
            for depth in np.arange(g * steps + 1) / steps:
                found = value(g, level, float(depth))
                if math.isinf(found):
                    outside = float(depth)
                    break
                best = min(best, (found, g, level, float(depth)))
                inside = float(depth)
            for _ in range(60):
                middle = (inside + outside) / 2
                inside, outside = (inside, middle) if math.isinf(value(g, level, middle)) else (middle, outside)
            best = min(best, (value(g, level, inside), g, level, inside))
    return best[1], best[2], best[3], best[0]


def within_reach(curve: Curve, g_max: int) -> int:
    """The longest block worth considering: twice as long as the longest that was drafted, and one more.

    Beyond that the curve is only the last known position continued; the next blocks will know more.
    """
    return min(g_max, 2 * int(np.flatnonzero(curve.n_eff >= 1).max(initial=1)) + 1)


def gain_noise(curve: Curve, current: Solution, other: Solution) -> float:
    """Relative standard error of the speed of ``other`` over ``current``, from the errors of reach; >= 0.

    The positions both draft count only as far as they weigh differently in the two sums, the others in full. Errors of
    positions are added, not squared, since they are correlated. Costs are taken as known.
    """
    short, long = sorted((current, other), key=lambda solution: solution.g)
    errors = curve.reach_se[curve.settings.level_of(long.theta)]
    shared = float(errors[1 : short.g + 1].sum()) * abs(1 / short.tokens_per_round - 1 / long.tokens_per_round)
    return shared + float(errors[short.g + 1 : long.g + 1].sum()) / long.tokens_per_round


def choose(current: Solution | None, best: Solution, noise: float = 0.02) -> Solution:
    """Hysteresis in block length: ``current`` unless ``best`` is faster by more than the relative ``noise`` (>= 0).

    ``current`` must be the block length in use solved again (``fixed_g``) with the estimates and the allowance of
    ``best``, so that the knob follows the allowance down at once. One that was solved under another allowance, or that
    exceeds it, is not kept: ``best`` is returned.
    """
    if not noise >= 0:
        raise ValueError(f"noise must not be negative, not {noise!r}")
    if current is None or current.g == best.g or current.d_allowed != best.d_allowed:
        return best
    if current.touches_per_token_upper > best.d_allowed * (1 + 10 * _SLACK):
        return best
    return best if current.seconds_per_token > best.seconds_per_token * (1 + noise) else current


def round_seconds(draft_s: npt.ArrayLike, verify_s: npt.ArrayLike, overhead_s: npt.ArrayLike, lengths: int) -> F:
    """Seconds per round for block lengths 0 to ``lengths - 1``; raises SolveError or ValueError as `solve` does."""
    parts = []
    for name, values in (("draft_s", draft_s), ("verify_s", verify_s), ("overhead_s", overhead_s)):
        array = np.asarray(values, dtype=np.float64)
        if array.ndim > 1 or (array.ndim == 1 and len(array) < lengths) or (array.ndim == 0 and name != "overhead_s"):
            raise ValueError(f"{name} must hold one number for each block length 0 to {lengths - 1}: {array.shape}")
        array = array if array.ndim == 0 else array[:lengths]
        if not np.all(np.isfinite(array)) or np.any(array < 0):
            raise SolveError(f"{name} must be finite seconds >= 0")
        parts.append(array)
    total: F = np.asarray(parts[0] + parts[1] + parts[2])
    if np.any(total <= 0):
        raise SolveError("a round takes no time at all; the costs have not been measured")
    return total


def _check(curve: Curve, d_allowed: float, max_theta: float, pessimism: float, g_max: int | None) -> int:
    g_max = curve.g_max if g_max is None else g_max
    if not 0 <= g_max <= curve.g_max or not 0 <= max_theta <= 1 or not 0 <= pessimism < math.inf:
        raise ValueError(
            f"g_max must lie in [0, {curve.g_max}], max_theta in [0, 1] and pessimism be finite and not negative: "
            f"{g_max!r}, {max_theta!r}, {pessimism!r}"
        )
    if math.isnan(d_allowed):
        raise SolveError("the allowed touches per token are not a number")
    if d_allowed < 0:
        raise Infeasible(f"even lossless decoding does not stay below {d_allowed} touches per token")
    for name in ("reach", "touches", "reach_se", "touches_se", "by_depth", "n_eff"):
        values = getattr(curve, name)
        if not np.all(np.isfinite(values)) or np.any(values < 0):
            raise SolveError(f"the curve's {name} must be finite and not negative")
    if np.any(curve.reach > 1 + 1e-9) or np.any(curve.by_depth > 1 + 1e-9):
        raise SolveError("the curve's reach must lie in [0, 1]")
    if np.any(curve.touches[0] > 0):
        raise SolveError("the curve's lossless setting has touches")
    if not curve.n_eff[0] > 0:
        raise TooFewSamples("the curve has no effective rounds behind it")
    return g_max
