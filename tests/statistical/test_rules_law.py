"""What comes out of verification has exactly the law that the rule says, for every rule, knob and published form.

Empirical frequencies of seeded draws are compared with the exact law by chi-square. Each comparison is made at
significance 1e-6; there are about 400 of them, so the whole file fails by chance with probability below 1e-3 (and,
being seeded, either always or never). Negative controls show that the same comparison finds a wrong knob, a wrong
residual and a form taken for its completion.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decoder import verify as verification
from decoder.sampling import SamplingParams, draw, process
from decoder.verify import Block, Verdict, verify
from decoder.verify_published import verify_published
from policies.published import PUBLISHED, Laws, drift, emitted, examine, get_form
from policies.rules import RULES, get_rule
from tests.decoding import chi_square_p

SIGNIFICANCE = 1e-6
REJECTED = 1e-15  # what a negative control must fall below
DRAWS = 12_000
SIZES = (3, 30)
THETAS = (0.05, 0.4, 0.8, 1.0)
RHOS = (0.3, 1.0)
Law = tuple[Tensor, Tensor, Tensor, Tensor]  # p and q as sampled from, p and q before temperature


def pair_of_laws(v: int, temperature: float = 0.8, seed: int = 1) -> Law:
    """Two related distributions of v tokens, double precision; the last token is masked in both."""
    rng = torch.Generator().manual_seed(seed * 1000 + v)
    logits = torch.randn(v, generator=rng, dtype=torch.float64) * 1.5
    other = logits + torch.randn(v, generator=rng, dtype=torch.float64) * 1.2
    logits[-1] = other[-1] = -torch.inf
    p, q = ((x / temperature).softmax(-1) for x in (logits, other))
    return p, q, logits.softmax(-1), other.softmax(-1)


def first_tokens(
    law: Law, examine_block: Callable[[Block, Tensor, Tensor], Verdict], seed: int, n: int = DRAWS, width: int = 1
) -> Verdict:
    """``n`` rounds of ``width`` tokens drafted from q, the same distributions at every position."""
    p, q, p_raw, q_raw = law
    rng = torch.Generator().manual_seed(seed)
    u = torch.rand(2, n, width, generator=rng, dtype=torch.float64)
    tokens = draw(q.expand(n, width, -1), u[0])
    wide = [a.expand(n, width + extra, -1) for a, extra in ((p, 1), (p_raw, 1), (q, 0), (q_raw, 0))]
    return examine_block(Block(tokens, *wide), 1 - u[1], torch.rand(n, width + 1, generator=rng, dtype=torch.float64))


def counts(law: Law, examine_block: Callable[[Block, Tensor, Tensor], Verdict], seed: int) -> np.ndarray:
    """How often each token comes out first, by the lenient branch."""
    seen: list[Tensor] = []

    def spy(block: Block, accept: Tensor, residual: Tensor) -> Verdict:
        verdict = examine_block(block, accept, residual)
        out = verdict.lenient
        seen.append(torch.where(out.accepted > 0, block.tokens[:, 0], out.token))
        return verdict

    first_tokens(law, spy, seed)
    return torch.bincount(seen[0], minlength=len(law[0])).numpy()


def under_rule(name: str, theta: float, rho: float = 1.0) -> Callable[[Block, Tensor, Tensor], Verdict]:
    return lambda block, accept, residual: verify(block, get_rule(name), theta, rho, accept, residual)


def under_form(name: str, theta: float) -> Callable[[Block, Tensor, Tensor], Verdict]:
    return lambda block, accept, residual: verify_published(block, PUBLISHED[name], theta, accept, residual)


def laws_of(law: Law) -> Laws:
    return Laws(*(a.numpy() for a in law))


def exact(law: Law, name: str, theta: float, rho: float = 1.0) -> np.ndarray:
    laws = laws_of(law)
    out: np.ndarray = emitted(examine(get_form(name), laws, theta, rho), laws.draft_probs)
    return out


def fit(seen: np.ndarray, law: np.ndarray) -> float:
    """P-value of counts against a law; of a law that has one token only, whether it alone came out."""
    if law.max() > 1 - 1e-12:
        return float(seen[law.argmax()] == seen.sum())
    return chi_square_p(seen, law)


# -- the law of one position -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("v", SIZES)
@pytest.mark.parametrize("name", sorted(RULES))
def test_a_completed_rule_emits_its_law_at_every_knob_and_weight(name: str, v: int) -> None:
    law = pair_of_laws(v)
    for i, (theta, rho) in enumerate(itertools.product((0.0, *THETAS), RHOS)):
        seen = counts(law, under_rule(name, theta, rho), seed=i)
        assert fit(seen, exact(law, name, theta, rho)) > SIGNIFICANCE, (theta, rho)


@pytest.mark.parametrize("v", SIZES)
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_form_emits_its_law_at_every_knob(name: str, v: int) -> None:
    law = pair_of_laws(v)
    for i, theta in enumerate((0.0, *THETAS)):
        seen = counts(law, under_form(name, theta), seed=50 + i)
        assert fit(seen, exact(law, name, theta)) > SIGNIFICANCE, theta


@pytest.mark.parametrize("v", SIZES)
@pytest.mark.parametrize("name", sorted(RULES))
def test_knob_zero_and_weight_zero_are_exactly_lossless(name: str, v: int) -> None:
    """The same tokens as the lossless branch on the same numbers, not only the same law; and that law is p."""
    law = pair_of_laws(v)
    for theta, rho in ((0.0, 1.0), (0.8, 0.0)):
        lossless, lenient, touch, _ = first_tokens(law, under_rule(name, theta, rho), seed=7, n=2000, width=4)
        assert torch.equal(lossless.accepted, lenient.accepted) and torch.equal(lossless.token, lenient.token)
        assert not touch.any()
        assert np.allclose(exact(law, name, theta, rho), law[0].numpy(), atol=1e-15)


# -- negative controls -------------------------------------------------------------------------------------------------


def test_another_knob_is_told_apart() -> None:
    law = pair_of_laws(30)
    seen = counts(law, under_rule("lenience", 0.5), seed=3)
    assert fit(seen, exact(law, "lenience", 0.5)) > SIGNIFICANCE
    assert fit(seen, exact(law, "lenience", 0.3)) < REJECTED


def test_a_rejection_replaced_by_a_draw_from_the_target_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "residual", lambda p, q: p)
    law = pair_of_laws(30)
    for theta in (0.0, 0.4):
        assert fit(counts(law, under_rule("lenience", theta), 4), exact(law, "lenience", theta)) < REJECTED


def test_a_published_form_is_not_taken_for_its_completion() -> None:
    law = pair_of_laws(30)
    for name in ("token_v1_paper", "token_v2_paper", "token_v3_paper", "lenience_paper"):
        theta = 0.4 if name == "lenience_paper" else 0.2
        seen = counts(law, under_form(name, theta), seed=6)
        assert fit(seen, exact(law, name, theta)) > SIGNIFICANCE, name
        assert fit(seen, exact(law, PUBLISHED[name].completion, theta)) < REJECTED, name


# -- drift -------------------------------------------------------------------------------------------------------------


def many_laws(n: int = 300, v: int = 25, seed: int = 9) -> Laws:
    """From nearly equal to nearly disjoint, at temperatures from greedy up, double precision."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, v, generator=rng, dtype=torch.float64) * torch.rand(n, 1, generator=rng) * 6
    other = logits + torch.randn(n, v, generator=rng, dtype=torch.float64) * torch.rand(n, 1, generator=rng) * 4
    temperature = torch.rand(n, 1, generator=rng, dtype=torch.float64) + 0.3
    p, q = ((x / temperature).softmax(-1) for x in (logits, other))
    p[:50], q[:50] = (torch.nn.functional.one_hot(x[:50].argmax(-1), v).double() for x in (logits, other))  # greedy
    return Laws(p.numpy(), q.numpy(), logits.softmax(-1).numpy(), other.softmax(-1).numpy())


