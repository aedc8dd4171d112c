"""The round and the loop: limits, caches, coupling, holdback, forks, and what telemetry sees."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from decoder import generate
from decoder.batch import Batch
from decoder.demo.pair import load_pair
from decoder.drafters import Draft, ModelDrafter, NgramDrafter
from decoder.drafters.model import ModelRowDrafts
from decoder.generate import Completion, Engine, Knobs, Request, RoundTrace, Rows, SamplingParams
from decoder.row import ACCEPT, Row
from decoder.sampling import draw
from decoder.verify import verify
from policies.errors import ModelError
from policies.rules import Scalars, accept_prob, get_rule
from storage.records import ACCEPTED, EXAMINED, PINNED, TOUCH, TokenBlock
from tests.decoding import EOS, Rounds, engine, pair, prompts, run, tiny

LENIENT = Knobs(g=4, rule="token_v3", theta=0.8)
CAP = 60  # tokens of most requests here; an answer has 40 to 70


def coupled(prompt: list[int], seed: int, **changes: Any) -> Completion:
    return run(engine(), prompt, replace(LENIENT, **changes), seed=seed, max_tokens=CAP)


# -- one request -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_block_length_zero_is_plain_sampling_from_the_request_seed() -> None:
    prompt, rounds = prompts(1)[0], Rounds()
    done = run(engine(), prompt, Knobs.lossless(0), rounds, seed=3, max_tokens=12)
    rng = np.random.Generator(np.random.PCG64(3))
    rng.random(3)  # the coins
    text = list(prompt)
    for u in rng.random((12, 4))[:, 2]:
        law = pair().target(torch.tensor([text])).logits[0, -1].softmax(-1)
        text.append(int(draw(law, torch.tensor(u))))
    assert done.token_ids == text[len(prompt) :]
    assert done.target_passes == 12 == len(rounds) and done.drafted == 0
    assert all(t.width == 0 and t.emitted == 1 and t.theta.shape == (0,) for t in rounds)


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_greedy_rounds_that_nobody_watches_take_a_short_cut_to_the_same_text(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The greatest logit decides there: rows of a batch with bias, minimum and widths of their own."""
    verified = []
    monkeypatch.setattr(generate, "verify", lambda *args: verified.append(1) or verify(*args))
    asked = [
        {"logit_bias": {5: 3.0, 9: -math.inf}, "max_tokens": 14},
        {"min_tokens": 20, "max_tokens": 22},
        {"max_tokens": 9},
        {"max_tokens": 24},
    ]
    found: dict[bool, Any] = {}
    for watched in (True, False):
        batch = Batch(engine(drafter), 4)
        for i, params in enumerate(asked):
            request = Request(str(i), prompts(4)[i], SamplingParams(temperature=0.0, **params))
            batch.add(request, lambda g=2 * i: Knobs.lossless(g), Rounds() if watched else None)
        done = []
        while batch.rows:
            done += batch.step()
        found[watched] = sorted(
            (c.request.request_id, c.token_ids, c.drafted, c.examined, c.accepted, c.target_passes, c.finish_reason)
            for c in done
        )
        assert bool(verified) == watched
        verified.clear()
    assert found[True] == found[False]


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    first, again, other = (coupled(prompts(1)[0], seed).token_ids for seed in (5, 5, 6))
    assert first == again != other


def test_a_smaller_cap_cuts_the_same_text() -> None:
    """The uniforms of an output index do not depend on how many there are; the last block is shorter, hence g = 0."""
    long, short = (run(engine(), prompts(1)[0], Knobs.lossless(0), seed=4, max_tokens=n).token_ids for n in (40, 25))
    assert short == long[:25]


@pytest.mark.parametrize("cap", [1, 2, 3, 7])
@pytest.mark.parametrize("g", [0, 1, 4, 9])
def test_the_cap_is_never_passed_and_never_drafted_over(cap: int, g: int) -> None:
    rounds = Rounds()
    done = run(engine(), prompts(1)[0], Knobs.lossless(g), rounds, max_tokens=cap)
    assert len(done.token_ids) == cap and done.finish_reason == "length"
    emitted = 0
    for t in rounds:
        assert emitted + t.width + 1 <= cap
        emitted += t.emitted
    assert emitted == cap


