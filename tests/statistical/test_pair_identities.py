"""DESIGN's identities and the coupling bound, on the real distributions of the bundled pair."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from decoder.demo.pair import EOS, Pair, load_pair, prompt_ids
from decoder.demo.problems import make_problem
from decoder.demo.simulation import (
    FULL,
    Run,
    Setting,
    decode,
    distributions,
    fresh_problems,
    position_scalars,
)
from policies.rules import RULES, Scalars, accept_prob, lossless_accept

TEMPERATURES = (1.0, 0.6, 0.0)
KNOBS = (0.05, 0.3, 0.8, 1.0)
WEIGHTS = (0.35, 1.0)
EXACT = 1e-10  # the arithmetic is double; rows sum to one to about 1e-15


@pytest.fixture(scope="module")
def pair() -> Pair:
    torch.set_num_threads(1)
    return load_pair()


@pytest.fixture(scope="module")
def logits(pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft logits, (positions, vocabulary), along a few reference solutions of both domains."""
    rng = random.Random(20)
    rows: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for domain in ("easy", "easy", "easy", "hard"):
        problem = make_problem(rng, domain)
        asked = prompt_ids(pair.tokenizer, problem.prompt)
        ids = torch.tensor([[*asked, *pair.tokenizer(problem.solution).input_ids, EOS]])
        for out, model in zip(rows, pair[:2], strict=True):
            with torch.inference_mode():
                out.append(model(ids).logits[0, len(asked) - 1 : -1].double())
    return torch.cat(rows[0]), torch.cat(rows[1])


def scalars_at(logits: tuple[torch.Tensor, torch.Tensor], temperature: float) -> Scalars:
    """Every token of the vocabulary at every position, in double precision."""

    def dist(x: torch.Tensor, t: float) -> torch.Tensor:
        return (x / t).softmax(-1) if t > 0 else distributions(x, 0.0).double()

    (p, q), (p_raw, q_raw) = ([dist(x, t) for x in logits] for t in (temperature, 1.0))
    return position_scalars(p, q, p_raw, q_raw)


def emitted(s: Scalars, accept: torch.Tensor) -> torch.Tensor:
    """The law of the emitted token: accepted proposals, and the residual for the rejected rest."""
    p, q = s.target_prob, s.draft_prob
    residual = (p - q).clamp_min(0)
    residual = torch.where(s.tv > 0, residual / torch.where(s.tv > 0, s.tv, 1.0), p)
    accepted = q * accept
    return accepted + (1 - accepted.sum(-1, keepdim=True)) * residual


def tv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).abs().sum(-1) / 2


def gap_of_the_first_identity(s: Scalars, accept: torch.Tensor) -> torch.Tensor:
    """``E_q[A] - E_q[A0] - TV(emitted, p)`` per position; zero for completed rules."""
    gained = (s.draft_prob * (accept - lossless_accept(s))).sum(-1)
    return gained - tv(emitted(s, accept), s.target_prob)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_lossless_emits_the_target_distribution(logits: Any, temperature: float) -> None:
    s = scalars_at(logits, temperature)
    assert tv(emitted(s, lossless_accept(s)), s.target_prob).max() < EXACT


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", sorted(RULES))
def test_drift_buys_exactly_as_much_acceptance(logits: Any, name: str, temperature: float) -> None:
    """First identity, for every completed rule at every knob and mixing weight, at every position."""
    s = scalars_at(logits, temperature)
    for theta in KNOBS:
        for rho in WEIGHTS:
            gap = gap_of_the_first_identity(s, accept_prob(RULES[name], s, theta, rho))
            assert gap.abs().max() < EXACT, (theta, rho)


def test_the_knobs_tested_do_drift(logits: Any) -> None:
    """The identity would be empty if nothing drifted: at its end every rule but lossless drifts on average by > .1."""
    s = scalars_at(logits, 1.0)
    for name, rule in RULES.items():
        drift = tv(emitted(s, accept_prob(rule, s, 1.0)), s.target_prob).mean()
        assert (drift == pytest.approx(0, abs=EXACT)) if name == "lossless" else (drift > 0.1), name


def test_a_rule_that_is_not_completed_breaks_the_first_identity(logits: Any) -> None:
    """Negative control: the papers' token rule, which rejects more than lossless where a token is not ok."""
    s = scalars_at(logits, 1.0)
    deterministic = (s.target_prob_raw >= 0.2 * s.target_max_raw).double()
    assert gap_of_the_first_identity(s, deterministic).abs().max() > 0.05


