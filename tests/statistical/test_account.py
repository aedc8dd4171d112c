"""Coverage of what the account says was spent, at all times at once: weighed forks, whatever steers them.

Each case runs 2,000 accounts of 500 touched requests and counts those whose upper bound on the loss served so far is
wrong at any of about 25 times. A bound that missed at exactly the stated 5 % would show more than 130 misses once in
about 1,000 seeds; the seeds are fixed. Negative controls take out the weights, the worst-case fill, or the radius.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from controller.arms import PRIOR
from controller.bounds import AIM_SPREAD, AIM_WEIGHTS, LAMBDAS, WEIGHTS
from controller.budget import Ledger
from controller.evidence import Evidence

Array = npt.NDArray[np.float64]
RUNS, N, SIGNIFICANCE, ALLOWED, HOLDBACK, AIM = 2000, 500, 0.05, 130, 0.1, 0.25
TIMES = np.unique(np.round(np.geomspace(5, N, 25)).astype(int))


@dataclass
class Case:
    """Per request: its mean loss, the probability of its fork, whether it was drawn, its difference (worst case filled
    in), and the difference without that fill; arrays of shape [RUNS, N]."""

    mean: Array
    fork: Array
    drawn: Array
    z: Array
    unfilled: Array


def made(rng: np.random.Generator, mean: Array, fork: Array, ties: float = 0.0) -> Case:
    """A case from means and fork probabilities, with labels for every drawn fork."""
    drawn = (rng.random(mean.shape) < fork).astype(float)
    u = rng.random(mean.shape)
    z = np.where(u < mean + ties, 1.0, np.where(u > 1 - ties, -1.0, 0.0))
    return Case(mean, fork, drawn, z, z)


def even(rng: np.random.Generator) -> Case:
    return made(rng, np.full((RUNS, N), 0.05), np.full((RUNS, N), 0.3), ties=0.02)


def only_at_low_load(rng: np.random.Generator) -> Case:
    """Under load hardly any fork is drawn, and there the loss is tenfold."""
    load = (np.arange(N) // 50 % 2 == 1) & np.ones((RUNS, 1), dtype=bool)
    return made(rng, np.where(load, 0.15, 0.015), np.where(load, 0.1, 1.0))


def fewer_as_it_looks_good(rng: np.random.Generator) -> Case:
    """A controller that forks less and spends more the better its evidence looks."""
    mean, fork, drawn, z = (np.zeros((RUNS, N)) for _ in range(4))
    seen = np.zeros(RUNS)
    for i in range(N):
        good = seen <= 0.05 * i * 0.5
        mean[:, i], fork[:, i] = np.where(good, 0.12, 0.02), np.where(good, 0.15, 0.6)
        drawn[:, i] = rng.random(RUNS) < fork[:, i]
        z[:, i] = rng.random(RUNS) < mean[:, i]
        seen += drawn[:, i] * z[:, i]
    return Case(mean, fork, drawn, z, z)


def missing_when_bad(rng: np.random.Generator) -> Case:
    """Nine of ten labels of bad answers never come; they count as lost at their deadline, as do some good ones."""
    case = made(rng, np.full((RUNS, N), 0.08), np.full((RUNS, N), 0.5))
    lost = (case.z > 0) & (rng.random(case.z.shape) < 0.9) | (rng.random(case.z.shape) < 0.02)
    return Case(case.mean, case.fork, case.drawn, np.where(lost, 1.0, case.z), np.where(lost, 0.0, case.z))


def tiny(rng: np.random.Generator) -> Case:
    return made(rng, np.full((RUNS, N), 0.003), np.full((RUNS, N), 0.25))


def drifting(rng: np.random.Generator) -> Case:
    mean = np.broadcast_to(0.005 + 0.2 * (np.arange(N) / N) ** 3, (RUNS, N))
    return made(rng, mean, np.full((RUNS, N), 0.4))


def arms_alone(rng: np.random.Generator) -> Case:
    """No forks: each request speaks by its arm (`controller.arms`); most labels of lost answers never come."""
    mean, held = np.full((RUNS, N), 0.15), rng.random((RUNS, N)) < HOLDBACK
    score = (rng.random((RUNS, N)) < np.where(held, 0.9, 0.9 - mean)).astype(float)
    missing = ~held & (score == 0) & (rng.random((RUNS, N)) < 0.8)
    known = np.where(missing, 0.0, 1.0)
    before = (known * score).cumsum(1) - known * score + PRIOR[0] * PRIOR[1]
    guess = np.clip(before / (known.cumsum(1) - known + PRIOR[1]), 1 - HOLDBACK, 1)

    def lost(s: Array) -> Array:
        return np.where(held, (s - guess) * (1 - HOLDBACK) / HOLDBACK, guess - s)

    one = np.ones((RUNS, N))
    return Case(mean, one * (1 - HOLDBACK), one, lost(score), lost(np.where(missing, 1.0, score)))


CASES: list[Callable[[np.random.Generator], Case]] = [
    even,
    only_at_low_load,
    fewer_as_it_looks_good,
    missing_when_bad,
    tiny,
    drifting,
    arms_alone,
]


def radius(parts: Array, scales: Array) -> Array:
    """`radius_of` with its aim over arrays of shape [..., slices], by bisection."""
    lambdas = np.concatenate((AIM * AIM_SPREAD, LAMBDAS))
    weights = np.concatenate((AIM_WEIGHTS, (1 - AIM_WEIGHTS.sum()) * WEIGHTS))
    alive = lambdas * scales.max(-1)[..., None] < 1 - 1e-9
    shift = np.empty(alive.shape)
    for k, l in enumerate(lambdas):
        steps = np.minimum(l * scales, 1 - 1e-12)
        shift[..., k] = ((-np.log1p(-steps) - steps) * parts / scales**2).sum(-1)
    low, high = np.zeros(shift.shape[:-1]), np.full(shift.shape[:-1], 5000.0)
    for _ in range(32):
        middle = (low + high) / 2
        exponents = np.where(alive, np.minimum(lambdas * middle[..., None] - shift, 50.0), -np.inf)
        wealth = np.exp(exponents) @ weights
        low, high = np.where(wealth < 1 / SIGNIFICANCE, middle, low), np.where(wealth < 1 / SIGNIFICANCE, high, middle)
    return high


def spent(case: Case, z: Array, weight: Array, part: float = 1.0, slice_n: int = 50) -> tuple[Array, Array]:
    """(truth, bound) of the loss served so far at TIMES; ``part`` of the radius is added. Slices of ``slice_n``."""
    at = TIMES - 1
    truth = (1 - HOLDBACK) * case.mean.cumsum(1)[:, at]
    total = (case.drawn * weight * z).cumsum(1)[:, at]
    parts, scales = np.zeros((*total.shape, N // slice_n)), np.full((*total.shape, N // slice_n), 0.9)
    for s in range(N // slice_n):
        of = slice(s * slice_n, (s + 1) * slice_n)
        upto = np.minimum(at - s * slice_n, slice_n - 1)
        known = upto >= 0
        squares = (case.drawn * (weight * z) ** 2)[:, of].cumsum(1)
        largest = np.maximum.accumulate(np.where(case.drawn > 0, weight, 0.9)[:, of], axis=1)
        parts[:, known, s], scales[:, known, s] = squares[:, upto[known]], largest[:, upto[known]]
    return truth, total + part * radius(parts, scales)


def misses(truth: Array, bound: Array) -> int:
    """Runs in which the bound was wrong at any time."""
    return int((truth > bound + 1e-9).any(1).sum())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_what_was_spent_is_covered_at_all_times(case: Callable[[np.random.Generator], Case]) -> None:
    """Misses stay within the stated significance."""
    c = case(np.random.default_rng(31))
    assert misses(*spent(c, c.z, (1 - HOLDBACK) / c.fork)) <= ALLOWED


def test_unweighed_forks_are_falsely_safe_when_they_are_drawn_at_low_load() -> None:
    """Negative control: the loss of the forks times how many requests stand behind one on average."""
    c = only_at_low_load(np.random.default_rng(31))
    pooled = np.broadcast_to((1 - HOLDBACK) / c.fork.mean(), c.fork.shape)
    assert misses(*spent(c, c.z, pooled)) > 10 * ALLOWED


def test_without_the_worst_case_missing_labels_look_like_good_news() -> None:
    """Negative control: dropped labels count as no difference."""
    c = missing_when_bad(np.random.default_rng(31))
    assert misses(*spent(c, c.unfilled, (1 - HOLDBACK) / c.fork)) > 10 * ALLOWED


def test_arms_whose_missing_labels_are_taken_as_right_are_falsely_safe() -> None:
    """Negative control: as above, without forks."""
    c = arms_alone(np.random.default_rng(31))
    assert misses(*spent(c, c.unfilled, (1 - HOLDBACK) / c.fork)) > 5 * ALLOWED


def test_the_lowest_bound_so_far_is_falsely_safe() -> None:
    """Negative control: bounds on the loss per request, intersected over time, miss a loss that rises."""
    c = drifting(np.random.default_rng(31))
    truth, bound = spent(c, c.z, (1 - HOLDBACK) / c.fork)
    assert misses(truth, np.minimum.accumulate(bound / TIMES, axis=1) * TIMES) > 2 * ALLOWED


def test_a_third_of_the_radius_is_not_enough() -> None:
    """Negative control: the margin is needed."""
    c = even(np.random.default_rng(31))
    assert misses(*spent(c, c.z, (1 - HOLDBACK) / c.fork, part=1 / 3)) > 2 * ALLOWED


def test_the_bound_here_is_the_ledgers() -> None:
    """The vectorised twin agrees with `Ledger.spent_upper` in ten slices with nothing in flight."""
    c = fewer_as_it_looks_good(np.random.default_rng(32))
    _, bound = spent(c, c.z, (1 - HOLDBACK) / c.fork)
    for run in range(3):
        ledger = Ledger(500.0, 10, 0.0)
        ledger.aim = AIM
        for i in range(N):
            at = float(i)
            ledger.add_requests(at, 0, 0, tokens=1, touched=1, touches=1)
            if c.drawn[run, i]:
                z, w = float(c.z[run, i]), (1 - HOLDBACK) / float(c.fork[run, i])
                ledger.add_fork(Evidence(1, z, z * z, 1, 1, w, 0, 0, arrived=at, touched_at=at))
        ledger.flight.settle(500.0)
        assert ledger.spent_upper(SIGNIFICANCE, lambda e, l: 1.0) == pytest.approx(bound[run, -1], rel=1e-6)