def test_an_end_token_stops_the_request_wherever_in_a_block_it_lands() -> None:
    greedy = {"temperature": 0.0, "max_tokens": 60}
    plain = run(engine(), prompts(1)[0], Knobs.lossless(0), **greedy).token_ids
    landed = set()
    for end in range(4, 40):
        if plain[end] in plain[:end]:
            continue
        stopper = Engine(pair().target, ModelDrafter(pair().draft), eos_ids=[plain[end], EOS])
        rounds = Rounds()
        done = run(stopper, prompts(1)[0], Knobs.lossless(4), rounds, **greedy)
        assert done.token_ids == plain[: end + 1] and done.finish_reason == "stop"
        landed.add((rounds[-1].emitted, bool(rounds[-1].flags[rounds[-1].emitted - 1 :].any())))
    assert len({position for position, _ in landed}) >= 4  # else this text does not test what it says


def test_without_end_tokens_a_request_runs_to_its_cap() -> None:
    endless = Engine(pair().target, ModelDrafter(pair().draft))
    done = run(endless, prompts(1)[0], Knobs.lossless(4), max_tokens=120)
    assert len(done.token_ids) == 120 and EOS in done.token_ids


def test_the_target_s_context_ends_a_request_and_the_draft_s_only_the_drafting() -> None:
    short_target = Engine(tiny(max_position_embeddings=20), ModelDrafter(tiny(seed=2)))
    done = run(short_target, list(range(8)), Knobs.lossless(4), temperature=0.0)
    assert len(done.token_ids) == 12 and done.finish_reason == "length"

    target = tiny(max_position_embeddings=60)
    short_draft = Engine(target, ModelDrafter(tiny(seed=2, max_position_embeddings=20)))
    rounds = Rounds()
    done = run(short_draft, list(range(8)), Knobs.lossless(4), rounds, temperature=0.0)
    plain = run(Engine(target, None), list(range(8)), Knobs.lossless(4), temperature=0.0)
    assert done.token_ids == plain.token_ids and len(done.token_ids) == 52
    assert rounds[0].width == 4 and rounds[-1].width == 0


@pytest.mark.parametrize("prompt", [[], [700], [-1], [5] * 512])
def test_a_prompt_that_cannot_be_served_is_misuse(prompt: list[int]) -> None:
    with pytest.raises(ValueError, match="prompt"):
        run(engine(), prompt, Knobs.lossless(1))


def test_a_bias_masks_a_token_at_full_leniency_too() -> None:
    everything = Knobs(g=4, rule="threshold", theta=1.0)
    free = run(engine(), prompts(1)[0], everything, seed=1, max_tokens=40).token_ids
    masked = set(free[:20])
    done = run(engine(), prompts(1)[0], everything, seed=1, max_tokens=40, logit_bias=dict.fromkeys(masked, -math.inf))
    assert not masked & set(done.token_ids) and done.token_ids != free


class Certain:
    """A drafter that proposes the same run every time, whatever comes of it, and knows of no end token."""

    deterministic = True
    context = vocab_size = None

    def __init__(self, tokens: list[int]):
        self._tokens = tokens

    def start(self, params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]) -> Certain:
        self._vocab = vocab_size
        return self

    def propose(self, tokens: Any, width: int, uniforms: torch.Tensor) -> Draft:
        ids = torch.tensor([self._tokens[:width]])
        one_hot = torch.nn.functional.one_hot(ids, self._vocab).float()
        return Draft(ids, one_hot, one_hot)

    def commit(self, length: int) -> None: ...


