"""What a round of verification promises for any distributions, rule, knob and uniforms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.verify import Block, verify
from policies.rules import RULES, get_rule

RULE = pytest.mark.parametrize("name", sorted(RULES))
UNIT = st.floats(0, 1, width=32)
SEED = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=12)  # each example is a batch
ROWS, G, V, MASKED = 16, 5, 9, 8


def batch(seed: int) -> tuple[Block, torch.Tensor, torch.Tensor]:
    """Drafted blocks of various widths, sometimes greedy, and their uniforms. The target masks the last token."""
    rng = torch.Generator().manual_seed(seed)
    spread = torch.rand(ROWS, 1, 1, generator=rng) * 6
    p_logits = torch.randn(ROWS, G + 1, V, generator=rng) * spread
    q_logits = p_logits[:, :G] + torch.randn(ROWS, G, V, generator=rng) * torch.rand(ROWS, 1, 1, generator=rng) * 3
    p_logits[..., MASKED] = -torch.inf
    p_raw, q_raw = p_logits.softmax(-1), q_logits.softmax(-1)
    tokens = torch.multinomial(q_raw.flatten(0, 1), 1, generator=rng).view(ROWS, G)
    p, q = p_raw, q_raw
    if seed % 3 == 0:
        p = torch.zeros_like(p_raw).scatter_(-1, p_raw.argmax(-1, keepdim=True), 1.0)
        q = torch.zeros_like(q_raw).scatter_(-1, tokens[..., None], 1.0)
    widths = torch.randint(0, G + 1, (ROWS,), generator=rng)
    accept = torch.rand(ROWS, G, generator=rng, dtype=torch.float64)
    accept[torch.rand(ROWS, G, generator=rng) < 0.1] = 0.0  # the worst case for a token that must not pass
    residual = torch.rand(ROWS, G + 1, generator=rng, dtype=torch.float64)
    return Block(tokens, p, p_raw, q, q_raw, widths), accept, residual


@RULE
@FEW
@given(seed=SEED, theta=UNIT, rho=UNIT)
def test_leniency_never_accepts_fewer_tokens_than_lossless_on_the_same_uniforms(
    name: str, seed: int, theta: float, rho: float
) -> None:
    block, accept, residual = batch(seed)
    verdict = verify(block, get_rule(name), theta, rho, accept, residual)
    assert torch.all(verdict.lenient.accepted >= verdict.lossless.accepted)


@RULE
@FEW
@given(seed=SEED, theta=UNIT, rho=UNIT)
def test_both_branches_agree_up_to_the_first_touch(name: str, seed: int, theta: float, rho: float) -> None:
    block, accept, residual = batch(seed)
    lossless, lenient, touch, _ = verify(block, get_rule(name), theta, rho, accept, residual)
    touched = touch.any(-1)
    assert torch.equal(touched, lenient.accepted > lossless.accepted)
    assert torch.equal(touch.long().argmax(-1)[touched], lossless.accepted[touched])
    assert torch.equal(lenient.token[~touched], lossless.token[~touched])


@RULE
@FEW
@given(seed=SEED, knob=UNIT)
def test_either_knob_at_zero_is_lossless(name: str, seed: int, knob: float) -> None:
    block, accept, residual = batch(seed)
    for theta, rho in ((0.0, knob), (knob, 0.0)):
        lossless, lenient, touch, _ = verify(block, get_rule(name), theta, rho, accept, residual)
        assert torch.equal(lossless.accepted, lenient.accepted) and torch.equal(lossless.token, lenient.token)
        assert not touch.any()


@RULE
@FEW
@given(seed=SEED, theta=UNIT)
def test_a_masked_token_is_neither_accepted_nor_drawn(name: str, seed: int, theta: float) -> None:
    block, accept, residual = batch(seed)
    accept = accept * 0.0  # accepts whatever can be accepted at all
    for branch in verify(block, get_rule(name), theta, 1.0, accept, residual)[:2]:
        accepted = torch.arange(G) < branch.accepted[:, None]
        assert not (accepted & (block.tokens == MASKED)).any()
        assert not (branch.token == MASKED).any()


@RULE
@FEW
@given(seed=SEED, theta=UNIT)
def test_a_row_gives_the_same_alone_and_in_a_batch(name: str, seed: int, theta: float) -> None:
    block, accept, residual = batch(seed)
    together = verify(block, get_rule(name), theta, 1.0, accept, residual)
    assert block.widths is not None
    for i, w in enumerate(block.widths.tolist()):
        row = slice(i, i + 1)
        alone = Block(
            block.tokens[row, :w],
            block.target_probs[row, : w + 1],
            block.target_raw[row, : w + 1],
            block.draft_probs[row, :w],
            block.draft_raw[row, :w],
        )
        one = verify(alone, get_rule(name), theta, 1.0, accept[row, :w], residual[row, : w + 1])
        for mine, theirs in zip(one[:2], together[:2], strict=True):
            assert int(mine.accepted) == int(theirs.accepted[i]) and int(mine.token) == int(theirs.token[i])
        assert torch.equal(one.touch[0], together.touch[i, :w]) and not together.touch[i, w:].any()
