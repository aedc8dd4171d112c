"""Closed forms of speed: limits, the errata of the sources as golden numbers, and agreement with simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from controller import speedup as sp

GRID = [(a, c) for a in (0.1, 0.3, 0.5, 0.75, 0.9, 0.98) for c in (0.01, 0.05, 0.2, 0.5)]


def test_block_efficiency_counts_the_bonus_token():
    assert sp.block_efficiency(0.8, 8) == pytest.approx(sum(0.8**j for j in range(9)), rel=1e-14)


@pytest.mark.parametrize(("a", "g", "tokens"), [(0.0, 7, 1.0), (1.0, 7, 8.0), (0.5, 0, 1.0), (1.0, 0, 1.0)])
def test_block_efficiency_at_its_limits(a, g, tokens):
    assert sp.block_efficiency(a, g) == tokens


def test_block_efficiency_is_continuous_at_full_acceptance():
    assert sp.block_efficiency(1 - 1e-12, 7) == pytest.approx(8.0, rel=1e-10)


def test_speed_at_its_limits():
    assert sp.speedup(0.9, 0, 0.3) == 1.0
    assert sp.speedup(1.0, 4, 0.1) == pytest.approx(5 / 1.4)
    assert sp.speedup(0.7, 5, 0.0) == sp.block_efficiency(0.7, 5)
    assert sp.speedup(0.0, 4, 0.1) == pytest.approx(1 / 1.4)


def test_erratum_forgiving_a_twelfth_gives_acceptance_77_and_speed_275():
    """DESIGN 2.7: a=0.75, TV=0.25, lambda=0.08; the text has 0.79 and 2.93."""
    a = sp.mixed_acceptance(0.25, 0.08)
    assert a == pytest.approx(0.77)
    assert sp.speedup(a, 5, 0.05) == pytest.approx(2.75, abs=0.005)


def test_erratum_five_tokens_a_pass():
    """DESIGN 2.7: g=5, a=0.93 gives 5.04 tokens per pass; the text has 4.79."""
    assert sp.block_efficiency(0.93, 5) == pytest.approx(5.04, abs=0.005)


def test_erratum_cascade_tokens_are_a_power_not_a_composition():
    """DESIGN 2.7: a=.8, a'=.6, k=4, n=3 gives 4.02 tokens; composing the transform gives 4.14."""
    assert sp.vertical_cascade_tokens(0.8, 0.6, 4, 3) == pytest.approx(4.02, abs=0.005)
    x = 0.8
    for _ in range(3):
        x = sp.inner_round_transform(0.6, 4, x)
    assert (1 - 0.8 * x) / 0.2 == pytest.approx(4.14, abs=0.005)


def test_cascade_tokens_agree_with_simulation():
    """200,000 rounds, seeded; a standard error is 0.006, so five of them fail by chance once in 1.7 million seeds."""
    rng = np.random.default_rng(7)
    n = 200_000
    inner = np.minimum(rng.geometric(0.4, size=(n, 3)), 5).sum(axis=1)
    emitted = np.minimum(rng.geometric(0.2, size=n) - 1, inner) + 1
    error = emitted.std() / math.sqrt(n)
    assert abs(emitted.mean() - sp.vertical_cascade_tokens(0.8, 0.6, 4, 3)) < 5 * error
    assert abs(emitted.mean() - 4.14) > 5 * error  # the composed form is told apart


def test_erratum_a_cascade_that_rarely_defers_fails_theorem_1_and_is_faster():
    """DESIGN 2.7: the theorem's condition (g c + 1)/N <= c + delta with a = 1 - delta fails at c=0.05 for all these."""
    for delta in np.linspace(0.02, 0.3, 29):
        for g in range(1, 65):
            assert (g * 0.05 + 1) / sp.block_efficiency(1 - delta, g) > 0.05 + delta


@pytest.mark.parametrize(("a", "c"), GRID)
def test_stationarity_has_the_sign_of_minus_the_slope(a, c):
    for g in (0.5, 2.0, 5.0, 12.0):
        slope = (sp.speedup(a, g + 1e-5, c) - sp.speedup(a, g - 1e-5, c)) / 2e-5
        if abs(slope) > 1e-6:
            assert math.copysign(1, sp.stationarity(a, g, c)) == -math.copysign(1, slope)


@pytest.mark.parametrize(("a", "c"), GRID)
def test_best_integer_block_is_next_to_the_real_one(a, c):
    assert abs(sp.best_block(a, c, 400) - sp.real_best_block(a, c)) <= 1


@pytest.mark.parametrize(("a", "c"), GRID)
def test_approximation_errs_to_the_short_side(a, c):
    approximate, exact = sp.approximate_best_block(a, c), sp.real_best_block(a, c)
    assert approximate <= exact + 1e-9
    if c <= 0.01 and a <= 0.5:
        assert approximate == pytest.approx(exact, rel=0.1)


def test_plain_decoding_is_best_when_drafts_cost_what_they_save():
    assert sp.best_block(0.2, 0.2) == 0
    assert sp.best_block(0.2, 0.21) == 0
    assert sp.best_block(0.0, 0.1) == 0
    assert sp.best_block(0.21, 0.2) >= 1


def test_longest_block_is_best_when_drafts_are_free_or_always_right():
    assert sp.best_block(0.5, 0.0, 12) == 12
    assert sp.best_block(1.0, 0.5, 12) == 12
    assert sp.real_best_block(1.0, 0.5) == sp.approximate_best_block(1.0, 0.5) == math.inf
    assert sp.real_best_block(0.0, 0.5) == sp.approximate_best_block(0.0, 0.5) == 0


def test_per_position_form_reduces_to_the_constant_one():
    assert sp.tokens_per_round([0.6] * 5) == pytest.approx(sp.block_efficiency(0.6, 5))
    assert sp.tokens_per_round([]) == 1.0
    assert sp.tokens_per_round([0.0, 1.0]) == 1.0


def test_one_stage_is_plain_speculation_and_the_better_drafter_goes_first():
    assert sp.horizontal_cascade([(0.7, 0.1, 4)]) == pytest.approx(sp.speedup(0.7, 4, 0.1))
    assert sp.horizontal_cascade([]) == 1.0
    good, poor = (0.8, 0.1, 3), (0.4, 0.01, 3)
    assert sp.horizontal_cascade([good, poor]) > sp.horizontal_cascade([poor, good])


def test_vertical_cascade_at_its_limits():
    assert sp.vertical_cascade(0.8, 0.6, 4, 0, 0.1, 0.01) == pytest.approx(1.0)
    assert sp.vertical_cascade_tokens(1.0, 0.6, 4, 3) == pytest.approx(1 + 3 * sp.block_efficiency(0.6, 4))
    assert sp.vertical_cascade_tokens(0.0, 0.6, 4, 3) == 1.0


@pytest.mark.parametrize(
    ("a", "g", "c"), [(1.1, 1, 0), (-0.1, 1, 0), (math.nan, 1, 0), (0.5, -1, 0), (0.5, 1, -0.1), (0.5, 1, math.inf)]
)
def test_values_out_of_range_are_misuse(a, g, c):
    with pytest.raises(ValueError, match="must"):
        sp.speedup(a, g, c)
