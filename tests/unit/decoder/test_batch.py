"""Rows of a batch: each equals its run alone, they come and go, and telemetry adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from controller.costs import CostModel
from decoder.batch import Batch
from decoder.cache import CachedModel
from decoder.drafters import ModelDrafter, NgramDrafter
from decoder.drafters.model import ModelRowDrafts
from decoder.generate import Completion, Engine, Knobs, Request, SamplingParams
from decoder.telemetry import Round, pack
from policies.errors import ModelError
from storage.records import ACCEPTED, EXAMINED, TOUCH
from tests.decoding import Rounds, engine, prompts, run, tiny

LENIENT = Knobs(g=4, rule="token_v3", theta=0.8)


def play(batch: Batch, requests: Sequence[tuple[Request, Knobs]], observer: Any = None) -> dict[str, Completion]:
    """Decode all requests, each joining as soon as there is room."""
    waiting, done = list(requests), {}
    while waiting or batch.rows:
        while waiting and batch.free:
            request, knobs = waiting.pop(0)
            batch.add(request, lambda knobs=knobs: knobs, observer)
        for completion in batch.step():
            done[completion.request.request_id] = completion
    return done


def counts(done: Completion) -> tuple[Any, ...]:
    return (
        done.token_ids,
        done.finish_reason,
        done.arm,
        done.touches,
        done.target_passes,
        done.drafted,
        done.examined,
        done.accepted,
        done.fork_point,
    )


def of_all_kinds(n: int) -> list[tuple[Request, Knobs]]:
    """Requests that differ in everything a row may differ in."""
    requests = []
    for i in range(n):
        params = SamplingParams(
            seed=i,
            max_tokens=(20, 30, 15)[i % 3],
            temperature=(1.0, 0.0, 0.7)[i % 3],
            top_k=(0, 9)[i % 2],
            top_p=(1.0, 0.9, 0.8)[i // 2 % 3],
            min_p=(0.0, 0.02)[i // 3 % 2],
            logit_bias={5: 1.5} if i % 4 == 3 else {},
        )
        rule, theta = (("token_v3", 0.8), ("lossless", 0.0), ("forgive", 0.2))[i % 3]
        knobs = Knobs(g=i % 6, rule=rule, theta=theta, rho=(1.0, 0.5)[i % 2], holdback=(0.0, 1.0)[i % 2], explore=0.1)
        requests.append((Request(f"r{i}", prompts(12)[i], params, traffic_class=("chat", "code")[i % 2]), knobs))
    return requests


# -- equality ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_every_row_is_what_it_is_alone_though_rows_differ_in_everything(drafter: str) -> None:
    """fp32, seeded: no near-tie among these texts, so that rounding does not show (see `Batch`)."""
    requests = of_all_kinds(8)
    done = play(Batch(engine(drafter), 4), requests)
    touched = 0
    for request, knobs in requests:
        alone = engine(drafter).generate(request, lambda knobs=knobs: knobs)
        assert counts(done[request.request_id]) == counts(alone)
        touched += alone.touches
    assert touched


def test_a_seed_gives_its_text_alone_again_and_among_other_seeds() -> None:
    """Temperature 2, so that any slip in a draw shows."""
    hot = {"temperature": 2.0, "max_tokens": 40}
    alone, again = (run(engine(), prompts(1)[0], LENIENT, seed=42, **hot).token_ids for _ in range(2))
    others = [(Request(f"s{s}", prompts(1)[0], SamplingParams(seed=s, **hot)), LENIENT) for s in (7, 42, 1, 99)]
    together = play(Batch(engine(), 4), others)
    assert alone == again == together["s42"].token_ids
    assert len({tuple(done.token_ids) for done in together.values()}) == 4


@pytest.mark.parametrize("kind", ["all layers", "every other layer"])
def test_sliding_windows_decode_like_plain_greedy_across_their_edge(kind: str) -> None:
    if kind == "all layers":
        target, wrong = (tiny(MistralForCausalLM, MistralConfig, seed, sliding_window=8) for seed in (1, 2))
    else:
        mixed = {"sliding_window": 8, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
        target, wrong = (tiny(Gemma2ForCausalLM, Gemma2Config, seed, **mixed) for seed in (1, 2))
        for model in (target, wrong):
            model.set_attn_implementation("eager")  # its logits are capped, which sdpa cannot do
    texts = [torch.randint(0, 40, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(6, 13)]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    plain = [run(Engine(target, None), text, Knobs.lossless(0), temperature=0.0, max_tokens=20) for text in texts]
    for drafter in (ModelDrafter(target), ModelDrafter(wrong), NgramDrafter()):
        requests = [(Request(str(i), text, params), Knobs.lossless(4)) for i, text in enumerate(texts)]
        done = play(Batch(Engine(target, drafter), 4), requests)
        assert [done[str(i)].token_ids for i in range(len(texts))] == [reference.token_ids for reference in plain]


def test_a_row_may_stop_drafting_and_go_on_later() -> None:
    """The draft model has to catch up then, while the other rows go on."""
    asked = iter(range(1000))

    def on_and_off() -> Knobs:
        return Knobs.lossless(4 if next(asked) % 6 in (0, 1) else 0)

    batch, done = Batch(engine(), 2), []
    batch.add(Request("a", prompts(2)[0], SamplingParams(seed=1, max_tokens=40)), on_and_off)
    batch.add(Request("b", prompts(2)[1], SamplingParams(seed=2, max_tokens=40)), lambda: Knobs.lossless(3))
    while batch.rows:
        done += batch.step()
    texts = {c.request.request_id: c for c in done}
    asked = iter(range(1000))
    assert (
        counts(texts["a"]) == counts(run(engine(), prompts(2)[0], on_and_off, seed=1, max_tokens=40))
        and texts["a"].drafted
    )
    assert texts["b"].token_ids == run(engine(), prompts(2)[1], Knobs.lossless(3), seed=2, max_tokens=40).token_ids


def test_a_draft_with_a_short_context_only_stops_drafting() -> None:
    target, draft = tiny(max_position_embeddings=80), tiny(seed=2, max_position_embeddings=24)
    params = SamplingParams(temperature=0.0, max_tokens=30)
    texts = [list(range(n)) for n in (3, 8, 15)]
    requests = [(Request(str(i), text, params), Knobs.lossless(4)) for i, text in enumerate(texts)]
    done = play(Batch(Engine(target, ModelDrafter(draft)), 3), requests)
    for i, text in enumerate(texts):
        plain = run(Engine(target, None), text, Knobs.lossless(0), temperature=0.0, max_tokens=30)
        assert done[str(i)].token_ids == plain.token_ids


@pytest.mark.parametrize("own", [True, False])
def test_after_every_round_both_caches_hold_what_was_committed(own: bool) -> None:
    target = tiny()
    batch = Batch(Engine(target, ModelDrafter(target if own else tiny(seed=2))), 3)
    params = SamplingParams(temperature=0.0, max_tokens=100)
    for i in range(3):
        batch.add(Request(str(i), list(range(3 + 4 * i)), params), lambda i=i: Knobs.lossless(2 + 3 * i))
    accepted = []
    while batch.rows:
        accepted += [done.accepted / done.examined for done in batch.step()]
        rows = batch._rows
        assert rows._cache.lengths[: len(rows.rows)] == [len(row.tokens) - 1 for row in rows.rows]
        assert isinstance(rows._drafts, ModelRowDrafts)
        for length, row in zip(rows._drafts.lengths, rows.rows, strict=True):
            assert length in (len(row.tokens) - 1, len(row.tokens) - 2)
    assert accepted == [1.0] * 3 if own else max(accepted) < 0.5


def test_end_tokens_on_the_device_give_what_looking_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, on the CPU: the block is not cut short while drafting, and widths come out of the round's table.

    Also counted: the host reads from the device once in a round.
    """
    requests = [
        (Request(f"r{i}", prompts(6)[i], SamplingParams(seed=i, max_tokens=90)), Knobs.lossless(5)) for i in range(6)
    ]
    looked = play(Batch(engine(), 3), requests)
    reads = [0]

    def counted(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any) -> Any:
            reads[0] += 1
            return original(self, *args)

        return read

    batch = Batch(engine(), 3)
    assert isinstance(batch._rows._drafts, ModelRowDrafts)
    batch._rows._drafts._looks = False
    for name in ("tolist", "item", "__bool__", "__int__", "__index__", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    rounds = [0]
    played = batch._rows.round

    def round_(*args: Any) -> None:
        rounds[0] += 1
        played(*args)

    monkeypatch.setattr(batch._rows, "round", round_)
    blind = play(batch, requests)
    monkeypatch.undo()
    assert any(done.finish_reason == "stop" for done in blind.values())
    for name, done in looked.items():
        assert done.token_ids == blind[name].token_ids and done.accepted == blind[name].accepted
        assert done.examined == blind[name].examined and done.drafted == blind[name].drafted
    assert reads[0] == rounds[0]


# -- coming and going --------------------------------------------------------------------------------------------------


def test_a_full_batch_refuses_and_a_finished_row_makes_room() -> None:
    batch = Batch(engine(), 2)
    for i in range(2):
        batch.add(Request(str(i), prompts(2)[i], SamplingParams(max_tokens=2 + 20 * i)), lambda: Knobs.lossless(0))
    assert (batch.rows, batch.free) == (2, 0)
    with pytest.raises(RuntimeError, match="2 rows already"):
        batch.add(Request("x", prompts(1)[0], SamplingParams()), lambda: LENIENT)
    assert batch.step() == []
    assert [done.request.request_id for done in batch.step()] == ["0"]
    assert (batch.rows, batch.free) == (1, 1)


def test_requests_that_cannot_be_served_leave_the_batch_as_it_was() -> None:
    batch = Batch(engine(), 2)
    batch.add(Request("a", prompts(1)[0], SamplingParams()), lambda: LENIENT)
    for bad, why in (
        (Request("b", [700], SamplingParams()), "prompt_ids"),
        (Request("b", [1], SamplingParams(stop=("x",))), "detokenize"),
        (Request("b", [1], SamplingParams(logit_bias={9999: 1.0})), "logit_bias"),
        (Request("a", [1], SamplingParams()), "already"),
    ):
        with pytest.raises(ValueError, match=why):
            batch.add(bad, lambda: LENIENT)
    assert batch.rows == 1


def test_a_cancelled_row_is_free_at_once_and_the_others_do_not_notice() -> None:
    requests = of_all_kinds(4)
    batch, done = Batch(engine(), 4), {}
    for request, knobs in requests[:3]:
        batch.add(request, lambda knobs=knobs: knobs)
    batch.step()
    batch.add(requests[3][0], lambda: requests[3][1])
    assert batch.cancel("r3") is None and batch.cancel("nobody") is None  # had no round yet; is not there
    cancelled = batch.cancel("r0")
    assert cancelled is not None and cancelled.finish_reason == "cancelled"
    assert batch.rows == 2 and batch.cancel("r0") is None
    while batch.rows:
        done |= {c.request.request_id: c for c in batch.step()}
    for request, knobs in requests[:3]:
        alone = engine().generate(request, lambda knobs=knobs: knobs)
        if request.request_id == "r0":
            assert cancelled.token_ids == alone.token_ids[: len(cancelled.token_ids)] != alone.token_ids
        else:
            assert counts(done[request.request_id]) == counts(alone)


def test_listeners_hear_every_token_once_and_in_order() -> None:
    batch, heard, done = Batch(engine(), 3), {str(i): [] for i in range(3)}, []
    for name, tokens in heard.items():
        request = Request(name, prompts(3)[int(name)], SamplingParams(seed=int(name), max_tokens=30))
        batch.add(request, lambda: LENIENT, None, lambda ids, _, tokens=tokens: tokens.extend(ids))
    while batch.rows:
        done += batch.step()
        for c in done:
            assert heard[c.request.request_id] == c.token_ids  # before `step` returns


def test_a_rule_that_is_refused_costs_only_the_request_that_asked_for_it() -> None:
    batch = Batch(engine("ngram"), 2)
    batch.add(Request("good", prompts(2)[0], SamplingParams(max_tokens=20)), lambda: LENIENT)
    batch.step()
    batch.add(Request("bad", prompts(2)[1], SamplingParams()), lambda: replace(LENIENT, rule="chow"))
    with pytest.raises(ModelError, match="always certain"):
        batch.step()
    assert batch.rows == 1
    done = []
    while batch.rows:
        done += batch.step()
    assert done[0].token_ids == run(engine("ngram"), prompts(2)[0], LENIENT, max_tokens=20).token_ids


def test_a_batch_has_at_least_one_row() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        Batch(engine(), 0)


# -- models that cannot ------------------------------------------------------------------------------------------------


def test_models_that_cannot_read_rows_of_different_lengths_are_refused_but_for_batches_of_one() -> None:
    alibi = {"vocab_size": 40, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(**alibi, bos_token_id=None, eos_token_id=None)).eval()
    with pytest.raises(ModelError, match="batches of one row"):
        Batch(Engine(bloom, None), 2)
    done = play(Batch(Engine(bloom, None), 1), [(Request("a", [3, 4], SamplingParams(max_tokens=5)), LENIENT)])
    assert len(done["a"].token_ids) == 5
    other = tiny()
    other.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match="attn_implementation='sdpa'"):
        Batch(Engine(other, None), 2)


