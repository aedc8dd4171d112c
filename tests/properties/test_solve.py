"""The solver against full enumeration, and what must hold whatever the curve. Seeded; nothing here fails by chance.

``LENITY_SOLVE_CASES=10000`` compares ten times as many instances.
"""

from __future__ import annotations

import os
from itertools import pairwise

import numpy as np
import pytest

from controller.curve import Curve
from controller.solve import enumerate_solve, solve
from tests.support_curves import random_curve

CASES = int(os.environ.get("LENITY_SOLVE_CASES", "1000"))


def case(seed: int) -> tuple[Curve, tuple[np.ndarray, np.ndarray, float], dict[str, float]]:
    rng = np.random.default_rng(seed)
    g_max = int(rng.integers(1, 7))
    curve = random_curve(rng, g_max, int(rng.integers(1, 9)))
    g = np.arange(g_max + 1)
    draft = rng.exponential(0.002) * (g > 0) + rng.exponential(0.004) * g
    verify = 0.02 + rng.exponential(0.001) * g
    options = {
        "d_allowed": float(rng.choice([0.0, 1e-5, 10 ** rng.uniform(-4, -0.3), 1.0], p=[0.1, 0.1, 0.7, 0.1])),
        "max_theta": float(rng.choice([1.0, rng.random()])),
        "pessimism": float(rng.choice([0.0, 1.0, 3.0])),
    }
    return curve, (draft, verify, float(rng.exponential(0.001))), options


@pytest.mark.parametrize("batch", range(10))
def test_no_answer_of_full_enumeration_is_faster_and_none_is_missed(batch):
    for seed in range(batch * CASES // 10, (batch + 1) * CASES // 10):
        curve, seconds, options = case(seed)
        found = solve(curve, *seconds, **options)
        g, level, depth, value = enumerate_solve(curve, *seconds, **options)
        assert found.seconds_per_token == pytest.approx(value, rel=1e-7), seed
        assert found.certified, seed
        assert found.touches_per_token_upper <= options["d_allowed"] * (1 + 1e-8), seed
        assert found.theta <= options["max_theta"] + 1e-12, seed
        if found.g == g and level and found.theta == curve.settings.theta[level]:
            assert min(found.depth, g) == pytest.approx(depth, rel=1e-4), seed


def test_the_property_can_fail():
    """A solver that took the allowance twice as large would be told apart in many cases."""
    different = 0
    for seed in range(100):
        curve, seconds, options = case(seed)
        found = solve(curve, *seconds, **(options | {"d_allowed": 2 * options["d_allowed"]}))
        value = enumerate_solve(curve, *seconds, **options)[3]
        different += found.seconds_per_token != pytest.approx(value, rel=1e-7)
    assert different > 15


def test_the_unit_of_time_does_not_matter():
    for seed in range(200):
        curve, (draft, verify, overhead), options = case(seed)
        one = solve(curve, draft, verify, overhead, **options)
        two = solve(curve, 1024 * draft, 1024 * verify, 1024 * overhead, **options)  # a power of two: exact
        assert (one.g, one.theta, one.depth, one.budget_value) == (two.g, two.theta, two.depth, two.budget_value)
        assert two.seconds_per_token == pytest.approx(1024 * one.seconds_per_token, rel=1e-14)


def test_more_budget_is_never_slower_and_never_below_lossless_or_plain():
    for seed in range(200):
        curve, seconds, options = case(seed)
        options.pop("d_allowed")
        last = np.inf
        for d in (0.0, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0):
            found = solve(curve, *seconds, d_allowed=d, **options)
            assert found.seconds_per_token <= last * (1 + 1e-9), (seed, d)
            assert found.speedup_plain >= 1 - 1e-12
            assert found.speedup_lossless >= 1 - 1e-12
            assert found.budget_value >= 0
            last = found.seconds_per_token


def test_more_pessimism_is_never_faster():
    for seed in range(200):
        curve, seconds, options = case(seed)
        options.pop("pessimism")
        found = [solve(curve, *seconds, pessimism=z, **options).seconds_per_token for z in (0.0, 0.5, 1.0, 3.0)]
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(found)), seed