def bought(name: str, laws: Laws, theta: float, rho: float = 1.0) -> tuple[Any, Any]:
    """Acceptance gained over lossless, and drift, at each position."""
    outcome, plain = examine(get_form(name), laws, theta, rho), examine(get_rule("lossless"), laws, 0.0)
    return (laws.draft_probs * (outcome.accept - plain.accept)).sum(-1), drift(outcome, laws)


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_completed_rule_gains_exactly_its_drift(name: str) -> None:
    laws = many_laws()
    for theta, rho in itertools.product((0.0, *THETAS), RHOS):
        gained, drifted = bought(name, laws, theta, rho)
        assert np.abs(gained - drifted).max() < 1e-12


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_form_never_gains_more_than_its_drift(name: str) -> None:
    laws = many_laws()
    for theta in (0.0, *THETAS):
        gained, drifted = bought(name, laws, theta)
        assert (gained - drifted).max() < 1e-12


def test_forms_that_are_not_completed_gain_less_than_their_drift() -> None:
    """Negative control: the identity is not a property of whatever one computes."""
    laws = many_laws()
    for name in ("token_v1_paper", "token_v2_paper", "token_v3_paper", "lenience_paper"):
        gained, drifted = bought(name, laws, 0.4)
        assert drifted.mean() - gained.mean() > 1e-3, name


