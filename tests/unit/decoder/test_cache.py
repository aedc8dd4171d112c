"""Caches roll back to what a fresh read would give; models that cannot are refused at load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
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
from tests.decoding import pair

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny(cls: Any, config: Any) -> Any:
    """A model with random but seeded weights, large enough to make its choices distinct."""
    torch.manual_seed(5)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    return model


def ids(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 50, (1, n), generator=torch.Generator().manual_seed(seed))


def last_logits(model: Any, sequence: torch.Tensor) -> torch.Tensor:
    return model(input_ids=sequence, use_cache=False).logits[:, -1]


MODELS = {
    "bundled": lambda: pair().target,
    "full attention": lambda: tiny(LlamaForCausalLM, LlamaConfig(**SMALL)),
    "sliding window of 8": lambda: tiny(MistralForCausalLM, MistralConfig(**SMALL, sliding_window=8)),
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


def test_an_empty_read_is_misuse() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        CachedModel(pair().draft).new_cache().extend(torch.zeros(1, 0, dtype=torch.long), 1)


def test_a_recurrent_model_is_refused_at_load() -> None:
    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ModelError, match=r"MambaForCausalLM.*cannot be rolled back"):
        CachedModel(MambaForCausalLM(config))


def test_a_layer_that_cannot_be_rolled_back_is_refused_at_load() -> None:
    hybrid = Qwen3NextConfig(**SMALL, layer_types=["linear_attention", "full_attention"])
    model = tiny(LlamaForCausalLM, LlamaConfig(**SMALL))
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