@pytest.mark.parametrize(
    ("cap", "end", "length", "reason"), [(5, 2, 3, "stop"), (4, 4, 4, "length"), (9, 4, 5, "stop")]
)
def test_an_accepted_run_ends_inside_the_block_at_its_end_token_or_at_the_cap(
    cap: int, end: int, length: int, reason: str
) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 6}
    text = run(Engine(tiny(), None), list(range(8)), Knobs.lossless(0), **greedy).token_ids
    assert text[end] not in text[:end]
    certain = Engine(tiny(), Certain(text), eos_ids=[text[end]])
    done = run(certain, list(range(8)), Knobs.lossless(6), temperature=0.0, max_tokens=cap)
    assert (done.token_ids, done.finish_reason, done.target_passes) == (text[:length], reason, 1)


def test_no_end_token_comes_out_before_the_minimum_at_any_leniency() -> None:
    everything = Knobs(g=4, rule="threshold", theta=1.0)
    text = run(engine(), prompts(1)[0], everything, seed=1, max_tokens=40).token_ids
    ends = set(text[:12])  # ends that the models like
    eager = Engine(pair().target, ModelDrafter(pair().draft), eos_ids=ends)
    for knobs in (Knobs.lossless(0), Knobs.lossless(4), everything):
        assert len(run(eager, prompts(1)[0], knobs, seed=1).token_ids) < 15
        done = run(eager, prompts(1)[0], knobs, seed=1, min_tokens=15)
        assert not ends & set(done.token_ids[:15]) and len(done.token_ids) >= 15


def test_stop_strings_end_a_request_where_plain_decoding_would() -> None:
    detokenize = pair().tokenizer.decode
    base = run(engine(), prompts(1)[0], Knobs.lossless(0), temperature=0.0, max_tokens=40)
    text = detokenize(base.token_ids)
    stop = text[len(text) // 2 : len(text) // 2 + 6]  # somewhere within tokens
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=(stop, "no such text"))
    request = Request("r", list(prompts(1)[0]), params, detokenize=detokenize)
    for g in (0, 1, 4):
        done = engine().generate(request, lambda g=g: Knobs.lossless(g))
        assert done.finish_reason == "stop" and done.stop_text == stop and done.text_length == text.index(stop)
        assert stop in detokenize(done.token_ids) and stop not in detokenize(done.token_ids[:-1])
        assert done.token_ids == base.token_ids[: len(done.token_ids)]


@torch.inference_mode()
def test_logprobs_are_the_target_s_for_every_token_that_came_out() -> None:
    done = run(engine(), prompts(1)[0], LENIENT, seed=5, max_tokens=24, temperature=0.7, logprobs=3)
    assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids)
    text = torch.tensor([[*prompts(1)[0], *done.token_ids]])
    laws = pair().target(text).logits[0, len(prompts(1)[0]) - 1 : -1].log_softmax(-1)
    for entry, token, law in zip(done.logprobs, done.token_ids, laws, strict=True):
        assert entry.token_id == token and entry.logprob == pytest.approx(float(law[token]), abs=1e-3)
        best = law.topk(3)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-3)
    assert run(engine(), prompts(1)[0], LENIENT, max_tokens=4).logprobs is None


