"""Strategies: strict is the target, lenient is the draft, and in between touches, coins and forks are what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoder.drafters import ModelDrafter, NgramDrafter
from decoder.generate import Knobs, Request, SamplingParams
from decoder.strategies import (
    STRATEGIES,
    Bild,
    Models,
    SequenceCascade,
    Strategy,
    StrategyCompletion,
    decode,
    fork,
    get_strategy,
)
from decoder.strategies.confidence import mean_confidence, min_confidence, quantile_confidence
from policies.errors import ModelError
from tests.decoding import EOS, Rounds, engine, pair, prompts, run

ALMOST_NEVER = 1e-9  # a knob above 0 at which no threshold is reached: the strategy's own path, and nothing believed
CASCADES = ("token_cascade", "sequence_cascade", "speculative_sequence_cascade", "bild")
# A knob at which about half of the requests are touched early, by rule.
HALFWAY = {"chow": 0.3, "diff": 0.1, "confidence_mean": 0.5, "bild": 1.0}


@cache
def models() -> Models:
    return Models(pair().target, ModelDrafter(pair().draft), eos_ids=[EOS])


def ask(
    prompt: list[int], *, pinned: bool = False, spans: Any = None, detokenize: Any = None, **params: Any
) -> Request:
    return Request(
        "r", prompt, SamplingParams(**({"max_tokens": 160} | params)), pinned=pinned, spans=spans, detokenize=detokenize
    )


def answer(
    strategy: str | Strategy,
    prompt: list[int],
    knobs: Knobs | Callable[[], Knobs],
    using: Models | None = None,
    observer: Any = None,
    **asked: Any,
) -> StrategyCompletion:
    made = get_strategy(strategy) if isinstance(strategy, str) else strategy
    return made.generate(using or models(), ask(prompt, **asked), knobs if callable(knobs) else lambda: knobs, observer)


def knobs_of(strategy: str, theta: float, **changes: Any) -> Knobs:
    return replace(Knobs(g=4, rule=STRATEGIES[strategy].rules[0], theta=theta), **changes)


@cache
@torch.inference_mode()
def reference(i: int) -> list[int]:
    """What transformers answers greedily."""
    ids = torch.tensor([prompts(8)[i]])
    made = pair().target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=160)
    out: list[int] = made[0, ids.shape[1] :].tolist()
    return out


@cache
def drafted(i: int, temperature: float) -> list[int]:
    """What the draft answers alone."""
    done = answer("draft_only", prompts(8)[i], knobs_of("draft_only", 1.0), seed=i, temperature=temperature)
    assert done.target_passes == 0 and done.draft_passes == len(done.token_ids)
    return done.token_ids


# -- the two ends of the knob ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theta", "g"), [(0.0, 4), (ALMOST_NEVER, 0), (ALMOST_NEVER, 4)])
@pytest.mark.parametrize("strategy", ["plain", "speculative", *CASCADES])
def test_strict_answers_are_those_of_transformers_generate(strategy: str, theta: float, g: int) -> None:
    knobs = Knobs(g=g, rule=(STRATEGIES[strategy].rules or ("lossless",))[0], theta=theta)
    for i in range(g // 2, 8, 4):
        done = answer(strategy, prompts(8)[i], knobs, temperature=0.0, seed=i)
        assert done.token_ids == reference(i) and done.finish_reason == "stop"
        assert done.touches == 0 and done.arm == "untouched" and done.strategy == strategy


def test_a_lenient_knob_is_told_apart_from_strict() -> None:
    """Negative control of the test above."""
    for strategy in CASCADES:
        knobs = knobs_of(strategy, 1.0)
        texts = [answer(strategy, prompts(8)[i], knobs, temperature=0.0, max_tokens=30).token_ids for i in range(2)]
        assert texts != [reference(i)[:30] for i in range(2)], strategy


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", ["token_cascade", "sequence_cascade", "speculative_sequence_cascade", "bild"])
def test_fully_lenient_answers_are_the_draft_s_own(strategy: str, temperature: float) -> None:
    never_falls_back: Strategy = Bild(fallback=0.0, longest=None) if strategy == "bild" else get_strategy(strategy)
    for i in range(2):
        knobs = knobs_of(strategy, 1.0)
        done = answer(never_falls_back, prompts(8)[i], knobs, temperature=temperature, seed=i)
        assert done.token_ids == drafted(i, temperature)
        assert done.arm == "lenient" and done.touches >= 1
        assert done.target_passes == (strategy == "bild")  # it looks before the answer ends


@pytest.mark.parametrize("strategy", CASCADES)
def test_knob_zero_is_exact_speculative_decoding_from_the_same_seed(strategy: str) -> None:
    for i in range(1):
        done = answer(strategy, prompts(8)[i], knobs_of(strategy, 0.0), seed=i, max_tokens=40)
        assert done.token_ids == run(engine(), prompts(8)[i], Knobs.lossless(4), seed=i, max_tokens=40).token_ids


@pytest.mark.parametrize("strategy", ["draft_only", *CASCADES])
def test_nothing_is_believed_without_leave(strategy: str) -> None:
    """A pinned request, the rule of another strategy, no weight, and a request for the target's log-probabilities."""
    lenient, prompt = knobs_of(strategy, 1.0), prompts(8)[0]
    for knobs, asked in (
        (lenient, {"pinned": True}),
        (replace(lenient, rule="token_v3"), {}),
        (replace(lenient, rho=0.0), {}),
        (lenient, {"logprobs": 1}),
    ):
        done = answer(strategy, prompt, knobs, temperature=0.0, max_tokens=30, **asked)
        assert done.token_ids == reference(0)[:30] and done.arm == "untouched"
        assert (done.logprobs is not None) == ("logprobs" in asked)


