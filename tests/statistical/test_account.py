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

from controller.bounds import AIM_SPREAD, AIMED_WEIGHT, LAMBDAS, WEIGHTS, mixture_radius
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


CASES: list[Callable[[np.random.Generator], Case]] = [
    even,
    only_at_low_load,
    fewer_as_it_looks_good,
    missing_when_bad,
    tiny,
    drifting,
]


def radius(variance: Array, scale: Array) -> Array:
    """`mixture_radius` with its aim over arrays, by bisection."""
    lambdas = np.concatenate((AIM * AIM_SPREAD, LAMBDAS))
    weights = np.concatenate((np.full(3, AIMED_WEIGHT / 3), (1 - AIMED_WEIGHT) * WEIGHTS))
    pairs, back = np.unique(np.stack((variance.ravel(), scale.ravel())), axis=1, return_inverse=True)
    v, c = pairs[:, :, None]
    steps = np.minimum(lambdas * c, 1 - 1e-12)
    alive = lambdas * c < 1 - 1e-9
    shift = (-np.log1p(-steps) - steps) * v / c**2
    low, high = np.zeros(len(v)), np.full(len(v), 5000.0)
    for _ in range(45):
        middle = (low + high) / 2
        wealth = np.where(alive, weights * np.exp(np.minimum(lambdas * middle[:, None] - shift, 50.0)), 0.0).sum(-1)
        low, high = np.where(wealth < 1 / SIGNIFICANCE, middle, low), np.where(wealth < 1 / SIGNIFICANCE, high, middle)
    return high[back.ravel()].reshape(variance.shape)


def spent(case: Case, z: Array, weight: Array, part: float = 1.0) -> tuple[Array, Array]:
    """(truth, bound) of the loss served so far at TIMES; ``part`` of the radius is added."""
    at = TIMES - 1
    truth = (1 - HOLDBACK) * case.mean.cumsum(1)[:, at]
    total = (case.drawn * weight * z).cumsum(1)[:, at]
    variance = (case.drawn * (weight * z) ** 2).cumsum(1)[:, at]
    scale = np.maximum.accumulate(np.where(case.drawn > 0, weight, 0.9), axis=1)[:, at]
    return truth, total + part * radius(variance, scale)


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


def test_a_third_of_the_radius_is_not_enough() -> None:
    """Negative control: the margin is needed."""
    c = even(np.random.default_rng(31))
    assert misses(*spent(c, c.z, (1 - HOLDBACK) / c.fork, part=1 / 3)) > 2 * ALLOWED


def test_the_bound_here_is_the_ledgers() -> None:
    """The vectorised twin agrees with `Ledger.spent_upper` in one slice with nothing in flight."""
    c = fewer_as_it_looks_good(np.random.default_rng(32))
    _, bound = spent(c, c.z, (1 - HOLDBACK) / c.fork)
    for run in range(3):
        ledger = Ledger(100.0, 10, 0.0)
        ledger.aim = AIM
        for i in range(N):
            ledger.add_requests(1.0, 0, 0, tokens=1, touched=1, touches=1)
            if c.drawn[run, i]:
                z, w = float(c.z[run, i]), (1 - HOLDBACK) / float(c.fork[run, i])
                ledger.add_fork(Evidence(1, z, z * z, 1, 1, w, 0, 0, arrived=1.0, touched_at=1.0))
        ledger.flight.settle(2.0)
        assert ledger.spent_upper(SIGNIFICANCE, lambda e, l: 1.0) == pytest.approx(bound[run, -1], rel=1e-6)
    assert mixture_radius(4.0, SIGNIFICANCE, 2.0, AIM) == pytest.approx(
        float(radius(np.array([4.0]), np.array([2.0]))[0]), rel=1e-6
    )