def test_a_forced_rejection_where_draft_and_target_are_one_model_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temperature 0.01: the residual is rounding noise, and must not become NaN or a token that cannot be."""
    begin = Row.start.__func__

    def rejecting(cls: Any, *args: Any) -> Row:
        row = begin(cls, *args)
        row.uniforms[ACCEPT, 2::5] = 2.0  # rejects anything
        return row

    itself = Engine(pair().target, ModelDrafter(pair().target))
    plain = run(itself, prompts(1)[0], Knobs.lossless(0), temperature=0.01, seed=4, max_tokens=30)
    monkeypatch.setattr(Row, "start", classmethod(rejecting))
    rounds = Rounds()
    done = run(itself, prompts(1)[0], Knobs.lossless(4), rounds, temperature=0.01, seed=4, max_tokens=30)
    assert done.accepted < done.examined and done.token_ids == plain.token_ids
    assert all(np.isfinite(t.tv).all() for t in rounds)


@pytest.mark.parametrize("start", range(6, 13))
def test_a_sliding_window_decodes_like_plain_greedy_across_its_edge(start: int) -> None:
    target = tiny(MistralForCausalLM, MistralConfig, sliding_window=8)
    often_wrong = tiny(MistralForCausalLM, MistralConfig, seed=2, sliding_window=8)
    prompt = torch.randint(0, 40, (1, start), generator=torch.Generator().manual_seed(start))
    with torch.inference_mode():
        mask = torch.ones_like(prompt)
        reference = target.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=24)[0, start:].tolist()
    for drafter in (ModelDrafter(target), ModelDrafter(often_wrong), NgramDrafter()):
        done = run(Engine(target, drafter), prompt[0].tolist(), Knobs.lossless(4), temperature=0.0, max_tokens=24)
        assert done.token_ids == reference


# -- caches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("g", range(1, 9))
def test_a_model_drafting_for_itself_is_always_accepted(g: int) -> None:
    model = pair().target if g == 4 else tiny(max_position_embeddings=400)
    prompt = prompts(1)[0] if g == 4 else list(range(8))
    done = run(Engine(model, ModelDrafter(model)), prompt, Knobs.lossless(g), temperature=0.0, max_tokens=300)
    assert len(done.token_ids) == 300 and done.accepted == done.examined == done.drafted
    assert done.target_passes == math.ceil(300 / (g + 1))


@torch.inference_mode()
def test_speculative_is_plain_greedy_and_coarse_rounding_shows_only_at_near_ties() -> None:
    """50 prompts. fp32: identical. bf16: the first difference, if any, is where the best two nearly tie."""
    margins = []
    params = SamplingParams(temperature=0.0, max_tokens=10)
    half = load_pair(torch.bfloat16)
    for decoder, coarse in ((engine(), False), (Engine(half.target, ModelDrafter(half.draft)), True)):
        texts: dict[int, dict[str, list[int]]] = {0: {}, 4: {}}
        for g, of in texts.items():
            for start in range(0, 50, 10):
                batch = Batch(decoder, 10)
                for i in range(start, start + 10):
                    batch.add(Request(str(i), prompts(50)[i], params), lambda g=g: Knobs.lossless(g))
                while batch.rows:
                    for done in batch.step():
                        of[done.request.request_id] = done.token_ids
                        assert done.touches == 0 and done.arm == "untouched"
        for i, prompt in enumerate(prompts(50)):
            plain, fast = (of[str(i)] for of in texts.values())
            if plain != fast:
                assert coarse
                at = next(j for j, (a, b) in enumerate(zip(plain, fast, strict=False)) if a != b)
                law = pair().target(torch.tensor([[*prompt, *plain[:at]]])).logits[0, -1]
                margins.append(float(law[plain[at]] - law[fast[at]]))
    assert all(abs(margin) < 0.25 for margin in margins), margins  # bf16 keeps 8 bits: 1/16 at a logit of 10


@pytest.mark.parametrize("knobs", [Knobs.lossless(4), LENIENT, replace(LENIENT, holdback=1.0)])
def test_after_every_round_the_caches_hold_what_was_committed(knobs: Knobs, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    play = Rows.round

    def watched(self: Rows, *rest: Any) -> None:
        play(self, *rest)
        (row,), drafts = self.rows, self._drafts
        assert self._cache.lengths[0] == len(row.tokens) - 1 or row.finish_reason
        if not row.finish_reason and isinstance(drafts, ModelRowDrafts):
            seen.add(drafts.lengths[0] - len(row.tokens))

    monkeypatch.setattr(Rows, "round", watched)
    for seed, prompt in enumerate(prompts(3)):
        run(engine(), prompt, knobs, seed=seed, temperature=1.5, max_tokens=50)
    assert seen == {-1, -2}  # rounds with a rejection, and rounds without


# -- knobs -------------------------------------------------------------------------------------------------------------


def test_knobs_are_asked_once_per_round_and_obeyed_at_once() -> None:
    asked = []

    def knobs() -> Knobs:
        asked.append(
            Knobs(g=len(asked) % 4, rule="token_v3", theta=0.8 if len(asked) > 3 else 0.0, lease_seq=len(asked))
        )
        return asked[-1]

    rounds = Rounds()
    run(engine(), prompts(1)[0], knobs, rounds, max_tokens=40)
    assert [t.knobs for t in rounds] == asked
    assert all(t.width <= t.knobs.g for t in rounds) and [t.width for t in rounds[:4]] == [0, 1, 2, 3]
    assert not any((t.flags & TOUCH).any() for t in rounds[:4])


def test_exploring_drafts_one_longer_block_with_the_stated_probability() -> None:
    always, sometimes = Rounds(), Rounds()
    run(engine(), prompts(1)[0], replace(LENIENT, explore=1.0), always, max_tokens=60)
    assert always[0].width == 5
    two = Engine(tiny(), ModelDrafter(tiny(seed=2)))
    for seed in range(3):
        run(two, [1, 2, 3], Knobs(g=2, explore=0.3), sometimes, seed=seed)
    longer = sum(t.width == 3 for t in sometimes) / sum(t.width >= 2 for t in sometimes)
    assert 0.15 < longer < 0.45  # about 180 rounds: 4 standard errors either way


@pytest.mark.parametrize("rule", ["chow", "diff", "opt", "token_v1"])
def test_rules_that_trust_the_draft_s_confidence_are_refused_with_ngrams(rule: str) -> None:
    with pytest.raises(ModelError, match="always certain"):
        engine("ngram").check_rule(rule)
    with pytest.raises(ModelError, match="always certain"):
        run(engine("ngram"), prompts(1)[0], Knobs(g=2, rule=rule, theta=0.5))
    assert engine().check_rule(rule).name == rule


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ModelError, match="unknown accept rule"):
        engine().check_rule("nope")


# -- coupling, holdback, forks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [{"theta": 0.0}, {"rho": 0.0}, {"rule": "lossless"}])
def test_each_way_to_say_lossless_gives_the_lossless_text(off: dict[str, Any]) -> None:
    for seed, prompt in enumerate(prompts(3)):
        done = coupled(prompt, seed, **off)
        assert done.token_ids == run(engine(), prompt, Knobs.lossless(4), seed=seed, max_tokens=CAP).token_ids
        assert done.arm == "untouched" and done.touches == 0 and done.fork_point is None


def test_untouched_requests_have_their_lossless_text_and_touched_ones_share_it_up_to_the_touch() -> None:
    arms = set()
    for seed, prompt in enumerate(prompts(8)):
        done = coupled(prompt, seed, rule="forgive", theta=0.08)
        plain = run(engine(), prompt, Knobs.lossless(4), seed=seed, max_tokens=CAP)
        arms.add(done.arm)
        if done.arm == "untouched":
            assert done.token_ids == plain.token_ids and done.first_touch_at is None
        else:
            assert done.fork_point is not None and done.touches >= 1
            assert done.fork_point.token_ids == plain.token_ids[: len(done.fork_point.token_ids)]
            split = len(done.fork_point.token_ids) - 1
            assert done.token_ids[:split] == plain.token_ids[:split]
            assert done.token_ids[split] != plain.token_ids[split]
    assert arms == {"untouched", "lenient"}


def test_holdback_serves_the_lossless_text() -> None:
    for seed, prompt in enumerate(prompts(4)):
        held = coupled(prompt, seed, holdback=1.0)
        plain = run(engine(), prompt, Knobs.lossless(4), seed=seed, max_tokens=CAP)
        assert held.arm == "holdback" and held.touches == 1
        assert held.token_ids == plain.token_ids and held.target_passes == plain.target_passes


@pytest.mark.parametrize("explore", [0.0, 0.3])
@pytest.mark.parametrize("rule", ["token_v3", "forgive"])
def test_the_fork_is_what_the_other_coin_would_have_served(rule: str, explore: float) -> None:
    both = 0
    for seed, prompt in enumerate(prompts(4)):
        changes: dict[str, Any] = {"rule": rule, "theta": 0.8 if rule == "token_v3" else 0.3, "explore": explore}
        lenient, held = (coupled(prompt, seed, holdback=h, **changes) for h in (0.0, 1.0))
        if lenient.arm == "untouched":
            continue
        both += 1
        of_lenient, of_held = engine().fork(lenient), engine().fork(held)
        assert of_lenient.token_ids == held.token_ids and of_lenient.finish_reason == held.finish_reason
        assert of_held.token_ids == lenient.token_ids and of_held.finish_reason == lenient.finish_reason
        assert of_lenient.touches == of_held.touches == lenient.touches
    assert both >= 2


def test_a_fork_that_ends_at_its_point_runs_no_model() -> None:
    """Where the other outcome at the touch is an end token, there is nothing left to decode."""
    done = coupled(prompts(1)[0], 0)
    assert done.fork_point is not None
    ended = done.fork_point._replace(token_ids=[*done.fork_point.token_ids[:-1], EOS])
    result = engine().fork(replace(done, fork_point=ended))
    assert result.token_ids == ended.token_ids
    assert result.target_passes == 0 and result.finish_reason == "stop"


def test_an_untouched_request_has_no_fork() -> None:
    with pytest.raises(ValueError, match="never touched"):
        engine().fork(run(engine(), prompts(1)[0], Knobs.lossless(4)))


def test_coins_fall_at_the_first_touch_with_the_probabilities_in_force_there() -> None:
    before, after = (replace(LENIENT, theta=t, holdback=h, fork=1.0, label=h, lease_seq=s)
                     for t, h, s in ((0.0, 0.9, 1), (0.8, 0.0, 2)))  # fmt: skip
    asked = iter([before, before])
    done = run(engine(), prompts(1)[0], lambda: next(asked, after))
    assert done.arm == "lenient" and done.knobs == after
    assert (done.holdback_prob, done.fork_prob, done.label_prob) == (0.0, 1.0, 0.0)
    assert done.fork_drawn and not done.label_drawn and done.first_touch_at is not None


def test_coins_are_fair_and_independent_of_each_other() -> None:
    """Each coin and each pair's correlation within 4 standard errors (chance to fail: 4e-4 in all)."""
    knobs = Knobs(g=4, rule="threshold", theta=1.0, holdback=0.5, fork=0.5, label=0.5)
    two = Engine(tiny(), ModelDrafter(tiny(seed=2)))
    done = [run(two, list(range(8)), knobs, seed=seed, max_tokens=5) for seed in range(140)]
    touched = [c for c in done if c.arm != "untouched"]
    tosses = np.array([(c.arm == "holdback", c.fork_drawn, c.label_drawn) for c in touched], float)
    assert len(touched) > 80
    assert np.all(np.abs(tosses.mean(0) - 0.5) < 4 * 0.5 / math.sqrt(len(touched)))
    assert np.all(np.abs(np.corrcoef(tosses.T)[np.triu_indices(3, 1)]) < 4 / math.sqrt(len(touched)))


