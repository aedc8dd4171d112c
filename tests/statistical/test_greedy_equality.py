"""Greedy lossless output is that of ``generate`` of transformers, token by token.

The bundled pair only; `python -m bench.decode --equality` does it on 200 prompts, and for SmolLM2 on GSM8K and
Spec-Bench (figures in docs/benchmarks.md). Nothing here is random: in float32 on one thread a difference is a fault.
"""

from __future__ import annotations

import pytest

from bench import equality
from bench.common import library, ours
from bench.prompts import bundled_prompts
from decoder.demo.pair import EOS, PAD
from decoder.generate import Knobs
from tests.decoding import engine, pair


def test_lossless_text_is_that_of_generate() -> None:
    """48 prompts: the model drafter and the n-gram drafter with g = 1..8 in turn, three prompts each."""
    found = equality.bundled(48)
    assert found["differences"] == []
    assert found["equal"] == found["prompts"] == 48
    assert found["tokens"] > 48 * 20


@pytest.mark.parametrize("rule", ["token_v3", "forgive"])
def test_a_lenient_rule_is_seen_by_the_comparison(rule: str) -> None:
    """Negative control: the same comparison finds texts that differ."""
    prompts = bundled_prompts(pair().tokenizer, 6, seed=201)
    lenient = ours("lenient", engine(), Knobs(g=4, rule=rule, theta=0.9), 60)
    found = equality.compare(pair().target, prompts, library("generate", pair().target, EOS, PAD, 60), [lenient])
    assert found["equal"] < found["prompts"]
    assert all(difference["logit_margin"] > 0 for difference in found["differences"])
