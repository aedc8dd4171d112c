"""Grouped attention is the library's, bit for bit, and only models that share keys use it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decoder.attention import GROUPED, use_grouped
from decoder.batch import Batch
from decoder.drafters import NgramDrafter
from decoder.generate import Engine, Knobs, Request, SamplingParams
from tests.decoding import run, tiny


def shared(dtype: torch.dtype) -> Any:
    """Four heads over two sets of keys."""
    return tiny(num_attention_heads=4, num_key_value_heads=2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_passes_of_a_block_and_of_a_batch_are_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    texts, model = [], shared(dtype)
    for grouped in (False, True):
        if grouped:
            use_grouped(model)
        engine = Engine(model, NgramDrafter())
        texts.append([run(engine, list(range(8)), Knobs.lossless(4), seed=7, max_tokens=48).token_ids])
        batch = Batch(engine, 3)
        for i in range(3):
            params = SamplingParams(max_tokens=24, seed=i)
            batch.add(Request(str(i), list(range(3 + 2 * i)), params), lambda: Knobs.lossless(3))
        while batch.rows:
            texts[-1] += [done.token_ids for done in batch.step()]
    assert texts[0] == texts[1] and model.config._attn_implementation == GROUPED
    ids = torch.arange(12)[None]
    mask = torch.zeros(1, 1, 12, 12, dtype=dtype).masked_fill_(torch.ones(12, 12).triu(1) > 0, -torch.inf)
    for given in (None, mask, mask == 0):
        plain, ours = shared(dtype), shared(dtype)
        use_grouped(ours)
        assert torch.equal(*(m(input_ids=ids, attention_mask=given).logits for m in (plain, ours)))


def test_other_models_stay_as_they_are() -> None:
    model = tiny()
    use_grouped(model)
    assert model.config._attn_implementation == "sdpa"
    eager = shared(torch.float32)
    eager.set_attn_implementation("eager")
    use_grouped(eager)
    assert eager.config._attn_implementation == "eager"
