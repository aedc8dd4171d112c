"""Bounds on a running mean: the equation they solve, what they forget, and which sequence a window reads."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from controller.bounds import LAMBDAS, WEIGHTS, EmpiricalBernstein, Sequence, Staggered, mixture_radius, radius_of

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "bounds.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: f"n{len(c['z'])}-{c['significance']}")
def test_bounds_agree_with_an_independent_evaluation(case: dict[str, object]) -> None:
    """`tests/golden/make_bounds.py` solved the defining equation in 50 digits."""
    bound = EmpiricalBernstein()
    for z in case["z"]:  # type: ignore[attr-defined]
        bound.update(z)
    significance = float(case["significance"])  # type: ignore[arg-type]
    assert bound.upper(significance) == pytest.approx(case["upper"], abs=1e-9)
    assert bound.lower(significance) == pytest.approx(case["lower"], abs=1e-9)


@pytest.mark.parametrize("case", GOLDEN["radii"], ids=lambda c: f"V{c['variance']:g}-c{c['scale']:g}-{c['aim']}")
def test_scaled_and_tuned_radii_agree_with_an_independent_evaluation(case: dict[str, float]) -> None:
    """The same, where the largest difference is another one than 1, and where the mixture is tuned to one l."""
    found = mixture_radius(case["variance"], case["significance"], case["scale"], case["aim"])
    assert found == pytest.approx(case["radius"], rel=1e-9)


def test_a_tuned_mixture_is_tighter_where_it_is_aimed_and_no_disaster_elsewhere() -> None:
    """At the variance that l = .22 suits it saves a sixth of the radius; far away it costs less than two fifths."""
    assert mixture_radius(130.0, 0.05, 1.0, 0.22) < 0.85 * mixture_radius(130.0, 0.05)
    for variance in (0.0, 1.0, 1000.0, 1e5):
        assert mixture_radius(variance, 0.05, 1.0, 0.22) < 1.4 * mixture_radius(variance, 0.05)


def test_a_few_observations_of_a_large_scale_do_not_widen_the_rest() -> None:
    """Equal scales are one scale; and 3 of 130 squares at scale 3 cost far less than all of them there."""
    assert radius_of(((60.0, 2.0), (70.0, 2.0)), 0.05, 0.1) == pytest.approx(mixture_radius(130.0, 0.05, 2.0, 0.1))
    mixed = radius_of(((127.0, 1.0), (3.0, 3.0)), 0.05, 0.22)
    assert mixture_radius(130.0, 0.05, 1.0, 0.22) < mixed < 0.9 * mixture_radius(130.0, 0.05, 3.0, 0.22)


def test_the_lower_bound_follows_a_large_loss() -> None:
    """95 of 100 lost: the process with positive guesses proves more than .7, the clipped one alone .6."""
    bound = EmpiricalBernstein()
    for i in range(100):
        bound.update(float(i % 20 > 0))
    clipped = bound.mean - mixture_radius(bound.variance_lower, 0.05) / 100
    assert clipped < 0.62 and bound.lower(0.05) > 0.7


@pytest.mark.parametrize("variance", [0.0, 0.3, 12.0, 4e3, 1e6])
def test_the_radius_solves_its_equation(variance: float) -> None:
    """The mixture of exponentials equals 1/significance there."""
    s = mixture_radius(variance, 0.01)
    psi = -np.log1p(-LAMBDAS) - LAMBDAS
    assert math.fsum(WEIGHTS * np.exp(LAMBDAS * s - psi * variance)) == pytest.approx(100.0, rel=1e-6)


def test_the_weights_are_a_distribution_over_the_open_unit_interval() -> None:
    """Otherwise the mixture would not be a supermartingale that starts at 1."""
    assert WEIGHTS.sum() == pytest.approx(1.0, abs=1e-12)
    assert LAMBDAS.min() > 0 and LAMBDAS.max() < 1


def test_nothing_is_known_before_the_first_observation() -> None:
    """Upper 1, lower -1, and per touch too."""
    assert (EmpiricalBernstein().upper(0.05), EmpiricalBernstein().lower(0.05)) == (1.0, -1.0)
    assert (Sequence(0.0).upper_per_touch(0.05), Sequence(0.0).lower_per_touch(0.05)) == (1.0, -1.0)


@pytest.mark.parametrize("z", [1.2, -1.0001, math.nan, math.inf])
def test_impossible_observations_are_refused(z: float) -> None:
    """Nothing outside [-1, 1] may enter a bound that relies on it."""
    with pytest.raises(ValueError, match="observation"):
        EmpiricalBernstein().update(z)
    with pytest.raises(ValueError, match="difference"):
        Staggered(10.0, 2, 0.0).update(z, 1, 0.0)


def test_a_guess_uses_only_the_past() -> None:
    """The first observation of 1 is a surprise of 1; a guess that peeked would make it smaller."""
    bound = EmpiricalBernstein()
    bound.update(1.0)
    assert bound.variance_upper == 1.0
    bound.update(1.0)
    assert bound.variance_upper == pytest.approx(1.25)


def test_loss_per_touch_is_a_ratio_of_sums() -> None:
    """Ten forks of five touches: the bound per touch is a fifth of the bound per fork."""
    sequence = Sequence(0.0)
    for i in range(200):
        sequence.update(float(i % 20 == 0), 5)
    assert sequence.upper_per_touch(0.05) == pytest.approx(sequence.bound.upper(0.05) / 5)
    assert sequence.mean_per_touch == pytest.approx(0.01)
    with pytest.raises(ValueError, match="touch"):
        sequence.update(0.0, 0)


def test_a_window_reads_the_youngest_sequence_that_spans_it() -> None:
    """Before a full window the oldest; later the one that began at the window's start; never more than k + 1 live."""
    staggered = Staggered(100.0, 10, 3.0)
    for now in range(3, 400):
        staggered.advance(float(now))
        assert len(staggered.sequences) <= 11
        planning = staggered.planning(float(now))
        if now < 110:
            assert planning.began == 3.0
        else:
            assert now - 110 < planning.began <= now - 100
        recent = staggered.recent(float(now))
        if recent is not None:
            assert 10 <= now - recent.began < 20