def test_a_lease_that_ends_while_the_draft_runs_is_respected() -> None:
    knobs = iter([knobs_of("sequence_cascade", 1.0)])
    expiring = lambda: next(knobs, Knobs.lossless(4))  # noqa: E731
    done = answer("sequence_cascade", prompts(8)[0], expiring, temperature=0.0)
    assert done.token_ids == reference(0) and done.arm == "untouched" and done.draft_passes > done.drafted


def test_the_mixing_weight_is_the_share_of_answers_that_may_be_believed() -> None:
    """200 coins at one half: outside 70..130 with a chance of 2e-5."""
    knobs = knobs_of("draft_only", 1.0, rho=0.5)
    arms = [answer("draft_only", prompts(1)[0][:6], knobs, seed=i, max_tokens=1).arm for i in range(200)]
    assert 70 <= arms.count("lenient") <= 130 and arms.count("untouched") == 200 - arms.count("lenient")


# -- confidence --------------------------------------------------------------------------------------------------------


def test_confidences_by_hand() -> None:
    probs = [0.5, 0.8, 1.0, 0.2, 1.0]
    assert mean_confidence(probs) == pytest.approx((0.5 * 0.8 * 0.2) ** 0.2)
    assert min_confidence(probs) == 0.2
    # The 10% quantile of five values lies at index 0.4, between log .2 and log .5.
    assert quantile_confidence(probs) == pytest.approx(0.2**0.6 * 0.5**0.4)
    for score in (mean_confidence, min_confidence, quantile_confidence):
        assert score([]) == 0 and score([1.0, 1.0]) == 1 and score([0.0, 0.0]) == pytest.approx(0)
        assert 0 < score([1e-30, 1.0]) < 1


@pytest.mark.parametrize("rule", ["confidence_mean", "confidence_quantile", "confidence_min"])
@pytest.mark.parametrize("strategy", ["sequence_cascade", "speculative_sequence_cascade"])
@torch.inference_mode()
def test_an_answer_is_believed_at_its_own_confidence_and_not_above(strategy: str, rule: str) -> None:
    prompt, out = prompts(8)[1], drafted(1, 1.0)
    laws = pair().draft(torch.tensor([prompt + out])).logits[0, len(prompt) - 1 : -1].softmax(-1)
    probs = laws.gather(-1, torch.tensor(out)[:, None])[:, 0].tolist()
    sure = {"mean": mean_confidence, "quantile": quantile_confidence, "min": min_confidence}[rule.split("_")[1]](probs)
    for tau, arm in ((sure - 1e-4, "lenient"), (sure + 1e-4, "untouched")):
        knobs = Knobs(g=4, rule=rule, theta=1 - tau)
        assert answer(strategy, prompt, knobs, seed=1).arm == arm


