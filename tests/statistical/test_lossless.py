"""Lossless means lossless: at temperature 1 the law of the target (greedily: `test_greedy_equality`).

Every chi-square test here is run at significance 1e-4 on fixed seeds, and is shown to reject something wrong: a lenient
rule, or a rejection that is replaced by a draw from the target instead of the residual.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from decoder import verify as verification
from decoder.demo.pair import BOS, EOS
from decoder.drafters import ModelDrafter, NgramDrafter
from decoder.generate import Engine, Knobs
from decoder.sampling import SamplingParams, draw, process
from decoder.verify import Block, verify
from policies.rules import RULES, Scalars, accept_prob, get_rule, lossless_accept
from tests.decoding import chi_square_p, engine, pair, run, tiny

SIGNIFICANCE = 1e-4
REJECTED = 1e-12  # what a negative control must fall below


# -- sequences at temperature 1 ----------------------------------------------------------------------------------------

N = 600  # seeds of small models
BUNDLED = 250  # seeds of the bundled pair, whose passes cost ten times as much
# The next two tokens are free wording ("sum equals"), about which the models disagree.
ASKED = "Question: Mia has 5 pens. Mia finds 3 pens. How many pens does Mia have now?\n"
STEP = f"{ASKED}Answer: First Mia gets 3 more pens, so the"
REPEATS = [3, 5, 7, 9, 3, 5, 7, 9, 3, 5, 7]  # what n-grams find


@cache
def small(drafter: str) -> Engine:
    """Two small random models that disagree often, or one with n-grams."""
    return Engine(tiny(), ModelDrafter(tiny(seed=2)) if drafter == "model" else NgramDrafter())


def case(drafter: str) -> tuple[Engine, list[int], int]:
    """Engine, prompt and number of seeds."""
    if drafter == "bundled":
        return engine(), [BOS, *pair().tokenizer(STEP).input_ids], BUNDLED
    return small(drafter), list(range(8)) if drafter == "model" else REPEATS, N


@torch.inference_mode()
def exact_law(drafter: str, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """First-token law [V] and law of token pairs [V, V], from the target's own probabilities.

    Pairs that begin with a token of probability below 1e-6 are left out; all of them together have less than 1e-3.
    """
    made, prompt, _ = case(drafter)
    target = made.target.model
    first, _ = process(target(torch.tensor([prompt])).logits[0, -1], params)
    pairs = torch.zeros(len(first), len(first))
    likely = (first > 1e-6).nonzero()[:, 0]
    for chunk in likely.split(64):
        ids = torch.cat([torch.tensor([prompt]).expand(len(chunk), -1), chunk[:, None]], 1)
        second, _ = process(target(ids).logits[:, -1], params)
        pairs[chunk] = first[chunk, None] * second
    assert float(pairs.sum()) > 0.999
    return first.double().numpy(), pairs.double().numpy()


def sample(drafter: str, knobs: Knobs, more: int = 1, **params: Any) -> tuple[np.ndarray, np.ndarray, float]:
    """Counts of first tokens and of pairs over the seeds, and how many draft tokens a request were rejected.

    ``more``: so many times as many seeds.
    """
    made, prompt, seeds = case(drafter)
    seeds *= more
    size = made.vocab_size
    first, pairs, rejected = np.zeros(size), np.zeros((size, size)), 0
    for seed in range(seeds):
        done = run(made, prompt, knobs, seed=seed, max_tokens=3, **params)
        tokens = [*done.token_ids, EOS][:2]
        first[tokens[0]] += 1
        pairs[tokens[0], tokens[1]] += 1
        rejected += done.examined - done.accepted
    return first, pairs, rejected / seeds


@pytest.mark.parametrize(("drafter", "g", "params"), [
    ("bundled", 2, {}),
    ("model", 1, {}),  # the second token is a bonus
    ("model", 2, {}),  # both are drafted
    ("model", 2, {"temperature": 1.4, "top_k": 30, "top_p": 0.9}),
    ("ngram", 2, {}),
])  # fmt: skip
def test_first_tokens_and_pairs_follow_the_law_of_plain_sampling(drafter: str, g: int, params: dict[str, Any]) -> None:
    law = exact_law(drafter, SamplingParams(**params))
    first, pairs, rejected = sample(drafter, Knobs.lossless(g), **params)
    assert rejected > 0.05  # so residual draws were tested
    assert chi_square_p(first, law[0]) > SIGNIFICANCE
    assert chi_square_p(pairs, law[1]) > SIGNIFICANCE


@pytest.mark.parametrize("drafter", ["bundled", "model"])
def test_the_same_test_rejects_a_lenient_rule(drafter: str) -> None:
    """Negative control."""
    law = exact_law(drafter, SamplingParams())
    first, pairs, _ = sample(drafter, Knobs(g=2, rule="forgive", theta=0.7))
    assert min(chi_square_p(first, law[0]), chi_square_p(pairs, law[1])) < REJECTED


def test_the_same_test_rejects_a_wrong_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: replacing a rejected token by a draw from the target is a common mistake."""
    monkeypatch.setattr(verification, "residual", lambda p, q: p)
    law = exact_law("model", SamplingParams())
    first, pairs, _ = sample("model", Knobs.lossless(2), more=2)
    assert min(chi_square_p(first, law[0]), chi_square_p(pairs, law[1])) < REJECTED