def test_a_long_gap_leaves_empty_sequences() -> None:
    """Evidence from before the window is gone, not kept as if it were fresh."""
    staggered = Staggered(100.0, 10, 0.0)
    for _ in range(50):
        staggered.update(0.0, 1, 5.0)
    assert staggered.planning(50.0).n == 50
    staggered.advance(1e6)
    assert staggered.planning(1e6).n == 0
    assert len(staggered.sequences) <= 11


def test_a_fork_touched_before_a_sequence_began_is_not_in_it() -> None:
    """Late labels go where their touch belongs."""
    staggered = Staggered(100.0, 10, 0.0)
    staggered.advance(35.0)
    staggered.update(1.0, 1, 19.0)
    assert [s.n for s in staggered.sequences] == [1, 1, 0, 0]


def test_state_continues_exactly() -> None:
    """Saved as JSON in the middle, the sequences end in the same numbers."""
    rng = np.random.default_rng(5)
    straight, saved = Staggered(50.0, 5, 0.0), Staggered(50.0, 5, 0.0)
    for i in range(300):
        z, touches = float(rng.integers(-1, 2)), int(rng.integers(1, 9))
        for staggered in (straight, saved):
            staggered.advance(i / 2)
            staggered.update(z, touches, i / 2)
        if i == 140:
            saved = Staggered.from_state(json.loads(json.dumps(saved.to_state())))
    assert saved.to_state() == straight.to_state()
    assert saved.planning(150.0).upper_per_touch(0.05) == straight.planning(150.0).upper_per_touch(0.05)