# -- touches, holdback, forks ------------------------------------------------------------------------------------------

EVERY = [
    ("draft_only", "draft_only"), ("token_cascade", "chow"), ("token_cascade", "diff"), ("bild", "bild"),
    ("sequence_cascade", "confidence_mean"), ("speculative_sequence_cascade", "confidence_mean"),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "rule"), EVERY)
def test_a_fork_is_what_the_other_coin_would_have_served(strategy: str, rule: str) -> None:
    touched = 0
    for i in range(2):
        knobs = Knobs(g=4, rule=rule, theta=HALFWAY.get(rule, 1.0), fork=1.0, label=1.0)
        served = answer(strategy, prompts(8)[i], knobs, seed=i, max_tokens=24)
        held = answer(strategy, prompts(8)[i], replace(knobs, holdback=1.0), seed=i, max_tokens=24)
        if served.arm == "untouched":
            assert held.arm == "untouched" and held.token_ids == served.token_ids
            continue
        touched += 1
        assert (served.arm, held.arm, held.touches) == ("lenient", "holdback", 1)
        assert served.fork_drawn and served.label_drawn and held.holdback_prob == 1.0
        assert served.first_touch_at is not None and served.knobs == knobs
        lenient, exact = fork(models(), held), fork(models(), served)
        assert lenient.token_ids == served.token_ids and lenient.touches == served.touches == exact.touches
        assert exact.token_ids == held.token_ids and exact.finish_reason == held.finish_reason
        assert exact.target_passes > 0
    assert touched >= 1


@pytest.mark.parametrize("strategy", ["sequence_cascade", "speculative_sequence_cascade"])
def test_held_answers_are_those_of_a_strategy_that_never_believes(strategy: str) -> None:
    """So whether somebody looked at the draft's confidence makes no difference to what the target says."""
    for i in range(2):
        held = answer(strategy, prompts(8)[i], knobs_of(strategy, 1.0, holdback=1.0), seed=i, max_tokens=30)
        strict = answer(strategy, prompts(8)[i], knobs_of(strategy, ALMOST_NEVER), seed=i, max_tokens=30)
        assert held.arm == "holdback" and held.token_ids == strict.token_ids
    assert held.token_ids != drafted(1, 1.0)[:30]


def test_a_token_cascade_is_its_strict_self_up_to_the_first_touch() -> None:
    for i in range(2):
        prompt = prompts(8)[i]
        done = answer("token_cascade", prompt, knobs_of("token_cascade", HALFWAY["chow"]), seed=i, max_tokens=30)
        strict = answer("token_cascade", prompt, knobs_of("token_cascade", ALMOST_NEVER), seed=i, max_tokens=30)
        assert done.fork_point is not None
        first = len(done.fork_point.token_ids)  # nothing was asked of the target there
        assert done.token_ids[:first] == strict.token_ids[:first] == done.fork_point.token_ids


def test_an_oracle_touches_only_where_the_lossless_outcome_differs() -> None:
    """At the same knob the oracle asks at every token: it can say how often the draft's word was the target's too."""
    done = answer("token_cascade", prompts(8)[0], Knobs(g=4, rule="diff", theta=1.0), temperature=0.0)
    assert done.token_ids == drafted(0, 0.0) and done.target_passes == len(done.token_ids)
    assert 0 < done.touches < len(done.token_ids)
    blind = answer("token_cascade", prompts(8)[0], Knobs(g=4, rule="chow", theta=1.0), temperature=0.0)
    assert blind.touches == len(blind.token_ids) and blind.target_passes == 0