# -- the law of one position, for every rule and knob ------------------------------------------------------------------

DRAWS = 50_000
P_SMALL, Q_SMALL = torch.tensor([0.6, 0.4]), torch.tensor([0.8, 0.2])
KNOBS = ((0.2, 1.0), (0.6, 1.0), (0.6, 0.4), (1.0, 1.0))


def emit(p: torch.Tensor, q: torch.Tensor, seed: int, name: str = "lossless", theta: float = 0.0, rho: float = 1.0,
         tokens: torch.Tensor | None = None) -> np.ndarray:  # fmt: skip
    """How often each token comes out first of ``DRAWS`` rounds that drafted one token from q (or the given ones)."""
    rng = torch.Generator().manual_seed(seed)
    u = torch.rand(4, DRAWS, 1, generator=rng, dtype=torch.float64)
    if tokens is None:
        tokens = draw(q.expand(DRAWS, -1), u[0, :, 0])
    target, draft = p.expand(DRAWS, 2, len(p)), q.expand(DRAWS, 1, len(q))
    block = Block(tokens[:, None], target, target, draft, draft)
    out = verify(block, get_rule(name), theta, rho, 1 - u[1], u[2:, :, 0].T).lenient
    return torch.bincount(torch.where(out.accepted > 0, tokens, out.token), minlength=len(p)).numpy()


def exact_emitted(p: torch.Tensor, q: torch.Tensor, name: str, theta: float, rho: float) -> np.ndarray:
    """``q A + (1 - E_q[A]) (p - q)+ / TV`` in double precision."""
    a = accept_all(p, q, name, theta, rho)
    p64, q64 = p.double().numpy(), q.double().numpy()
    rest = np.maximum(p64 - q64, 0)
    law: np.ndarray = q64 * a + (1 - (q64 * a).sum()) * rest / rest.sum()
    return law


def accept_all(p: torch.Tensor, q: torch.Tensor, name: str, theta: float, rho: float) -> np.ndarray:
    """The acceptance probability of every token, [V]."""
    p64, q64 = p.double().numpy(), q.double().numpy()
    ones = np.ones_like(p64)
    s = Scalars(p64, q64, p64, q64, ones * p64.max(), ones * q64.max(), ones * np.maximum(p64 - q64, 0).sum())
    a: np.ndarray = accept_prob(get_rule(name), s, theta, rho)
    assert np.all(a >= lossless_accept(s))
    return a


def laws(v: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(v, generator=rng).softmax(-1), torch.randn(v, generator=rng).softmax(-1)


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_emits_exactly_its_law_at_every_knob(name: str) -> None:
    """Chance to fail: 8 tests a rule at 1e-4."""
    for (seed, v), (theta, rho) in itertools.product(((1, 3), (2, 8)), KNOBS):
        p, q = laws(v, seed)
        counts = emit(p, q, 17 + seed, name, theta, rho)
        assert chi_square_p(counts, exact_emitted(p, q, name, theta, rho)) > SIGNIFICANCE, (v, theta, rho)


def test_a_neighbouring_knob_is_told_apart() -> None:
    """Negative control of the test above."""
    p, q = laws(8, 2)
    counts = emit(p, q, 19, "forgive", 0.6)
    assert chi_square_p(counts, exact_emitted(p, q, "forgive", 0.5, 1.0)) < REJECTED


@pytest.mark.parametrize("drafter", ["sampled", "greedy", "top-k", "top-p"])
def test_two_tokens_come_out_as_the_target_has_them_whatever_the_drafter_does(drafter: str) -> None:
    q = {"sampled": Q_SMALL, "greedy": torch.tensor([1.0, 0.0])}.get(drafter)
    if q is None:
        params = SamplingParams(top_k=1) if drafter == "top-k" else SamplingParams(top_p=0.7)
        q, _ = process(Q_SMALL.log(), params)
    assert chi_square_p(emit(P_SMALL, q, 5), P_SMALL.numpy()) > SIGNIFICANCE


def test_a_deterministic_drafter_that_is_not_declared_one_hot_is_not_lossless() -> None:
    """Negative control: proposing the argmax while claiming to sample from q."""
    always_zero = torch.zeros(DRAWS, dtype=torch.long)
    assert chi_square_p(emit(P_SMALL, Q_SMALL, 5, tokens=always_zero), P_SMALL.numpy()) < REJECTED
