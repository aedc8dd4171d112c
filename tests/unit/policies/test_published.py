"""Published forms: numbers checked by hand, exact laws, and how they stand to the completed rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from policies.published import (
    PUBLISHED,
    Laws,
    Outcome,
    all_forms,
    drift,
    emitted,
    examine,
    get_form,
    lossy,
    matching_beta,
    register_published,
    trusting,
)
from policies.rules import RULES, get_rule

FORMS = pytest.mark.parametrize("name", sorted(PUBLISHED))
KNOBS = (0.0, 0.05, 0.3, 0.6, 0.9, 1.0)
TOKEN_FORMS = ("token_v1_paper", "token_v2_paper", "token_v3_paper")

# p = (.5, .3, .2), q = (.2, .7, .1): A0 = (1, 3/7, 1), TV = .4, all residual on tokens 0 (.3) and 2 (.1).
P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
HAND = Laws(P, Q, P, Q)


def random_laws(seed: int = 3, n: int = 200, v: int = 12) -> Laws:
    """From nearly equal to nearly disjoint pairs, a temperature of 0.7, the last token masked in both models."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, n, v)) * rng.uniform(0.1, 6, size=(1, n, 1))
    logits[1] = logits[0] + (logits[1] - logits[0]) * rng.uniform(0, 1, size=(n, 1))
    logits[..., -1] = -np.inf
    return Laws(*(softmax(x / t) for t in (0.7, 1.0) for x in logits))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    out: np.ndarray = e / e.sum(-1, keepdims=True)
    return out


def gain(outcome: Outcome, laws: Laws) -> Any:
    """Acceptance bought over lossless verification."""
    plain = examine(get_rule("lossless"), laws, 0.0)
    return (laws.draft_probs * (outcome.accept - plain.accept)).sum(-1)


@pytest.fixture
def toy() -> Iterator[str]:
    """A form that accepts by a fair coin whatever comes, registered for one test."""

    @register_published("coin_paper", "a test", completion="forgive", knobs=(0.5,))
    def _coin(laws: Laws, theta: float) -> Outcome:
        return Outcome(laws.target_probs * 0 + theta, laws.target_probs)

    yield "coin_paper"
    del PUBLISHED["coin_paper"]


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_trusted_token_keeps_the_draft_s_mass_and_the_rest_goes_to_the_target() -> None:
    # token 1 is not ok, so R = .7: pi = (.2 + .35, .21, .1 + .14)
    outcome = trusting(np.array([True, False, True]), HAND)
    assert outcome.accept == pytest.approx([1, 0.3, 1])
    assert outcome.residual == pytest.approx([0.35, 0, 0.14])
    assert emitted(outcome, Q) == pytest.approx([0.55, 0.21, 0.24])
    # lossless keeps token 1 with 3/7: less is accepted, by q (3/7 - .3) = .09, and yet there is drift .09
    assert gain(outcome, HAND) == pytest.approx(-0.09) and drift(outcome, HAND) == pytest.approx(0.09)


def test_lossy_sampling_bounds_the_ratio_to_the_target_on_both_sides() -> None:
    # alpha = .2: token 1 keeps .3 / .8 = .375, so .325 is rejected; s = 1/beta solves (.5s - .2) + (.2s - .1) = .325
    scale = 0.625 / 0.7
    assert matching_beta(HAND, 0.2) == pytest.approx(1 / scale)
    law = emitted(examine(get_form("lossy_paper"), HAND, 0.2), Q)
    assert law == pytest.approx([0.5 * scale, 0.375, 0.2 * scale])


def test_leniency_by_a_factor_multiplies_q_wherever_it_stands() -> None:
    # l = .5: token 1 keeps .6; residual (p - q/2)+ = (.4, 0, .15), of which .1 is handed out
    law = emitted(examine(get_form("lenience_paper"), HAND, 0.5), Q)
    assert law == pytest.approx([0.2 + 0.1 * 0.4 / 0.55, 0.6, 0.1 + 0.1 * 0.15 / 0.55])


