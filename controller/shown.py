"""What of a curve is shown: estimates with intervals, acceptance by position, and the frontier with the point in use.

Pure; arrays are those of `controller.curve`. Numbers are rounded, since they are sent to every open page at each tick.
"""

from __future__ import annotations

import numpy as np

from controller.curve import Curve, F
from controller.solve import Solution
from controller.view import Estimate

Z95 = 1.96
FRONTIER_POINTS = 32


def frontier_points(curve: Curve, seconds: F, max_theta: float) -> tuple[tuple[float, float], ...]:
    """(touches per token, speed against plain) of the fastest knobs for ever more touches, both ascending.

    Touches are pessimistic by one standard error, as in the solve. ``seconds`` is the time of a round for block lengths
    0 to ``len(seconds) - 1``; knobs above ``max_theta`` are left out, depths are whole.
    """
    lengths = min(len(seconds), curve.g_max + 1)
    levels = np.flatnonzero(curve.settings.theta <= max_theta + 1e-12)[::2]  # half of them draw the same curve
    tokens = curve.tokens_by_depth(levels)[:, :lengths, :lengths]  # [level, depth, g]
    touches = np.broadcast_to(curve.touches_upper(1.0)[levels][:, :lengths, None], tokens.shape)
    deeper = np.arange(lengths)[:, None] > np.arange(lengths)[None, :]
    speed = seconds[0] / seconds[None, None, :lengths] * tokens
    per_token = np.where(np.broadcast_to(deeper, tokens.shape), np.inf, touches / tokens)
    per_token[0] = np.where(np.isfinite(per_token[0]), 0.0, np.inf)  # the lossless row touches nothing
    per_token, speed = per_token.ravel(), speed.ravel()
    order = np.lexsort((-speed, per_token))
    order = order[np.isfinite(per_token[order])]
    best = np.maximum.accumulate(speed[order])
    rises = np.concatenate(([True], best[1:] > best[:-1] * (1 + 1e-6)))
    kept = order[rises]
    if len(kept) > FRONTIER_POINTS:
        kept = kept[np.unique(np.linspace(0, len(kept) - 1, FRONTIER_POINTS).round().astype(int))]
    return tuple((short(float(per_token[i])), short(float(speed[i]))) for i in kept)


def positions(curve: Curve, solution: Solution) -> tuple[float, ...]:
    """Probability that position 1, 2, … of the block in use is accepted, given that it is examined."""
    level, depth = _place(curve, solution)
    reach = curve.by_depth[level, depth, : solution.g + 1]
    before = np.where(reach[:-1] > 0, reach[:-1], 1.0)
    return tuple(short(float(v)) for v in np.minimum(1.0, reach[1:] / before))


def of_curve(curve: Curve, solution: Solution, acceptance: float | None, examined: float) -> dict[str, Estimate]:
    """``acceptance``, ``tokens_per_pass`` and ``touches_per_token`` with 95% intervals by normal approximation.

    ``examined`` is the effective number of examined tokens behind ``acceptance``; correlation between rounds widens its
    interval as it widens the error of the first position.
    """
    level, _ = _place(curve, solution)
    found: dict[str, Estimate] = {}
    if acceptance is not None and examined > 0 and curve.g_max > 0:
        first = float(curve.reach[0, 1])
        coins = first * (1 - first) / max(1.0, float(curve.n_eff[1]))
        inflation = max(1.0, float(curve.reach_se[0, 1]) ** 2 / coins) if coins > 0 else 1.0
        error = Z95 * float(np.sqrt(acceptance * (1 - acceptance) / examined * inflation))
        found["acceptance"] = _around(acceptance, error, 0.0, 1.0)
    tokens = solution.tokens_per_round
    error = Z95 * float(curve.reach_se[level, 1 : solution.g + 1].sum())
    found["tokens_per_pass"] = _around(tokens, error, 1.0, 1.0 + solution.g)
    touches = solution.touches_per_token
    error = Z95 * max(0.0, solution.touches_per_token_upper - touches)
    found["touches_per_token"] = _around(touches, error, 0.0, 1.0)
    return found


def short(value: float) -> float:
    """``value`` to five significant digits."""
    return float(f"{value:.5g}")


def _place(curve: Curve, solution: Solution) -> tuple[int, int]:
    if solution.theta == 0 or solution.rho == 0:
        return 0, 0
    return curve.settings.level_of(solution.theta), min(int(solution.depth), solution.g)


def _around(value: float, error: float, low: float, high: float) -> Estimate:
    return Estimate(value=short(value), low=short(max(low, value - error)), high=short(min(high, value + error)))
