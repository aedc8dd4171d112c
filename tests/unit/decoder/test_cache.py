"""Caches roll back to what a fresh read would give; models that cannot are refused at load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from decoder.cache import CachedModel
from policies.errors import ModelError
from tests.decoding import SMALL, pair, tiny


def ids(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 50, (1, n), generator=torch.Generator().manual_seed(seed))


def last_logits(model: Any, sequence: torch.Tensor) -> torch.Tensor:
    return model(input_ids=sequence, use_cache=False).logits[:, -1]


MODELS = {
    "bundled": lambda: pair().target,
    "full attention": lambda: tiny(vocab_size=50, seed=5),
    "sliding window of 8": lambda: tiny(MistralForCausalLM, MistralConfig, 5, vocab_size=50, sliding_window=8),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("start", [3, 6, 7, 8, 12])
@torch.inference_mode()
def test_after_a_rollback_the_model_goes_on_as_if_nothing_had_been_drafted(kind: str, start: int) -> None:
    model = MODELS[kind]()
    cache = CachedModel(model).new_cache()
    text = ids(start)
    cache.extend(text, 1)
    cache.truncate(start)
    for step, (wrong, right) in enumerate([(4, 1), (2, 0), (5, 3), (3, 3), (6, 2)]):
        cache.extend(ids(wrong, seed=10 + step), wrong)
        cache.truncate(text.shape[-1])
        assert cache.length == text.shape[-1]
        more = ids(right + 1, seed=20 + step)
        text = torch.cat([text, more], 1)
        logits = cache.extend(more, 1)[:, -1]
        cache.truncate(text.shape[-1])
        assert torch.allclose(logits, last_logits(model, text), atol=2e-4), f"step {step}"


@torch.inference_mode()
def test_only_the_logits_asked_for_are_computed() -> None:
    cache = CachedModel(pair().target).new_cache()
    assert cache.extend(ids(9), keep=4).shape == (1, 4, pair().target.config.vocab_size)


@torch.inference_mode()
def test_truncating_beyond_the_end_changes_nothing() -> None:
    cache = CachedModel(pair().draft).new_cache()
    cache.extend(ids(5), 1)
    cache.truncate(9)
    assert cache.length == 5


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_rows_of_a_batch_read_roll_back_and_move_as_if_alone(kind: str) -> None:
    """Through growth in rows and in slots; every row's logits are those of a fresh read of its own text."""
    model = MODELS[kind]()
    cache = CachedModel(model).new_rows(3)
    texts = [ids(n, seed=n) for n in (5, 9, 121)]
    for row, text in enumerate(texts):
        cache.extend(text, 1, first=row)
    for step in range(8):
        more = torch.cat([ids(4, seed=100 * step + row) for row in range(len(texts))])
        logits = cache.extend(more, 4)
        for row in range(len(texts)):
            kept = 1 + (step + row) % 4
            cache.truncate(row, texts[row].shape[-1] + kept)
            texts[row] = torch.cat([texts[row], more[row : row + 1, :kept]], 1)
            assert cache.lengths[row] == texts[row].shape[-1]
            assert torch.allclose(logits[row, kept - 1], last_logits(model, texts[row])[0], atol=2e-4)
        if step == 4:
            cache.leave(0, 3)
            texts = [texts[2], texts[1]]
            assert cache.lengths == [texts[0].shape[-1], texts[1].shape[-1], 0]


@torch.inference_mode()
def test_a_row_of_nonsense_leaves_nothing_behind() -> None:
    """0 times NaN is NaN: what is hidden must be finite all the same."""
    model = tiny(seed=5, vocab_size=50)
    cache = CachedModel(model).new_rows(2)
    cache.extend(ids(6), 1)
    for slots in cache._slots:
        assert slots.keys is not None and slots.values is not None
        slots.keys[0] = slots.values[0] = torch.nan
    cache.leave(0, 1)
    for row, n in enumerate((2, 4)):
        cache.extend(ids(n, seed=n), 1, first=row)
    logits = cache.extend(torch.cat([ids(2, seed=8), ids(2, seed=9)]), 1)
    assert torch.allclose(logits[0], last_logits(model, torch.cat([ids(2, seed=2), ids(2, seed=8)], 1)), atol=2e-4)


def test_an_empty_read_is_misuse() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        CachedModel(pair().draft).new_cache().extend(torch.zeros(1, 0, dtype=torch.long), 1)


def test_a_recurrent_model_is_refused_at_load() -> None:
    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ModelError, match=r"MambaForCausalLM.*cannot be rolled back"):
        CachedModel(MambaForCausalLM(config))


def test_a_layer_that_cannot_be_rolled_back_is_refused_at_load() -> None:
    hybrid = Qwen3NextConfig(**SMALL, layer_types=["linear_attention", "full_attention"])
    model = tiny(vocab_size=50, seed=5)
    model.config = hybrid
    with pytest.raises(ModelError, match="cannot roll back a cache layer of type LinearAttention"):
        CachedModel(model)


def test_an_encoder_decoder_is_refused_at_load() -> None:
    config = T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(ModelError, match="encoder-decoder"):
        CachedModel(T5ForConditionalGeneration(config))


def test_limits_are_read_from_the_configuration() -> None:
    model = CachedModel(pair().target)
    assert (model.context, model.vocab_size) == (512, 656)
