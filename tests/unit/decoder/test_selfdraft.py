"""Drafters made of the target or of other drafters: what they draft, what they share, and that it stays lossless."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from decoder.drafters import ModelDrafter, NgramDrafter
from decoder.drafters.cascade import HorizontalDrafter, RollbackNgrams, VerticalDrafter
from decoder.drafters.ngram import NgramDraftState
from decoder.drafters.selfdraft import SelfDrafter, first_layers
from decoder.generate import Engine, Knobs, SamplingParams
from policies.errors import ModelError
from tests.decoding import EOS, pair, prompts, run

DEPTH = 6  # layers of the bundled target


def with_drafter(drafter: Any) -> Engine:
    return Engine(pair().target, drafter, eos_ids=[EOS])


# -- the target's own first layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_all_layers_every_draft_is_accepted(temperature: float) -> None:
    own = with_drafter(SelfDrafter(pair().target, DEPTH))
    for i in range(1):
        done = run(own, prompts(4)[i], Knobs.lossless(5), temperature=temperature, seed=i)
        assert done.accepted == done.examined > 20


@pytest.mark.parametrize("layers", range(1, DEPTH + 1))
def test_greedy_text_is_the_target_s_with_any_number_of_layers(layers: int) -> None:
    own = with_drafter(SelfDrafter(pair().target, layers))
    plain = Engine(pair().target, None, eos_ids=[EOS])
    done, exact = (run(e, prompts(4)[2], Knobs.lossless(4), temperature=0.0) for e in (own, plain))
    assert done.token_ids == exact.token_ids and done.drafted > 0
    assert layers == DEPTH or done.accepted < done.examined


@torch.inference_mode()
def test_the_small_model_is_the_first_layers_the_norm_and_the_head() -> None:
    target, ids = pair().target, torch.tensor([prompts(1)[0]])
    states = target(ids, output_hidden_states=True).hidden_states
    small = first_layers(target, 2)
    # Hidden state k is what comes out of layer k; the model's own last one has been through the norm already.
    expected = target.lm_head(target.model.norm(states[2]))
    assert torch.allclose(small(ids).logits, expected, atol=1e-4)
    assert len(target.model.layers) == DEPTH and target.config.num_hidden_layers == DEPTH


def test_a_forward_set_on_the_target_is_not_the_small_model_s() -> None:
    """Profilers replace a model's forward on the instance; the copy must not run the original's layers."""
    target, ids = pair().target, torch.tensor([prompts(1)[0]])
    with torch.inference_mode():
        expected = first_layers(target, 2)(ids).logits
        target.model.forward = target.model.forward
        try:
            assert torch.allclose(first_layers(target, 2)(ids).logits, expected)
        finally:
            del target.model.forward


def test_no_weight_is_copied() -> None:
    target = pair().target
    shared = {parameter.data_ptr() for parameter in target.parameters()}
    assert {parameter.data_ptr() for parameter in first_layers(target, 3).parameters()} < shared
    assert first_layers(target, DEPTH) is target


TINY: dict[str, Any] = {"vocab_size": 40, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def tiny_mistral() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return MistralForCausalLM(MistralConfig(**TINY, **sizes, num_key_value_heads=2, sliding_window=8)).eval()


def tiny_gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(**TINY, n_embd=16, n_layer=3, n_head=2)).eval()


@pytest.mark.parametrize("make", [tiny_mistral, tiny_gpt2])
def test_layers_are_found_in_other_architectures(make: Any) -> None:
    torch.manual_seed(1)
    target = make()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    texts = [
        run(Engine(target, drafter), list(range(8)), Knobs.lossless(4), temperature=0.0, max_tokens=40).token_ids
        for drafter in (None, *(SelfDrafter(target, k) for k in (1, 2, 3)))
    ]
    assert texts[0] == texts[1] == texts[2] == texts[3]


@pytest.mark.parametrize("layers", [0, -1, DEPTH + 1])
def test_layers_that_are_not_there_are_refused(layers: int) -> None:
    with pytest.raises(ModelError, match=f"1 to {DEPTH} layers"):
        SelfDrafter(pair().target, layers)


def test_a_model_whose_layers_cannot_be_told_is_refused() -> None:
    class Strange(torch.nn.Module):
        config = pair().target.config

    with pytest.raises(ModelError, match="cannot find its 6 decoder layers"):
        first_layers(Strange(), 2)


# -- vertical: n-grams, then the draft model ---------------------------------------------------------------------------


def proposals(drafter: Any, text: list[int], steps: int, temperature: float) -> list[tuple[list[int], torch.Tensor]]:
    """What a drafter proposes as a text grows by its own words, with something else thrown in now and then."""
    state = drafter.start(SamplingParams(temperature=temperature), 656, frozenset([EOS]))
    rng, made, tokens = random.Random(4), [], list(text)
    uniforms = torch.rand(steps, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for u in uniforms:
        draft = state.propose(tokens, 6, u)
        block = draft.tokens[0].tolist()
        made.append((block, draft.probs))
        kept = rng.randint(0, len(block))
        state.commit(len(tokens) + kept)
        tokens += [*block[:kept], rng.choice(text)]
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.inference_mode()
def test_a_vertical_cascade_drafts_what_its_model_would_draft_alone_in_fewer_passes(temperature: float) -> None:
    text = prompts(4)[1]
    vertical = VerticalDrafter(pair().draft)
    alone = proposals(ModelDrafter(pair().draft), text, 25, temperature)
    helped = proposals(vertical, text, 25, temperature)
    for (block, q), (same_block, same_q) in zip(alone, helped, strict=True):
        assert block == same_block
        assert torch.allclose(q, same_q, atol=1e-5)
    assert vertical.passes < sum(len(block) for block, _ in alone)


def test_n_grams_forget_what_is_taken_back() -> None:
    rng = random.Random(3)
    state, text = RollbackNgrams(50, frozenset()), [rng.randrange(4) for _ in range(20)]
    for _ in range(40):
        guess = state.guess([*text, *(rng.randrange(4) for _ in range(rng.randrange(6)))], 5)
        assert len(guess) <= 5
        text = text[: rng.randint(15, len(text))] + [rng.randrange(4) for _ in range(rng.randrange(4))]
        state.commit(min(len(text), 15))
        fresh = NgramDraftState(50, frozenset())
        fresh.propose(text, 5, torch.zeros(5))
        state.guess(text, 5)
        assert state._text == fresh._text
        assert {k: v for k, v in state._pairs.items() if v} == fresh._pairs
        assert state._followers == fresh._followers


# -- horizontal: the draft model first, n-grams after it ---------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["vertical", "horizontal"])
def test_cascades_draft_losslessly(drafter: str) -> None:
    made = (
        VerticalDrafter(pair().draft)
        if drafter == "vertical"
        else HorizontalDrafter(ModelDrafter(pair().draft), head=2)
    )
    for i in range(1, 2):
        texts = [
            run(with_drafter(d), prompts(4)[i], Knobs.lossless(6), temperature=0.0).token_ids
            for d in (made, ModelDrafter(pair().draft))
        ]
        assert texts[0] == texts[1]


@torch.inference_mode()
def test_a_horizontal_cascade_asks_n_grams_after_its_head() -> None:
    text = [*prompts(4)[1], *prompts(4)[1]]
    state = HorizontalDrafter(ModelDrafter(pair().draft), head=2).start(SamplingParams(), 656, frozenset([EOS]))
    draft = state.propose(text, 6, torch.rand(6, generator=torch.Generator().manual_seed(1)))
    assert draft.tokens.shape == (1, 6)
    certain = draft.probs.amax(-1)[0] == 1
    assert not certain[:2].any() and certain[2:].all()


def test_rules_that_read_the_draft_s_confidence_are_refused_with_a_horizontal_cascade() -> None:
    made = with_drafter(HorizontalDrafter(ModelDrafter(pair().draft), head=2))
    with pytest.raises(ModelError, match="always certain"):
        run(made, prompts(1)[0], Knobs(g=3, rule="chow", theta=0.5))


def test_cascades_of_the_wrong_parts_are_refused() -> None:
    with pytest.raises(ModelError, match="must be a model"):
        HorizontalDrafter(NgramDrafter(), head=2)
    with pytest.raises(ValueError, match="head"):
        HorizontalDrafter(ModelDrafter(pair().draft), head=0)
    with pytest.raises(ValueError, match="longest"):
        VerticalDrafter(pair().draft, longest=0)