def test_bild_touches_are_steps_whose_lossless_outcome_differs() -> None:
    """With the target as its own draft everything is lossless, unless it is rolled back."""
    twins = Models(pair().target, ModelDrafter(pair().target), eos_ids=[EOS])
    easy = answer("bild", prompts(8)[0], knobs_of("bild", 1.0), twins, seed=3, max_tokens=24)
    assert easy.touches == 0 and easy.accepted == easy.drafted > 0
    strict = answer(Bild(fallback=0.0), prompts(8)[0], knobs_of("bild", 0.5), twins, seed=3, max_tokens=24)
    assert strict.accepted < strict.drafted


# -- costs -------------------------------------------------------------------------------------------------------------


def test_a_whole_draft_is_verified_in_one_pass() -> None:
    done = answer("speculative_sequence_cascade", prompts(8)[2], knobs_of("speculative_sequence_cascade", ALMOST_NEVER),
                  models := Models(pair().target, ModelDrafter(pair().target), eos_ids=[EOS]), seed=1)  # fmt: skip
    assert done.target_passes == 1 and done.accepted == done.drafted == len(done.token_ids)
    assert done.draft_passes == len(done.token_ids) and models.drafter is not None


def test_reading_the_prompt_meanwhile_costs_a_pass_and_changes_nothing() -> None:
    early = SequenceCascade("early", verifies=True, prefill=True)
    knobs = knobs_of("speculative_sequence_cascade", ALMOST_NEVER)
    for i in range(2):
        one = answer(early, prompts(8)[i], knobs, seed=i, max_tokens=30)
        other = answer("speculative_sequence_cascade", prompts(8)[i], knobs, seed=i, max_tokens=30)
        assert one.token_ids == other.token_ids and one.target_passes == other.target_passes + 1
    believed = answer(early, prompts(8)[0], replace(knobs, theta=1.0))
    assert believed.target_passes == 1  # it was read for nothing
    assert len(answer(early, [5], knobs, max_tokens=3).token_ids) == 3  # nothing to read


