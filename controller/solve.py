"""The block length and knob that give the most tokens per second within an allowed drift.

With reach and touches along the path of knobs (`controller.curve`) and measured seconds,

    tokens per round   N(g, s) = 1 + S_1 + ... + S_g
    time per round     T(g)    = draft(g) + verify(g + 1 wide) + overhead
    touches per token  D(g, s) = touches of a round up to g / N
    solve              min T / N  over integer g in [0, g_max] and s on the path,  subject to  D <= d_allowed

`frontier` finds, for each g, the knob that emits the most tokens within the allowance: the path is climbed until the
first recorded setting that breaks it, and on that level rho is found by `scipy.optimize.brentq`. It stops at the
first break even if estimates dip again further on (noise, and less lenient knobs cost less per touch). T does not
enter, so one `Plan` serves every batch size; its `pick` takes the fastest g and certifies it. `solve` does both. g = 0
is plain decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq

from controller.curve import Curve, F, Ints
from policies.errors import Infeasible, SolveError, TooFewSamples

_SLACK = 1e-9  # relative tolerance of the constraint, for rounding


@dataclass(frozen=True)
class Solution:
    """A block length and knob with what they are expected to do. Seconds and passes are per emitted token.

    ``s`` is the path parameter of (theta, rho). ``touches_per_token`` is the estimate, ``touches_per_token_upper`` the
    pessimistic value that was held to ``d_allowed`` (kept here, at most 1). ``plain_*`` is g = 0, ``lossless_*`` the
    best g without leniency; speedups are over those. ``budget_value`` is -dL/d(d_allowed): passes of plain decoding
    (L = seconds per token / plain seconds per token) saved per unit of drift; finite also at zero allowance, 0 where
    the knob is at its limit. ``certified``: checked afresh, the constraint holds and no neighbouring block length is
    faster.
    """

    g: int
    theta: float
    rho: float
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
    """For each block length (arrays of shape [g_max + 1]) the knob with the most tokens within the allowance."""

    level: Ints
    rho: F
    tokens: F
    touches_upper: F  # per round


def frontier(
    curve: Curve, *, d_allowed: float, max_theta: float = 1.0, pessimism: float = 1.0, g_max: int | None = None
) -> Frontier:
    """The best knob on the path for each block length up to ``g_max`` (the curve's by default).

    ``d_allowed`` is touches per emitted token, >= 0, held by touches plus ``pessimism`` standard errors. ``max_theta``
    closes the levels above it. Raises as `solve` does.
    """
    g_max = _check(curve, d_allowed, max_theta, pessimism, g_max)
    settings, columns = curve.settings, slice(0, g_max + 1)
    open_ = settings.theta <= max_theta + 1e-12
    upper, tokens = curve.touches_upper(pessimism)[:, columns], curve.tokens[:, columns]
    broken = (upper > d_allowed * tokens * (1 + _SLACK)) & open_[:, None]
    # Settings before the first broken one are free to take; the first row (lossless) is never broken.
    stop = np.where(broken.any(axis=0), broken.argmax(axis=0), np.count_nonzero(open_))
    free = np.arange(len(settings))[:, None] < stop
    best = np.where(free, tokens, -1.0).argmax(axis=0)
    every = np.arange(g_max + 1)
    level, rho = settings.level[best], settings.rho[best].copy()
    most, touches = tokens[best, every], upper[best, every]
    for g in range(1, g_max + 1):
        if broken[:, g].any() and d_allowed > 0:
            right = int(stop[g])
            found, count, touched = _last_within(curve, upper[:, g], right, g, d_allowed)
            if count > most[g]:
                level[g], rho[g], most[g], touches[g] = settings.level[right], found, count, touched
    return Frontier(level, rho, most, touches)


def _last_within(curve: Curve, upper: F, right: int, g: int, d_allowed: float) -> tuple[float, float, float]:
    """(rho, tokens, touches) where D meets the allowance between the setting before ``right`` and it, which breaks it.

    The bounds of `Curve.at`, as scalars: tokens are a straight line in rho, touches a power of it.
    """
    settings = curve.settings
    left = right - 1
    high = float(settings.rho[right])
    if settings.level[left] != settings.level[right]:  # the level's first setting: between lossless and it
        tokens = float(np.minimum(curve.reach[0, : g + 1], curve.reach[right, : g + 1]).sum())
        rho = min(high, d_allowed * tokens * high / float(upper[right]))
        return rho, tokens, float(upper[right]) * rho / high
    low, base = float(settings.rho[left]), float(curve.tokens[left, g])
    slope = float(curve.reach_slope(left)[: g + 1].sum())
    below, above = float(upper[left]), float(upper[right])
    power = math.log(above / below) / math.log(high / low) if below > 0 else 0.0

    def tokens_at(rho: float) -> float:
        return base + slope * (rho - low)

    def touches_at(rho: float) -> float:
        return below * (rho / low) ** power if below > 0 else above * (rho - low) / (high - low)

    def excess(rho: float) -> float:
        return touches_at(rho) - d_allowed * tokens_at(rho)

    if excess(low) >= 0:
        rho = low
    elif excess(high) <= 0:
        rho = high
    else:
        rho = float(brentq(excess, low, high, xtol=1e-14, rtol=1e-13))
        for _ in range(8):  # step back over the root's rounding
            if excess(rho) <= 0:
                break
            rho = max(low, rho - 4e-14)
    return rho, tokens_at(rho), touches_at(rho)


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
        lengths = len(self.front.rho)
        seconds = round_seconds(draft_s, verify_s, overhead_s, lengths)
        if fixed_g is not None and not 0 <= fixed_g < lengths:
            raise ValueError(f"fixed_g must lie in [0, {lengths - 1}], not {fixed_g!r}")
        per_token = seconds / self.front.tokens
        g = int(per_token.argmin()) if fixed_g is None else fixed_g
        lossless = seconds / self.curve.tokens[0, :lengths]
        solution = _describe(self.curve, self.front, g, per_token, seconds, lossless, self.d_allowed)
        after = seconds / self.relaxed.tokens
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
    level, rho, tokens = int(front.level[g]), float(front.rho[g]), float(front.tokens[g])
    if g == 0:
        level, rho = 0, 0.0
    _, touches = curve.at(level, rho)
    plain, best_lossless = float(seconds[0]), float(lossless.min())
    return Solution(
        g=g,
        theta=curve.settings.theta_of(level),
        rho=rho,
        s=(level - 1 + rho) / curve.settings.levels if level else 0.0,
        tokens_per_round=tokens,
        touches_per_token=float(touches[g]) / tokens,
        touches_per_token_upper=float(front.touches_upper[g]) / tokens,
        seconds_per_token=float(per_token[g]),
        plain_seconds_per_token=plain,
        lossless_seconds_per_token=best_lossless,
        speedup_plain=plain / float(per_token[g]),
        speedup_lossless=best_lossless / float(per_token[g]),
        target_passes_per_token=1.0 / tokens,
        budget_value=0.0,
        certified=False,
        d_allowed=min(float(d_allowed), 1.0),
    )


def _certify(
    curve: Curve, front: Frontier, g: int, seconds: F, d_allowed: float, pessimism: float, *, free_g: bool
) -> bool:
    """Read the answer and its neighbours off the curve again: within the allowance, and no neighbour faster."""
    value = {}
    for other in range(max(0, g - 1), min(len(front.rho), g + 2)):
        reach, touches = curve.at(int(front.level[other]), float(front.rho[other]), pessimism)
        tokens = float(reach[: other + 1].sum())
        if touches[other] > d_allowed * tokens * (1 + 10 * _SLACK) + 1e-15:
            return False
        value[other] = float(seconds[other]) / tokens
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
    steps: int = 64,
) -> tuple[int, int, float, float]:
    """Brute force for tests: (g, level, rho, seconds per token) over every g and the path, ``steps`` per segment.

    Walks each level's recorded settings, then the segment before the first broken one point by point, and halves the
    last step down to the last place that holds. Slow, and shares only `Curve.at` with `solve`.
    """
    g_max = _check(curve, d_allowed, max_theta, pessimism, g_max)
    seconds = round_seconds(draft_s, verify_s, overhead_s, g_max + 1)
    settings = curve.settings
    best = (math.inf, 0, 0, 0.0)

    def value(g: int, level: int, rho: float) -> float:
        reach, touches = curve.at(level, rho, pessimism)
        tokens = float(reach[: g + 1].sum())
        return float(seconds[g]) / tokens if touches[g] <= d_allowed * tokens * (1 + _SLACK) else math.inf

    for g in range(g_max + 1):
        best = min(best, (value(g, 0, 0.0), g, 0, 0.0))
        broken = None
        for i in range(1, len(settings)):
            level, rho = int(settings.level[i]), float(settings.rho[i])
            if settings.theta[i] > max_theta + 1e-12:
                break
            if math.isinf(value(g, level, rho)):
                broken = i
                break
            best = min(best, (value(g, level, rho), g, level, rho))
        if broken is None or g == 0:
            continue
        level, high = int(settings.level[broken]), float(settings.rho[broken])
        low = float(settings.rho[broken - 1]) if settings.level[broken - 1] == level else 0.0
        inside, outside = low, high
        for rho in np.linspace(low, high, steps + 1)[1:-1]:
            if math.isinf(value(g, level, float(rho))):
                outside = float(rho)
                break
            inside = float(rho)
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if math.isinf(value(g, level, middle)) else (middle, outside)
        if inside > 0:
            best = min(best, (value(g, level, inside), g, level, inside))
    return best[1], best[2], best[3], best[0]


def gain_noise(curve: Curve, current: Solution, other: Solution) -> float:
    """Relative standard error of the speed of ``other`` over ``current``, from the errors of reach; >= 0.

    The positions both draft count only as far as they weigh differently in the two sums, the others in full. Errors of
    positions are added, not squared, since they are correlated. Costs are taken as known.
    """
    short, long = sorted((current, other), key=lambda solution: solution.g)
    place = int(np.searchsorted(curve.settings.s, long.s))
    errors = curve.reach_se[min(place, len(curve.settings) - 1)]
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
    for name in ("reach", "touches", "reach_se", "touches_se", "n_eff"):
        values = getattr(curve, name)
        if not np.all(np.isfinite(values)) or np.any(values < 0):
            raise SolveError(f"the curve's {name} must be finite and not negative")
    if np.any(curve.reach > 1 + 1e-9):
        raise SolveError("the curve's reach must lie in [0, 1]")
    if np.any(curve.touches[0] > 0):
        raise SolveError("the curve's lossless setting has touches")
    if not curve.n_eff[0] > 0:
        raise TooFewSamples("the curve has no effective rounds behind it")
    return g_max