def test_a_pinned_request_is_lossless_and_says_so() -> None:
    rounds = Rounds()
    done = run(engine(), prompts(1)[0], LENIENT, rounds, pinned=True)
    assert done.token_ids == run(engine(), prompts(1)[0], Knobs.lossless(4)).token_ids
    assert done.arm == "untouched"
    assert all((t.flags & PINNED).all() and not t.theta.any() for t in rounds)


# -- telemetry ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def observed() -> tuple[list[Completion], list[Rounds]]:
    """Six requests, half of them held back at their first touch."""
    done, traces = [], []
    for seed, prompt in enumerate(prompts(6)):
        traces.append(Rounds())
        done.append(
            run(engine(), prompt, replace(LENIENT, holdback=float(seed % 2)), traces[-1], seed=seed, max_tokens=CAP)
        )
    return done, traces


def test_traces_add_up_to_the_completion(observed: tuple[list[Completion], list[Rounds]]) -> None:
    for done, rounds in zip(*observed, strict=True):
        flags = np.concatenate([t.flags for t in rounds])
        assert sum(t.emitted for t in rounds) == len(done.token_ids)
        assert len(rounds) == done.target_passes and sum(t.width for t in rounds) == len(flags) == done.drafted
        assert np.count_nonzero(flags & EXAMINED) == done.examined
        assert np.count_nonzero(flags & ACCEPTED) == done.accepted
        assert np.count_nonzero(flags & TOUCH) == done.touches
        assert [t.prefill > 0 for t in rounds] == [True] + [False] * (len(rounds) - 1)
        seconds = sum(t.draft_s + t.verify_s + t.overhead_s for t in rounds)
        assert 0.5 * done.total_s < seconds <= done.total_s and all(t.overhead_s > 0 for t in rounds)


