"""What of a curve is shown."""

from __future__ import annotations

import numpy as np
import pytest

from controller.shown import FRONTIER_POINTS, frontier_points, of_curve, positions, short
from controller.solve import round_seconds, solve
from tests.support_curves import constant_curve, costs, random_curve


def test_the_frontier_begins_lossless_and_rises() -> None:
    """Its first point is the best lossless block, both coordinates ascend, and there are not too many of them."""
    curve, seconds = random_curve(np.random.default_rng(3), 12, 40), costs(12, 0.1)
    points = frontier_points(curve, round_seconds(*seconds, 13), 0.9)
    touches, speeds = np.array(points).T
    lossless = solve(curve, *seconds, d_allowed=0.0)
    assert points[0] == (0.0, pytest.approx(lossless.speedup_plain, rel=1e-4))
    assert (np.diff(touches) > 0).all() and (np.diff(speeds) > 0).all()
    assert 2 < len(points) <= FRONTIER_POINTS


def test_the_frontier_keeps_to_the_policy() -> None:
    """With no theta allowed it is one point; a shorter longest block can only be slower."""
    curve, seconds = random_curve(np.random.default_rng(3), 12, 40), round_seconds(*costs(12, 0.1), 13)
    assert len(frontier_points(curve, seconds, 0.0)) == 1
    assert frontier_points(curve, seconds[:4], 0.9)[-1][1] <= frontier_points(curve, seconds, 0.9)[-1][1]


def test_positions_are_conditional() -> None:
    """Where every position is accepted alike, each shows that probability."""
    curve = constant_curve(0.8, 0.1, 6)
    solution = solve(curve, *costs(6, 0.05), d_allowed=0.0)
    assert positions(curve, solution) == pytest.approx((0.8,) * solution.g)


def test_intervals_hold_their_estimates_and_stay_possible() -> None:
    curve = random_curve(np.random.default_rng(5), 8, 20)
    for allowed in (0.0, 0.02, 0.2):
        solution = solve(curve, *costs(8, 0.1), d_allowed=allowed)
        found = of_curve(curve, solution, 0.7, 400.0)
        for estimate in found.values():
            assert estimate.low <= estimate.value <= estimate.high
        assert found["tokens_per_pass"].high <= 1 + solution.g
        assert found["acceptance"].low >= 0.7 - 0.3 and found["acceptance"].high <= 1
    assert "acceptance" not in of_curve(curve, solution, None, 0.0)


def test_numbers_are_short() -> None:
    assert short(0.123456789) == 0.12346
    assert short(12345678.0) == 12346000.0