def test_a_model_that_reads_rows_wrongly_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ignores the mask, say."""
    model = CachedModel(tiny())
    forward = CachedModel.forward

    def careless(self: CachedModel, ids: Any, cache: Any, keep: int, positions: Any, mask: Any) -> torch.Tensor:
        blank = None if mask is None else {kind: torch.zeros_like(m) for kind, m in mask.items()}
        return forward(self, ids, cache, keep, positions, blank)

    monkeypatch.setattr(CachedModel, "forward", careless)
    with pytest.raises(ModelError, match="differ from rows read alone"):
        model.new_rows(2)


@pytest.mark.parametrize("compiler", [None, "eager"])
def test_a_static_cache_decodes_the_same(compiler: str | None) -> None:
    torch.compiler.reset()
    target, draft = tiny(num_hidden_layers=1), tiny(seed=2, num_hidden_layers=1)
    options: dict[str, Any] = {"static_length": 40, "compiler": compiler}
    graphs = torch._dynamo.utils.counters["stats"]
    static = Engine(target, ModelDrafter(draft, **options), **options)
    dynamic = Engine(target, ModelDrafter(draft))
    params = {"temperature": 0.0, "max_tokens": 12}
    done = run(static, list(range(20)), Knobs.lossless(1), **params)
    assert done.token_ids == run(dynamic, list(range(20)), Knobs.lossless(1), **params).token_ids
    made = graphs["unique_graphs"]
    assert 1 <= made <= 4 if compiler else not made  # one for each width and model at most, however many passes
    if compiler is None:
        requests = [(Request(str(n), list(range(n)), SamplingParams(**params)), Knobs.lossless(n)) for n in (2, 5)]
        rows = play(Batch(static, 2), requests)
        for request, knobs in requests:
            alone = dynamic.generate(request, lambda knobs=knobs: knobs)
            assert rows[request.request_id].token_ids == alone.token_ids
        assert (
            len(run(static, list(range(30)), Knobs.lossless(2), temperature=0.0).token_ids) == 10
        )  # its length ends it


def test_a_compiled_pass_needs_a_static_cache() -> None:
    with pytest.raises(ModelError, match="static_length"):
        Engine(tiny(), None, compiler="inductor")


def test_bfloat16_rows_decode() -> None:
    """Not equal to single rows: rounding is coarse. That all of it is legal is what can be said."""
    half = Engine(tiny().bfloat16(), ModelDrafter(tiny(seed=2).bfloat16()))
    requests = [(Request(str(i), list(range(2 + i)), SamplingParams(seed=i, max_tokens=20)), LENIENT) for i in range(3)]
    done = play(Batch(half, 3), requests)
    assert all(len(c.token_ids) == 20 and max(c.token_ids) < 40 for c in done.values())


# -- telemetry ---------------------------------------------------------------------------------------------------------


def test_traces_of_a_batch_add_up() -> None:
    traces = Rounds()
    knobs = replace(LENIENT, lease_seq=1)
    requests = [
        (Request(f"r{i}", prompts(12)[i], SamplingParams(seed=i, max_tokens=60), ("chat", "code")[i % 2]), knobs)
        for i in range(12)
    ]
    done = play(Batch(engine(), 4), requests, traces)
    for name, completion in done.items():
        own = [t for t in traces if t.request_id == name]
        flags = np.concatenate([t.flags for t in own])
        assert len(own) == completion.target_passes and sum(t.emitted for t in own) == len(completion.token_ids)
        assert [t.prefill > 0 for t in own] == [True] + [False] * (len(own) - 1) and own[0].rows == 1
        for bit, count in ((EXAMINED, "examined"), (ACCEPTED, "accepted"), (TOUCH, "touches")):
            assert np.count_nonzero(flags & bit) == getattr(completion, count)
        assert sum(t.width for t in own) == completion.drafted
    together = [t for t in traces if t.rows == 4]
    assert len(together) == 4 * sum(t.timed for t in together)  # one of the four speaks
    assert all((t.verify_s > 0) == t.timed == (t.widest is not None) for t in traces)
    assert {t.traffic_class for t in together if t.timed} == {"chat", "code"}  # they take turns

    blocks = pack([Round(t.traffic_class, t) for t in traces], pool="p", worker="w", boot="b", first_seq=0)
    passes = sum(completion.target_passes for completion in done.values())
    assert sum(int(block.round_rows.sum()) for block in blocks) == passes == len(traces)
    seconds = sum(float(b.round_verify_s.sum()) for b in blocks)
    assert seconds == pytest.approx(sum(t.verify_s for t in traces), rel=1e-5)
    for block in blocks:
        assert len(set(zip(block.round.tolist(), block.request.tolist(), strict=True))) == len(
            set(block.round.tolist())
        )
    costs = CostModel(8)
    for block in blocks:
        costs.add(block)
    assert 4 in costs.seen_buckets and 1 not in costs.seen_buckets