# -- coupling of forms that are not completed --------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_branches_of_a_published_form_agree_up_to_the_first_touch(name: str) -> None:
    law = pair_of_laws(8)
    for theta in THETAS:
        lossless, published, touch, _ = first_tokens(law, under_form(name, theta), seed=11, n=4000, width=4)
        untouched = ~touch.any(-1)
        assert torch.equal(lossless.accepted[untouched], published.accepted[untouched])
        assert torch.equal(lossless.token[untouched], published.token[untouched])
        first = touch.long().argmax(-1)[~untouched]
        # both examined the position of the first touch
        assert (lossless.accepted[~untouched] >= first).all() and (published.accepted[~untouched] >= first).all()


def test_a_published_form_is_touched_at_least_as_often_as_it_drifts() -> None:
    """Any coupling separates two laws with at least their total variation; 5 standard deviations of slack."""
    law = pair_of_laws(8)
    for name, theta in itertools.product(sorted(PUBLISHED), THETAS):
        touch = first_tokens(law, under_form(name, theta), seed=12).touch
        least = float(drift(examine(get_form(name), laws_of(law), theta), laws_of(law)))
        assert float(touch.double().mean()) > least - 5 * (least / DRAWS) ** 0.5


def test_narrow_rows_of_a_published_form_are_verified_as_if_alone() -> None:
    law = pair_of_laws(8)
    p, q, p_raw, q_raw = law
    rng = torch.Generator().manual_seed(2)
    n, g = 40, 4
    tokens = draw(q.expand(n, g, -1), torch.rand(n, g, generator=rng))
    accept, rest = torch.rand(n, g, generator=rng), torch.rand(n, g + 1, generator=rng)
    widths = torch.arange(n) % (g + 1)
    wide = [a.expand(n, g + extra, -1) for a, extra in ((p, 1), (p_raw, 1), (q, 0), (q_raw, 0))]
    form = PUBLISHED["token_v3_paper"]
    together = verify_published(Block(tokens, *wide, widths=widths), form, 0.6, accept, rest)
    for i, w in enumerate(widths.tolist()):
        one = [a[i : i + 1, : w + extra] for a, extra in zip(wide, (1, 1, 0, 0), strict=True)]
        row = slice(i, i + 1)
        alone = verify_published(Block(tokens[row, :w], *one), form, 0.6, accept[row, :w], rest[row, : w + 1])
        for mine, theirs in zip(alone[:2], together[:2], strict=True):
            assert int(mine.accepted) == int(theirs.accepted[i]) and int(mine.token) == int(theirs.token[i])
        assert torch.equal(alone.touch[0], together.touch[i, :w]) and not together.touch[i, w:].any()


# -- two tokens, any drafter -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [{}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.7}], ids=str)
def test_with_two_tokens_the_processed_target_comes_out_whatever_the_drafter(drafter: dict[str, Any]) -> None:
    """p = (.6, .4), q = (.8, .2), 50,000 rounds at knob 0 of every rule, and the exact law at another knob."""
    p, q = torch.tensor([0.6, 0.4]), torch.tensor([0.8, 0.2])
    q_now, q_raw = process(q.log(), SamplingParams(**drafter))
    tokens = draw(q_now.expand(50_000, -1), torch.rand(50_000, generator=torch.Generator().manual_seed(21)))
    rng = torch.Generator().manual_seed(22)
    accept, rest = (torch.rand(50_000, k, generator=rng, dtype=torch.float64) for k in (1, 2))
    wide = [a.expand(50_000, k, -1) for a, k in ((p, 2), (p, 2), (q_now, 1), (q_raw, 1))]
    laws = Laws(*(a.double().numpy() for a in (p, q_now, p, q_raw)))
    for name, theta in itertools.product(sorted(RULES), (0.0, 0.3)):
        out = verify(Block(tokens[:, None], *wide), get_rule(name), theta, 1.0, 1 - accept, rest).lenient
        seen = torch.bincount(torch.where(out.accepted > 0, tokens, out.token), minlength=2).numpy()
        law = p.double().numpy() if theta == 0 else emitted(examine(get_rule(name), laws, theta), laws.draft_probs)
        assert fit(seen, law) > SIGNIFICANCE, (name, theta)
