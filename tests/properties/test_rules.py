"""What every registered rule promises, at any token and any knob."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.rules import RULES, Scalars, accept_prob, get_rule, lossless_accept

RULE = pytest.mark.parametrize("name", sorted(RULES))
UNIT = st.floats(0, 1, width=32)
SEED = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=20)  # each example is a batch


def laws(seed: int, n: int = 24, v: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of distributions [n, v] from nearly equal to nearly disjoint; the last token is masked."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, n, v)) * rng.uniform(0.1, 8, size=(1, n, 1))
    logits[1] = logits[0] + (logits[1] - logits[0]) * rng.uniform(0, 1, size=(n, 1))
    logits[..., -1] = -np.inf
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    return probs[0], probs[1]


def scalars(p: np.ndarray, q: np.ndarray) -> Scalars:
    """For every token of every position, proposed at temperature 1: shape [n, v]."""
    shape = np.ones_like(p)
    tv = np.maximum(p - q, 0).sum(-1, keepdims=True)
    return Scalars(p, q, p, q, shape * p.max(-1, keepdims=True), shape * q.max(-1, keepdims=True), shape * tv)


def emitted(p: np.ndarray, q: np.ndarray, a: np.ndarray) -> np.ndarray:
    """The law of the token that comes out: accepted proposals and residual draws."""
    rest = np.maximum(p - q, 0)
    mass = rest.sum(-1, keepdims=True)
    rest = np.where(mass > 0, rest / np.where(mass > 0, mass, 1), p)
    return q * a + (1 - (q * a).sum(-1, keepdims=True)) * rest


@RULE
@FEW
@given(seed=SEED, theta=UNIT, rho=UNIT)
def test_a_rule_is_completed_a_probability_and_never_accepts_a_masked_token(
    name: str, seed: int, theta: float, rho: float
) -> None:
    s = scalars(*laws(seed))
    a, a0 = accept_prob(get_rule(name), s, theta, rho), lossless_accept(s)
    assert np.all(a >= a0) and np.all(a <= 1)
    assert not a[:, -1].any()


@RULE
@FEW
@given(seed=SEED, rho=UNIT)
def test_knob_zero_and_weight_zero_are_lossless_to_the_bit(name: str, seed: int, rho: float) -> None:
    s = scalars(*laws(seed))
    a0 = lossless_accept(s)
    assert np.array_equal(accept_prob(get_rule(name), s, 0.0, rho), a0)
    assert np.array_equal(accept_prob(get_rule(name), s, rho, 0.0), a0)


@RULE
@FEW
@given(seed=SEED, knobs=st.tuples(UNIT, UNIT), weights=st.tuples(UNIT, UNIT))
def test_more_leniency_never_accepts_less(
    name: str, seed: int, knobs: tuple[float, float], weights: tuple[float, float]
) -> None:
    s, rule = scalars(*laws(seed)), get_rule(name)
    (low, high), (light, heavy) = sorted(knobs), sorted(weights)
    assert np.all(accept_prob(rule, s, high, heavy) >= accept_prob(rule, s, low, heavy) - 1e-12)
    assert np.all(accept_prob(rule, s, high, heavy) >= accept_prob(rule, s, high, light) - 1e-12)


@RULE
@FEW
@given(seed=SEED, theta=UNIT, rho=UNIT)
def test_numpy_and_torch_give_the_same_numbers(name: str, seed: int, theta: float, rho: float) -> None:
    s = scalars(*laws(seed))
    mine = accept_prob(get_rule(name), s, theta, rho)
    theirs = accept_prob(get_rule(name), Scalars(*map(torch.from_numpy, s)), theta, rho)
    assert isinstance(theirs, torch.Tensor) and theirs.dtype == torch.float64
    assert np.allclose(mine, theirs.numpy(), rtol=0, atol=1e-15)


@RULE
@FEW
@given(seed=SEED, thetas=st.lists(UNIT, min_size=1, max_size=5))
def test_a_curve_of_knobs_equals_the_knobs_one_by_one(name: str, seed: int, thetas: list[float]) -> None:
    s, rule = scalars(*laws(seed)), get_rule(name)
    curve = accept_prob(rule, s, np.array(thetas)[:, None, None])
    assert np.array_equal(curve, np.stack([accept_prob(rule, s, theta) for theta in thetas]))


@RULE
@FEW
@given(seed=SEED, theta=UNIT, rho=UNIT)
def test_a_unit_of_drift_buys_exactly_a_unit_of_acceptance(name: str, seed: int, theta: float, rho: float) -> None:
    p, q = laws(seed)
    s = scalars(p, q)
    a, a0 = accept_prob(get_rule(name), s, theta, rho), lossless_accept(s)
    gained = (q * (a - a0)).sum(-1)
    drift = np.abs(emitted(p, q, a) - p).sum(-1) / 2
    assert np.allclose(gained, drift, atol=1e-12)


@FEW
@given(seed=SEED, theta=UNIT)
def test_forgive_emits_the_mixture_of_both_models(seed: int, theta: float) -> None:
    p, q = laws(seed)
    law = emitted(p, q, accept_prob(get_rule("forgive"), scalars(p, q), theta))
    assert np.allclose(law, (1 - theta) * p + theta * q, atol=1e-12)


def test_a_form_that_is_not_completed_does_not_have_the_identity() -> None:
    """Negative control: rejecting more than lossless drifts without buying acceptance."""
    p, q = laws(7)
    s = scalars(p, q)
    a = np.where(p >= 0.5 * p.max(-1, keepdims=True), 1.0, 0.5 * lossless_accept(s))
    gained = (q * (a - lossless_accept(s))).sum(-1)
    drift = np.abs(emitted(p, q, a) - p).sum(-1) / 2
    assert not np.allclose(gained, drift, atol=1e-3)
