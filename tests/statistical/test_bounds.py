"""Coverage of the confidence sequence at all times at once, seeded, with the intersected variant as negative control.

Each case runs 2,000 sequences of 400 observations and counts those whose bound is wrong at any of about 40 times. A
bound that missed at exactly the stated 5 % would show more than 130 misses once in about 1,000 seeds; the sequences are
conservative, so the fixed seeds show far fewer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from controller.bounds import LAMBDAS, PRIOR_WEIGHT, WEIGHTS, EmpiricalBernstein

Array = npt.NDArray[np.float64]
RUNS, N, SIGNIFICANCE, ALLOWED = 2000, 400, 0.05, 130
TIMES = np.unique(np.round(np.geomspace(1, N, 40)).astype(int))


def three_way(rng: np.random.Generator, mean: Array, ties: float) -> Array:
    """Differences -1, 0, +1 with the given conditional means, shape [RUNS, N]; ``ties`` is the share of -1."""
    u = rng.random(mean.shape)
    return np.where(u < mean + ties, 1.0, np.where(u > 1 - ties, -1.0, 0.0))


def iid(rng: np.random.Generator) -> tuple[Array, Array]:
    mean = np.full((RUNS, N), 0.1)
    return three_way(rng, mean, 0.05), mean


def drifting(rng: np.random.Generator) -> tuple[Array, Array]:
    mean = np.broadcast_to(0.01 + 0.3 * (np.arange(N) / N) ** 2, (RUNS, N))
    return three_way(rng, mean, 0.02), mean


def tiny(rng: np.random.Generator) -> tuple[Array, Array]:
    mean = np.full((RUNS, N), 0.003)
    return three_way(rng, mean, 0.0), mean


def halves(rng: np.random.Generator) -> tuple[Array, Array]:
    return rng.choice([-0.5, 0.5], (RUNS, N)), np.zeros((RUNS, N))


def steered(rng: np.random.Generator) -> tuple[Array, Array]:
    """A controller that raises the conditional mean while what it has seen looks good."""
    z, mean, total = np.zeros((RUNS, N)), np.zeros((RUNS, N)), np.zeros(RUNS)
    for i in range(N):
        mean[:, i] = np.where(total <= 0.05 * i, 0.12, 0.01)
        z[:, i] = three_way(rng, mean[:, i], 0.03)
        total += z[:, i]
    return z, mean


CASES: list[Callable[[np.random.Generator], tuple[Array, Array]]] = [iid, drifting, tiny, halves, steered]


def solve(variance: Array, significance: float = SIGNIFICANCE, scale: float = 1.0) -> Array:
    """`mixture_radius` over an array of variances, by bisection: fast enough for 2,000 runs, and independent of it."""
    keep = LAMBDAS * scale < 1
    lambdas, weights = LAMBDAS[keep], WEIGHTS[keep]
    psi = (-np.log1p(-lambdas * scale) - lambdas * scale) / scale**2
    found, back = np.unique(variance, return_inverse=True)
    shift, target = psi * found[:, None], np.log(1 / significance)
    low = ((target + shift) / lambdas).min(-1)
    high = ((target - np.log(weights) + shift) / lambdas).min(-1)
    for _ in range(40):
        middle = (low + high) / 2
        under = (weights * np.exp(lambdas * middle[:, None] - shift)).sum(-1) < 1 / significance
        low, high = np.where(under, middle, low), np.where(under, high, middle)
    return high[back].reshape(variance.shape)


def bounds(z: Array, sides: str = "both") -> tuple[Array, Array]:
    """Upper and lower bounds of every run at every one of TIMES, shapes [RUNS, len(TIMES)]."""
    total = z.cumsum(1)
    past = np.concatenate([np.zeros((len(z), 1)), total[:, :-1]], 1) / (np.arange(z.shape[1]) + PRIOR_WEIGHT)
    upper_v = ((z - past.clip(0, None)) ** 2).cumsum(1)[:, TIMES - 1]
    mean = total[:, TIMES - 1] / TIMES
    upper = (mean + solve(upper_v) / TIMES).clip(None, 1)
    if sides == "upper":
        return upper, upper
    lower_v = ((z - past.clip(None, 0)) ** 2).cumsum(1)[:, TIMES - 1]
    radius = np.minimum(solve(lower_v, SIGNIFICANCE / 2), solve(upper_v, SIGNIFICANCE / 2, 2.0))
    return upper, (mean - radius / TIMES).clip(-1, None)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_the_bounds_cover_the_running_mean_at_all_times(
    case: Callable[[np.random.Generator], tuple[Array, Array]],
) -> None:
    """Misses of either side stay within the stated significance."""
    z, means = case(np.random.default_rng(20))
    truth = (means.cumsum(1) / np.arange(1, N + 1))[:, TIMES - 1]
    upper, lower = bounds(z)
    assert (truth > upper + 1e-9).any(1).sum() <= ALLOWED
    assert (truth < lower - 1e-9).any(1).sum() <= ALLOWED


def test_intersecting_over_time_is_falsely_safe() -> None:
    """Negative control: the minimum of past upper bounds misses a mean that rose midway in nearly every run."""
    z, means = drifting(np.random.default_rng(20))
    truth = (means.cumsum(1) / np.arange(1, N + 1))[:, TIMES - 1]
    intersected = np.minimum.accumulate(bounds(z, "upper")[0], 1)
    assert (truth > intersected + 1e-9).any(1).sum() > 10 * ALLOWED


def test_a_bound_without_its_margin_fails_the_same_test() -> None:
    """Negative control: half the radius is missed far more often than stated."""
    z, means = iid(np.random.default_rng(20))
    truth = (means.cumsum(1) / np.arange(1, N + 1))[:, TIMES - 1]
    mean = z.cumsum(1)[:, TIMES - 1] / TIMES
    assert (truth > mean + 0.4 * (bounds(z, "upper")[0] - mean)).any(1).sum() > ALLOWED


def test_the_arrays_here_are_the_bounds_that_ship() -> None:
    """The vectorised twin agrees with `EmpiricalBernstein` on the first runs of every case."""
    for case in CASES:
        z, _ = case(np.random.default_rng(21))
        upper, lower = bounds(z[:3])
        for run in range(3):
            bound = EmpiricalBernstein()
            for i, x in enumerate(z[run], start=1):
                bound.update(float(x))
                if i in (1, 12, N):
                    at = int(np.searchsorted(TIMES, i))
                    if TIMES[at] == i:
                        assert bound.upper(SIGNIFICANCE) == pytest.approx(upper[run, at], abs=1e-7)
                        assert bound.lower(SIGNIFICANCE) == pytest.approx(lower[run, at], abs=1e-7)