def test_no_rule_buys_more_acceptance_than_its_drift(logits: Any) -> None:
    """Random acceptance tables, completed or not: the gap is never positive."""
    s = scalars_at(logits, 1.0)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        accept = torch.rand(s.draft_prob.shape, generator=generator, dtype=torch.float64)
        for table in (accept, torch.maximum(accept, lossless_accept(s))):
            assert gap_of_the_first_identity(s, table).max() < EXACT


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_forgive_emits_exactly_the_mixture(logits: Any, temperature: float) -> None:
    """Second identity: the law is (1 - lambda) p + lambda q, its drift lambda TV(p, q); mixing multiplies lambda."""
    s = scalars_at(logits, temperature)
    for theta in KNOBS:
        for rho in WEIGHTS:
            law = emitted(s, accept_prob(RULES["forgive"], s, theta, rho))
            share = theta * rho
            assert tv(law, (1 - share) * s.target_prob + share * s.draft_prob).max() < EXACT
            assert (tv(law, s.target_prob) - share * s.tv[:, 0]).abs().max() < EXACT


def test_another_rule_does_not_emit_the_mixture(logits: Any) -> None:
    """Negative control of the second identity: threshold, and forgive at another lambda."""
    s = scalars_at(logits, 1.0)
    mixture = 0.7 * s.target_prob + 0.3 * s.draft_prob
    for name, theta in (("threshold", 0.3), ("forgive", 0.25)):
        assert tv(emitted(s, accept_prob(RULES[name], s, theta)), mixture).max() > 0.01


# --- the coupling ---

PROBLEMS = 60
SETTINGS = [
    Setting("token_v3", 0.7),
    Setting("token_v3", 0.9),
    Setting("threshold", 0.5),
    Setting("forgive", 0.05),
    Setting("forgive", 0.4, 0.1),
    FULL,
]


@pytest.fixture(scope="module")
def problems() -> list[Any]:
    return fresh_problems(2024, PROBLEMS, "easy")


@pytest.fixture(scope="module")
def lossless(pair: Pair, problems: list[Any]) -> Run:
    return decode(pair, problems)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.rule}-{s.theta:g}-{s.rho:g}")
def test_loss_is_at_most_the_share_of_touched_requests(
    pair: Pair, problems: list[Any], lossless: Run, setting: Setting
) -> None:
    """Untouched requests equal the lossless text, so loss <= P(touched) <= min(1, tau), for either scorer.

    Touches are a sum of coins whose conditional chances the run adds up, so their difference is a martingale with
    variance at most the sum of the chances: 5 standard deviations are a false alarm of about 1e-6 (Bernstein, with
    the 5 in the limit for its range).
    """
    run = decode(pair, problems, setting)
    for mine, plain, touched in zip(run.texts, lossless.texts, run.touched, strict=True):
        assert touched or mine == plain
    share, tau = run.touched.mean(), run.touches.mean()
    for score, base in ((run.exact, lossless.exact), (run.strict, lossless.strict)):
        assert (base - score).mean() <= share <= min(1.0, tau)
    assert run.touches.sum() > 0
    assert abs(run.touches.sum() - run.drift.sum()) < 5 * np.sqrt(run.drift.sum()) + 5


def test_without_the_coupling_untouched_requests_differ(pair: Pair, problems: list[Any], lossless: Run) -> None:
    """Negative control: other random numbers, and the texts of untouched requests are not the lossless ones."""
    run = decode(pair, problems, Setting("forgive", 0.05), seed=6)
    untouched = ~run.touched
    assert untouched.sum() > PROBLEMS / 3
    different = [a != b for a, b, keep in zip(run.texts, lossless.texts, untouched, strict=True) if keep]
    assert np.mean(different) > 0.9


def test_requests_held_back_at_the_first_touch_end_with_the_lossless_text(
    pair: Pair, problems: list[Any], lossless: Run
) -> None:
    """Triggered holdback: who is touched does not depend on it, and the held share is that of the coin (4.5 sigma)."""
    setting = Setting("token_v3", 0.9)
    lenient, half = (decode(pair, problems, setting, holdback=h) for h in (0.0, 0.5))
    assert (half.touched == lenient.touched).all()
    assert (half.touches[half.held] == 1).all()
    for i, held in enumerate(half.held):
        assert half.texts[i] == (lossless.texts[i] if held else lenient.texts[i])
    n = int(half.touched.sum())
    assert abs(half.held.sum() - n / 2) < 4.5 * np.sqrt(n) / 2