@pytest.mark.parametrize(("name", "theta", "trusted"), [
    ("chow_paper", 0.29, [0, 0, 0]), ("chow_paper", 0.31, [1, 1, 1]),  # max q = .7 >= 1 - theta
    ("diff_paper", 0.0, [1, 1, 1]),  # max q = .7 >= max p = .5: not lossless at its own zero
    ("token_v1_paper", 0.01, [0, 1, 0]), ("token_v1_paper", 0.31, [1, 1, 0]),  # q(x) >= .5 - theta
    ("token_v2_paper", 0.0, [1, 0, 0]), ("token_v2_paper", 0.21, [1, 1, 0]),  # p(x) >= .5 - theta
    ("token_v3_paper", 0.39, [1, 0, 0]), ("token_v3_paper", 0.41, [1, 1, 0]),  # p(x) >= .5 (1 - theta)
])  # fmt: skip
def test_each_cascade_trusts_the_tokens_that_its_formula_names(name: str, theta: float, trusted: list[int]) -> None:
    ok = np.array(trusted, dtype=bool)
    pi = Q * ok + (Q * ~ok).sum() * P
    assert emitted(examine(get_form(name), HAND, theta), Q) == pytest.approx(pi)


# -- laws --------------------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("theta", KNOBS)
def test_what_comes_out_is_a_law_that_never_has_a_masked_token(name: str, theta: float) -> None:
    laws = random_laws()
    outcome = examine(get_form(name), laws, theta)
    law = emitted(outcome, laws.draft_probs)
    assert np.allclose(law.sum(-1), 1, atol=1e-12) and (law >= 0).all()
    assert ((outcome.accept >= 0) & (outcome.accept <= 1)).all()
    assert not law[:, -1].any() and not outcome.accept[:, -1].any()


@FORMS
def test_a_token_that_only_the_target_masks_is_not_accepted_either(name: str) -> None:
    p = np.array([0.7, 0.3, 0.0])
    laws = Laws(p, Q, p, Q)
    for theta in KNOBS:
        outcome = examine(get_form(name), laws, theta)
        assert outcome.accept[2] == 0 and emitted(outcome, Q)[2] == 0


@FORMS
def test_numpy_and_torch_give_the_same_numbers(name: str) -> None:
    laws = random_laws()
    for theta in KNOBS:
        mine = examine(get_form(name), laws, theta)
        theirs = examine(get_form(name), Laws(*map(torch.from_numpy, laws)), theta)
        law = emitted(theirs, torch.from_numpy(laws.draft_probs))
        assert isinstance(law, torch.Tensor) and law.dtype == torch.float64
        assert np.allclose(emitted(mine, laws.draft_probs), law.numpy(), rtol=0, atol=1e-14)
        assert np.allclose(mine.accept, theirs.accept.numpy(), rtol=0, atol=1e-14)


@FORMS
def test_a_published_form_buys_at_most_a_unit_of_acceptance_for_a_unit_of_drift(name: str) -> None:
    laws = random_laws()
    for theta in KNOBS:
        outcome = examine(get_form(name), laws, theta)
        assert (gain(outcome, laws) <= drift(outcome, laws) + 1e-12).all()


@pytest.mark.parametrize("name", TOKEN_FORMS)
def test_token_forms_pay_for_more_than_they_get_and_drift_at_their_own_zero(name: str) -> None:
    laws = random_laws()
    at_zero, lenient = (examine(get_form(name), laws, theta) for theta in (0.0, 0.3))
    assert drift(at_zero, laws).mean() > 0.01
    assert gain(lenient, laws).mean() < drift(lenient, laws).mean() - 0.005
    lossless = examine(get_rule("lossless"), laws, 0.0)
    assert (lenient.accept < lossless.accept - 0.01).any()  # not completed: it rejects what lossless accepts


@pytest.mark.parametrize("name", [name for name, form in PUBLISHED.items() if form.same])
def test_rules_that_do_not_look_at_the_token_are_their_own_completion_above_knob_zero(name: str) -> None:
    laws = random_laws()
    for theta in KNOBS[1:]:
        mine, completed = (examine(get_form(n), laws, theta) for n in (name, PUBLISHED[name].completion))
        a, b = emitted(mine, laws.draft_probs), emitted(completed, laws.draft_probs)
        assert np.allclose(a, b, atol=1e-12)
        assert np.allclose(mine.accept * (laws.draft_probs > 0), completed.accept * (laws.draft_probs > 0), atol=1e-12)


