"""Drafters propose from their law, stop at an end token, and forget what was not committed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoder.drafters import Draft, ModelDrafter, NgramDrafter
from decoder.sampling import SamplingParams, draw
from tests.decoding import pair, prompts

NO_EOS: frozenset[int] = frozenset()
V = 656


def uniforms(n: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def start(params: SamplingParams | None = None, eos: frozenset[int] = NO_EOS) -> Any:
    return ModelDrafter(pair().draft).start(params or SamplingParams(), V, eos)


# -- a model -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_a_model_draws_every_token_from_its_own_law() -> None:
    text, u = prompts(1)[0], uniforms(4)
    block = start().propose(text, 4, u)
    for j in range(4):
        law = pair().draft(torch.tensor([[*text, *block.tokens[0, :j].tolist()]])).logits[0, -1].softmax(-1)
        assert torch.allclose(block.probs[0, j], law, atol=1e-5)
        assert int(block.tokens[0, j]) == int(draw(law, u[j]))
    assert block.raw is block.probs


@torch.inference_mode()
def test_a_greedy_model_proposes_its_argmax_with_certainty_and_says_how_sure_it_was() -> None:
    block = start(SamplingParams(temperature=0)).propose(prompts(1)[0], 3, uniforms(3))
    assert torch.equal(block.probs.argmax(-1), block.tokens)
    assert torch.equal(block.probs.amax(-1), torch.ones(1, 3))
    assert torch.equal(block.raw.argmax(-1), block.tokens) and (block.raw.amax(-1) < 1).all()


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 4])
@torch.inference_mode()
def test_what_was_rejected_leaves_no_trace(kept: int) -> None:
    text, state = prompts(1)[0], start()
    block = state.propose(text, 4, uniforms(4))
    assert state.length == len(text) + 3  # the last proposal was not read yet
    state.commit(len(text) + kept)
    assert state.length == len(text) + min(kept, 3)
    text = [*text, *block.tokens[0, :kept].tolist(), 77]
    again, fresh = state.propose(text, 3, uniforms(3, 1)), start().propose(text, 3, uniforms(3, 1))
    assert torch.equal(again.tokens, fresh.tokens) and torch.allclose(again.probs, fresh.probs, atol=1e-5)


@torch.inference_mode()
def test_a_block_ends_with_the_first_end_token() -> None:
    free = start().propose(prompts(1)[0], 5, uniforms(5)).tokens[0].tolist()
    assert len(set(free)) == 5  # so that the third one is new
    stopped = start(eos=frozenset({free[2]})).propose(prompts(1)[0], 5, uniforms(5))
    assert stopped.tokens[0].tolist() == free[:3] and stopped.probs.shape == (1, 3, V)


@torch.inference_mode()
def test_a_masked_token_is_not_proposed() -> None:
    free = start().propose(prompts(1)[0], 1, uniforms(1))
    token = int(free.tokens)
    masked = start(SamplingParams(logit_bias={token: -math.inf})).propose(prompts(1)[0], 1, uniforms(1))
    assert int(masked.tokens) != token and float(masked.probs[0, 0, token]) == 0


@torch.inference_mode()
def test_distributions_are_cut_to_the_common_vocabulary() -> None:
    block = ModelDrafter(pair().draft).start(SamplingParams(), 600, NO_EOS).propose(prompts(1)[0], 2, uniforms(2))
    assert block.probs.shape == (1, 2, 600) and torch.allclose(block.probs.sum(-1), torch.ones(1, 2))


# -- n-grams -----------------------------------------------------------------------------------------------------------


def propose(text: list[int], width: int, eos: frozenset[int] = NO_EOS, vocab: int = 100) -> list[int]:
    block: Draft = NgramDrafter().start(SamplingParams(), vocab, eos).propose(text, width, uniforms(width))
    ids: list[int] = block.tokens[0].tolist()
    assert block.probs.shape == (1, len(ids), vocab) and block.raw is block.probs
    assert torch.equal(block.probs.argmax(-1)[0], block.tokens[0]) and (block.probs.sum(-1) == 1).all()
    return ids


@pytest.mark.parametrize(("text", "width", "expected"), [
    ([1, 2, 3, 4, 9, 1, 2], 3, [3, 4, 9]),  # what followed the same words
    ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 1, [3]),  # the longer match beats the later one
    ([1, 2, 3, 7, 1, 2, 4, 8, 1, 2], 1, [4]),  # of equally long ones the later one wins
    ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),  # a loop is continued
    ([7, 7, 7], 2, [7, 7]),
    ([1, 3, 1, 3, 1, 4, 8, 1], 2, [3, 1]),  # only the last token is known: bigrams
    ([1, 2, 3], 4, []),  # nothing is known
    ([1], 4, []),
])  # fmt: skip
def test_ngrams_continue_what_was_seen(text: list[int], width: int, expected: list[int]) -> None:
    assert propose(text, width) == expected


def test_ngrams_stop_at_an_end_token() -> None:
    assert propose([1, 2, 3, 4, 9, 1, 2], 3, eos=frozenset({4})) == [3, 4]


def test_ngrams_read_the_text_as_it_grows() -> None:
    state = NgramDrafter().start(SamplingParams(), 100, NO_EOS)
    assert state.propose([1, 2, 3], 2, uniforms(2)).tokens.tolist() == [[]]
    assert state.propose([1, 2, 3, 9, 1, 2], 2, uniforms(2)).tokens.tolist() == [[3, 9]]


@given(text=st.lists(st.integers(0, 3), min_size=2, max_size=40), width=st.integers(1, 6))
def test_ngrams_find_the_longest_match_of_all(text: list[int], width: int) -> None:
    """Against a search that tries every suffix and place, for texts shorter than the number of places compared."""
    best = None
    for length in range(2, len(text)):
        for end in range(length, len(text)):
            if text[end - length : end] == text[-length:]:
                best = end
    if best is not None:
        assert propose(text, width) == [([*text, *text[best:] * 10])[best + j] for j in range(width)]