def test_bild_falls_back_where_the_draft_is_unsure() -> None:
    lenient = knobs_of("bild", 1.0)
    passes = [
        answer(Bild(fallback), prompts(8)[0], lenient, temperature=0.0).target_passes for fallback in (0.0, 0.6, 1.0)
    ]
    assert passes[0] < passes[1] < passes[2]
    short = answer(Bild(0.0, longest=4), prompts(8)[0], lenient, temperature=0.0)
    assert passes[0] < short.target_passes == -(-len(short.token_ids) // 5)  # four drafted and one of its own


def test_rounds_are_told_only_where_the_engine_decodes() -> None:
    """Rounds behind a confidence test are selected by it, and would bias estimates of acceptance."""
    for strategy in CASCADES:
        rounds = Rounds()
        answer(strategy, prompts(8)[0], knobs_of(strategy, 0.5), observer=rounds, max_tokens=12)
        assert not rounds
        answer(strategy, prompts(8)[0], knobs_of(strategy, 0.0), observer=rounds, max_tokens=12)
        assert rounds and all(t.knobs.rule == "lossless" for t in rounds)


# -- what a request may ask for ----------------------------------------------------------------------------------------


def decoded(ids: list[int]) -> str:
    return str(pair().tokenizer.decode(ids))


@pytest.mark.parametrize("theta", [ALMOST_NEVER, 1.0])
@pytest.mark.parametrize("strategy", ["draft_only", *CASCADES])
def test_limits_and_stop_strings_end_an_answer(strategy: str, theta: float) -> None:
    prompt, knobs = prompts(8)[0], knobs_of(strategy, theta)
    whole = answer(strategy, prompt, knobs, temperature=0.0, max_tokens=24).token_ids
    for cap in (1, 7):
        done = answer(strategy, prompt, knobs, temperature=0.0, max_tokens=cap)
        assert len(done.token_ids) == cap and done.finish_reason == "length"
        assert done.token_ids[:-1] == whole[: cap - 1]
    word = decoded(whole)[30:36]
    done = answer(strategy, prompt, knobs, temperature=0.0, max_tokens=24, stop=(word,), detokenize=decoded)
    assert done.finish_reason == "stop" and done.stop_text == word
    assert decoded(done.token_ids)[done.text_length :].startswith(word)
    assert done.token_ids == whole[: len(done.token_ids)] != whole


@pytest.mark.parametrize("theta", [ALMOST_NEVER, 1.0])
@pytest.mark.parametrize("strategy", ["draft_only", *CASCADES])
def test_no_end_comes_out_too_early(strategy: str, theta: float) -> None:
    prompt, knobs = prompts(8)[0], knobs_of(strategy, theta)
    least = 1 + max(len(reference(0)), len(drafted(0, 0.0)))
    done = answer(strategy, prompt, knobs, temperature=0.0, min_tokens=least, max_tokens=least + 1)
    assert len(done.token_ids) > least - 1 and EOS not in done.token_ids[: least - 1]


class Nowhere:
    """A structured span from the first token to the last."""

    def lenient_mask(self, output_ids: list[int], block: list[int]) -> list[bool]:
        return [False] * len(block)


@pytest.mark.parametrize(("strategy", "rule"), EVERY)
def test_structured_spans_are_lossless(strategy: str, rule: str) -> None:
    done = answer(strategy, prompts(8)[0], Knobs(4, rule, 1.0), temperature=0.0, spans=Nowhere(), max_tokens=30)
    assert done.touches == 0 and done.arm == "untouched" and done.token_ids == reference(0)[:30]
    sampled = answer(strategy, prompts(8)[0], Knobs(4, rule, 1.0), max_tokens=16, spans=Nowhere())
    assert sampled.touches == 0 and sampled.arm == "untouched"


def tiny(seed: int, **changes: Any) -> Any:
    """A random model, sharp enough for its argmax to be stable."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**(sizes | heads | ids | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    return model


@pytest.mark.parametrize("theta", [ALMOST_NEVER, 1.0])
@pytest.mark.parametrize("strategy", ["draft_only", *CASCADES])
def test_a_draft_with_a_short_context_leaves_the_rest_to_the_target(strategy: str, theta: float) -> None:
    target = tiny(1)
    short = Models(target, ModelDrafter(tiny(2, max_position_embeddings=20)))
    plain = answer("plain", list(range(8)), Knobs(0), short, temperature=0.0, max_tokens=40).token_ids
    done = answer(strategy, list(range(8)), knobs_of(strategy, theta), short, temperature=0.0, max_tokens=40)
    assert len(done.token_ids) == 40
    if theta < 1 or "sequence" in strategy or strategy == "draft_only":  # half an answer is no answer
        assert done.token_ids == plain


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["draft_only", *CASCADES])
@pytest.mark.parametrize("drafter", [None, NgramDrafter()])
def test_strategies_that_ask_the_draft_need_one_that_can_be_unsure(strategy: str, drafter: Any) -> None:
    bare = Models(pair().target, drafter, eos_ids=[EOS])
    with pytest.raises(ModelError, match=strategy):
        get_strategy(strategy).check(bare)
    with pytest.raises(ModelError, match=strategy):
        answer(strategy, prompts(1)[0], knobs_of(strategy, 0.5), bare)
    for always in ("plain", "speculative"):
        get_strategy(always).check(bare)


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match="unknown strategy 'greedy'; known: plain, draft_only"):
        decode(models(), ask(prompts(1)[0]), lambda: Knobs(0), "greedy")
    with pytest.raises(ValueError, match="fallback"):
        Bild(fallback=1.5)
    with pytest.raises(ValueError, match="longest"):
        Bild(longest=0)
    untouched = answer("sequence_cascade", prompts(1)[0], Knobs(4), max_tokens=2)
    with pytest.raises(ValueError, match="never touched"):
        fork(models(), untouched)
    with pytest.raises(ValueError, match="prompt"):
        answer("token_cascade", [], knobs_of("token_cascade", 0.5))


def test_a_registered_strategy_answers_to_its_name() -> None:
    assert {name: strategy.name for name, strategy in STRATEGIES.items()} == {name: name for name in STRATEGIES}
    for name in ("plain", "speculative"):
        done = decode(models(), ask(prompts(1)[0], max_tokens=8), lambda: Knobs.lossless(4), name)
        assert done.strategy == name and done.draft_passes == done.drafted
        assert (done.target_passes == 8) == (name == "plain")