def test_forms_that_are_not_marked_the_same_differ_from_their_completion() -> None:
    """Negative control of the test above."""
    laws = random_laws()
    for name, form in PUBLISHED.items():
        if not form.same:
            a, b = (emitted(examine(get_form(n), laws, 0.3), laws.draft_probs) for n in (name, form.completion))
            assert np.abs(a - b).max() > 1e-3, name


# -- lossy sampling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.9])
def test_the_matching_beta_leaves_nothing_to_normalise(alpha: float) -> None:
    laws = random_laws()
    p, q = laws.target_probs, laws.draft_probs
    beta = matching_beta(laws, alpha)
    low, high = p / beta, p / (1 - alpha)
    law = emitted(lossy(laws, alpha, beta), q)
    assert (beta >= 1 - 1e-12).all()
    assert np.allclose(law, np.maximum(np.minimum(q, high), low), atol=1e-12)
    for row in range(0, len(p), 20):  # the same number from a general root finder
        rejected = 1 - np.minimum(q[row], high[row]).sum()
        if rejected > 1e-9:
            scale = brentq(
                lambda s, i=row, r=rejected: np.maximum(s * p[i] - q[i], 0).sum() - r, 0, 1 + 1e-9, xtol=1e-14
            )
            assert beta[row, 0] == pytest.approx(1 / scale, rel=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.7])
def test_lossy_sampling_contains_lossless_the_completed_rule_and_a5(alpha: float) -> None:
    laws = random_laws()
    for outcome, twin in (
        (lossy(laws, 0.0, 1.0), examine(get_rule("lossless"), laws, 0.0)),
        (lossy(laws, alpha, 1.0), examine(get_rule("lenience"), laws, alpha)),
        (lossy(laws, alpha, 1 - alpha), examine(get_form("lenience_paper"), laws, alpha)),
    ):
        a, b = (emitted(o, laws.draft_probs) for o in (outcome, twin))
        assert np.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("name", ["lenience_paper", "lossy_paper"])
def test_no_token_comes_out_more_often_than_its_factor_allows(name: str) -> None:
    """Leviathan et al. A.5: at most p/l."""
    laws = random_laws()
    for theta in (0.1, 0.5, 0.9):
        law = emitted(examine(get_form(name), laws, theta), laws.draft_probs)
        assert (law <= laws.target_probs / (1 - theta) + 1e-12).all()


def test_lossy_sampling_stays_defined_where_nothing_is_rejected() -> None:
    disjoint = np.array([0.0, 0.5, 0.5]), np.array([0.5, 0.0, 0.5])
    assert matching_beta(Laws(P, P, P, P), 0.3) >= 1
    for p, q in ((P, P), disjoint):
        laws = Laws(p, q, p, q)
        for theta in KNOBS:
            law = emitted(examine(get_form("lossy_paper"), laws, theta), q)
            assert np.isfinite(law).all() and law.sum() == pytest.approx(1)


# -- the registry ------------------------------------------------------------------------------------------------------


def test_every_published_form_names_the_rule_that_completes_it() -> None:
    assert {form.completion for form in PUBLISHED.values()} <= set(RULES)
    assert not any(form.completed for form in PUBLISHED.values()) and all(rule.completed for rule in RULES.values())
    assert {name for name, form in PUBLISHED.items() if form.draft_confidence} == {
        f"{name}_paper" for name, rule in RULES.items() if rule.draft_confidence
    }


def test_a_form_is_added_in_one_place(toy: str) -> None:
    assert get_form(toy).knobs == (0.5,) and toy in all_forms()
    law = emitted(examine(get_form(toy), HAND, 0.25), Q)
    assert law == pytest.approx(0.25 * Q + 0.75 * P)
    for taken in (toy, "forgive"):
        with pytest.raises(ValueError, match="already registered"):
            register_published(taken, "again", completion="forgive")(lambda laws, theta: None)


def test_misuse_is_refused_with_what_there_is(toy: str) -> None:
    with pytest.raises(ValueError, match="unknown rule 'nope'; known: chow, chow_paper"):
        get_form("nope")
    with pytest.raises(ValueError, match="unknown accept rule 'nope'"):
        register_published("nope_paper", "a test", completion="nope")(lambda laws, theta: None)
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        examine(get_form(toy), HAND, 1.5)
    with pytest.raises(ValueError, match="no mixing weight"):
        examine(get_form(toy), HAND, 0.5, 0.5)