def test_flags_follow_from_the_scalars_and_the_knob_that_was_in_force(
    observed: tuple[list[Completion], list[Rounds]],
) -> None:
    for done, rounds in zip(*observed, strict=True):
        held = False
        for t in rounds:
            s = Scalars(**{name: getattr(t, name) for name in Scalars._fields})
            a0, a = accept_prob(get_rule("token_v3"), s, 0.0), accept_prob(get_rule("token_v3"), s, t.theta)
            touch, accepted = (t.flags & TOUCH) > 0, (t.flags & ACCEPTED) > 0
            assert np.all(a[touch] > a0[touch]) and np.all(a[accepted] > 0)
            examined = (t.flags & EXAMINED) > 0
            n = int(examined.sum())
            assert examined[:n].all() and accepted[: n - 1].all()  # one run, of which only the last may be rejected
            assert np.all(t.theta == 0) if held else np.all(t.theta[:n] == np.float32(0.8))
            if done.arm == "holdback" and touch.any():
                held = True
                assert not accepted[touch].any() and np.all(t.theta[n:] == 0)


@torch.inference_mode()
def test_scalars_are_those_of_the_models_at_every_drafted_position() -> None:
    rounds, prompt = Rounds(), prompts(1)[0]
    done = run(engine(), prompt, Knobs.lossless(3), rounds, temperature=0.7, top_k=20, max_tokens=30)
    text, start = [*prompt, *done.token_ids], len(prompt)
    for t in rounds:
        laws = {}
        for who, model in (("target", pair().target), ("draft", pair().draft)):
            logits = model(torch.tensor([text[:start]])).logits[0, -1]
            top = (logits / 0.7).masked_fill(logits < logits.topk(20).values[-1], -math.inf)
            laws[who] = logits.softmax(-1), top.softmax(-1)
        if t.width:
            tv = 0.5 * (laws["target"][1] - laws["draft"][1]).abs().sum()
            assert t.tv[0] == pytest.approx(float(tv), abs=1e-4)
            for who in laws:
                assert getattr(t, f"{who}_max_raw")[0] == pytest.approx(float(laws[who][0].max()), abs=1e-4)
            if t.flags[0] & ACCEPTED:
                for who in laws:
                    assert getattr(t, f"{who}_prob_raw")[0] == pytest.approx(float(laws[who][0][text[start]]), abs=1e-4)
                    assert getattr(t, f"{who}_prob")[0] == pytest.approx(float(laws[who][1][text[start]]), abs=1e-4)
        start += t.emitted


def test_a_trace_has_every_column_of_a_token_block() -> None:
    rounds = Rounds()
    run(engine(), prompts(1)[0], LENIENT, rounds, max_tokens=20)
    names = {f.name for f in fields(RoundTrace)}
    assert set(TokenBlock.POSITION_COLUMNS) - {"request", "round", "position"} <= names
    for name in set(TokenBlock.POSITION_COLUMNS) & names:
        column = getattr(rounds[0], name)
        assert column.shape == (rounds[0].width,) and np.all(column >= 0)
        assert column.dtype == (np.uint8 if name == "flags" else np.float32)


def test_requests_are_told_apart() -> None:
    rounds = Rounds()
    request = Request("abc", prompts(1)[0], SamplingParams(max_tokens=9), traffic_class="chat")
    engine().generate(request, lambda: LENIENT, rounds)
    assert all((t.request_id, t.traffic_class) == ("abc", "chat") for t in rounds)


def test_models_on_another_device_are_refused() -> None:
    with pytest.raises(ModelError, match="move it there first"):
        Engine(tiny(), None, device="meta")
