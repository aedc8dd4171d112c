"""Logits become the distributions that decoding draws from."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decoder.sampling import Sampler, SamplingParams, bias_tensor, draw, process

LOGITS = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 3


def test_plain_sampling_draws_from_the_softmax_and_computes_it_once() -> None:
    probs, raw = process(LOGITS, SamplingParams())
    assert torch.allclose(probs, LOGITS.softmax(-1))
    assert probs is raw


def test_greedy_is_one_hot_at_the_first_maximum_and_raw_stays_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    probs, raw = process(logits, SamplingParams(temperature=0))
    assert probs.tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert torch.allclose(raw, logits.softmax(-1))


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=1000),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.05),
    SamplingParams(temperature=0.7, top_k=12, top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
])  # fmt: skip
def test_temperature_top_k_top_p_and_min_p_are_those_of_transformers(params: SamplingParams) -> None:
    ids, scores = torch.zeros(len(LOGITS), 1, dtype=torch.long), LOGITS
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(min(params.top_k, LOGITS.shape[-1]))(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    probs, raw = process(LOGITS, params)
    assert torch.allclose(probs, scores.softmax(-1), atol=1e-6)
    assert torch.allclose(raw, LOGITS.softmax(-1))


def test_a_masked_token_has_probability_zero_in_both_and_other_biases_shift_both() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={3: -math.inf, 5: 2.0})
    probs, raw = process(LOGITS, params)
    assert not probs[:, 3].any() and not raw[:, 3].any()
    shifted = LOGITS.clone()
    shifted[:, 3] = -math.inf
    shifted[:, 5] += 2
    assert torch.allclose(raw, shifted.softmax(-1))
    assert torch.allclose(probs, (shifted / 0.5).softmax(-1))


def test_a_tiny_temperature_stays_finite() -> None:
    probs, _ = process(LOGITS * 1e4, SamplingParams(temperature=1e-30))
    assert torch.equal(probs, process(LOGITS, SamplingParams(temperature=0))[0])


def test_bias_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match="every token"):
        bias_tensor(SamplingParams(logit_bias=dict.fromkeys(range(4), -math.inf)), 4)
    with pytest.raises(ValueError, match="vocabulary has 4"):
        bias_tensor(SamplingParams(logit_bias={4: 1.0}), 4)


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_k", -1), ("top_p", 0.0),
    ("top_p", 1.1), ("top_p", math.nan), ("max_tokens", 0), ("seed", -1), ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}), ("logit_bias", {-1: 0.0}), ("min_p", -0.1), ("min_p", 1.1), ("min_tokens", -1),
    ("stop", ("a", "")), ("stop", ["a"]), ("stop", "a"), ("logprobs", -1), ("logprobs", 21), ("presence_penalty", 0.5),
    ("frequency_penalty", -0.5), ("repetition_penalty", 1.1),
])  # fmt: skip
def test_impossible_parameters_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_rows_of_a_batch_get_bit_for_bit_what_they_get_alone() -> None:
    rows = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.3, top_k=5),
        SamplingParams(top_p=0.7, logit_bias={3: -math.inf, 7: 1.0}),
        SamplingParams(temperature=1.7, min_p=0.1),
        SamplingParams(top_k=12, top_p=0.9, min_p=0.02),
    ]
    logits = LOGITS[:, None].repeat(1, 3, 1) + torch.arange(3)[:, None]
    probs, raw = Sampler(rows, 40).process(logits)
    for i, params in enumerate(rows):
        alone = process(logits[i], params)
        assert torch.equal(probs[i], alone[0]) and torch.equal(raw[i], alone[1])


def test_rows_that_agree_share_their_shortcuts() -> None:
    plain, greedy = (Sampler([SamplingParams(temperature=t)] * 2, 40) for t in (1.0, 0.0))
    probs, raw = plain.process(LOGITS[:2, None])
    assert probs is raw and not plain.greedy
    token = greedy.draw(greedy.process(LOGITS[:2, None])[0], torch.zeros(2, 1))
    assert greedy.greedy and torch.equal(token, LOGITS[:2, None].argmax(-1))


def test_draw_inverts_the_distribution() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 5.0, 3.0, 0.0])
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = torch.bincount(draw(weights.expand(1000, 6), grid), minlength=6)
    assert counts.tolist() == [0, 200, 0, 500, 300, 0]


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_draw_never_yields_weight_zero_even_at_the_ends(u: float) -> None:
    weights = torch.zeros(1, 500)
    weights[0, 100:400] = torch.rand(300, generator=torch.Generator().manual_seed(1)) + 1e-3
    index = int(draw(weights, torch.tensor([u], dtype=torch.float64)))
    assert index == (100 if u == 0 else 399)
