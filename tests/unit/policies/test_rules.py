"""Accept rules at numbers checked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies import rules
from policies.rules import RULES, Scalars, accept_prob, get_rule, lossless_accept, register

# One token: p(x) = .2, q(x) = .4 (so A0 = .5); before temperature p(x) = .3, q(x) = .35, max p = .5, max q = .6.
TOKEN = Scalars(*[np.array([v]) for v in (0.2, 0.4, 0.3, 0.35, 0.5, 0.6, 0.25)])


def accept(name: str, theta: Any, rho: Any = 1.0, token: Scalars = TOKEN) -> Any:
    value = accept_prob(get_rule(name), token, theta, rho)
    return float(value[0]) if np.ndim(theta) == 0 else value[:, 0].tolist()


def test_lossless_acceptance_is_the_ratio_up_to_one() -> None:
    p, q = np.array([0.2, 0.4, 0.5, 0.0]), np.array([0.4, 0.4, 0.1, 0.3])
    ones = np.ones(4)
    assert lossless_accept(Scalars(p, q, ones, ones, ones, ones, ones)).tolist() == [0.5, 1.0, 1.0, 0.0]


def test_where_the_draft_has_no_mass_the_target_decides() -> None:
    p, q, ones = np.array([0.2, 0.0]), np.zeros(2), np.ones(2)
    assert lossless_accept(Scalars(p, q, ones, ones, ones, ones, ones)).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("rule", "theta", "expected"), [
    ("lossless", 1.0, 0.5),
    ("threshold", 0.49, 0.5), ("threshold", 0.51, 1.0),  # p/q = .5 >= 1 - theta
    ("forgive", 0.2, 0.6),  # .5 + .2 (1 - .5)
    ("forgive", 1.0, 1.0),
    ("lenience", 0.2, 0.625), ("lenience", 0.5, 1.0),  # .2 / (.8 * .4)
    ("chow", 0.39, 0.5), ("chow", 0.41, 1.0),  # max q = .6 >= 1 - theta
    ("diff", 0.01, 1.0),  # max q = .6 >= max p - theta
    ("opt", 0.01, 1.0),
    ("token_v1", 0.14, 0.5), ("token_v1", 0.16, 1.0),  # q(x) = .35 >= .5 - theta
    ("token_v2", 0.19, 0.5), ("token_v2", 0.21, 1.0),  # p(x) = .3 >= .5 - theta
    ("token_v3", 0.39, 0.5), ("token_v3", 0.41, 1.0),  # p(x) = .3 >= (1 - theta) .5
])  # fmt: skip
def test_each_rule_at_its_jump(rule: str, theta: float, expected: float) -> None:
    assert accept(rule, theta) == pytest.approx(expected)


def test_the_deferral_rules_compare_the_two_models() -> None:
    unsure = TOKEN._replace(draft_max_raw=np.array([0.4]))
    assert accept("diff", 0.09, token=unsure) == 0.5 and accept("diff", 0.11, token=unsure) == 1.0
    # opt allows theta * TV = theta / 4: a gap of .1 needs theta >= .4
    assert accept("opt", 0.39, token=unsure) == 0.5 and accept("opt", 0.41, token=unsure) == 1.0


def test_the_mixing_weight_moves_smoothly_from_lossless_to_the_rule() -> None:
    assert [accept("threshold", 0.6, rho) for rho in (0.0, 0.25, 1.0)] == [0.5, 0.625, 1.0]


def test_knob_zero_is_lossless_even_where_a_rule_would_drift_at_its_own_zero() -> None:
    # the draft is surer than the target, so `diff` accepts at its own zero
    assert all(accept(name, 0.0) == 0.5 for name in RULES)
    assert accept("diff", 1e-9) == 1.0


def test_a_whole_curve_of_knobs_is_one_call() -> None:
    assert accept("threshold", np.array([[0.0], [0.4], [0.6]])) == [0.5, 0.5, 1.0]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_masked_token_is_accepted_by_no_rule(rule: str) -> None:
    masked = TOKEN._replace(target_prob=np.zeros(1), target_prob_raw=np.zeros(1))
    assert accept(rule, 1.0, token=masked) == 0.0


def test_greedy_decoding_asks_how_probable_a_wrong_argmax_was() -> None:
    # one-hot p and q that differ: A0 = 0
    wrong = Scalars(*[np.array([v]) for v in (0.0, 1.0, 0.3, 0.7, 0.5, 0.7, 1.0)])
    assert accept("threshold", 0.99, token=wrong) == 0.0 and accept("threshold", 1.0, token=wrong) == 1.0
    assert accept("forgive", 0.3, token=wrong) == pytest.approx(0.3)
    assert accept("token_v3", 0.39, token=wrong) == 0.0 and accept("token_v3", 0.41, token=wrong) == 1.0


def test_rules_that_read_only_the_draft_say_so() -> None:
    assert {name for name, rule in RULES.items() if rule.draft_confidence} == {"chow", "diff", "opt", "token_v1"}


def test_an_unknown_rule_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="unknown accept rule 'nope'; known: chow, diff"):
        get_rule("nope")


def test_a_rule_is_added_in_one_place_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RULES", dict(RULES))

    @register("coin", "a test")
    def _coin(s: Scalars, theta: Any, a0: Any) -> Any:
        return np.full_like(a0, 0.1)

    assert accept_prob(rules.get_rule("coin"), TOKEN, 1.0)[0] == 0.5  # completed: never below lossless
    with pytest.raises(ValueError, match="already registered"):
        register("coin", "again")(_coin)
