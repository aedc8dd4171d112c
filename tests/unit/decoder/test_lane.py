"""The lane is the strategy itself, a step at a time: the same text, coins and forks; it can stop between steps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from decoder.forks import ForkRun
from decoder.knobs import LeaseReader
from decoder.lane import Lane
from decoder.request import Completion, Knobs, Request
from decoder.sampling import SamplingParams
from decoder.strategies import STRATEGIES, Models, StrategyCompletion, fork_steps, usable
from decoder.telemetry import TelemetrySender
from decoder.worker import Task, Worker
from storage.records import ForkRecord, KnobRow, Lease, RequestRecord
from tests.decoding import engine, prompts
from tests.support_serving import Leases, Stream

LENIENT = {name: Knobs(g=4, rule=(s.rules or ("lossless",))[0], theta=0.6) for name, s in STRATEGIES.items()}


def ask(i: int = 0, n: int = 24, **options: object) -> Request:
    return Request(f"r{i}", prompts(8)[i], SamplingParams(max_tokens=n, seed=i), **options)  # type: ignore[arg-type]


def models() -> Models:
    return Models.of(engine())


def through(lane: Lane) -> tuple[Completion, int]:
    """Step until the request is done."""
    for steps in range(1, 500):
        done = lane.step()
        if done:
            return done[0], steps
    raise AssertionError("the request does not end")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_decodes_in_the_lane_as_it_does_by_itself_and_so_does_its_fork(strategy: str) -> None:
    lane, knobs, parts = Lane(models()), LENIENT[strategy], []
    lane.add(ask(), lambda: knobs, None, lambda ids, _: parts.append(ids), strategy)
    with pytest.raises(RuntimeError, match="already"):
        lane.add(ask(), lambda: knobs)
    done, steps = through(lane)
    alone = STRATEGIES[strategy].generate(models(), ask(), lambda: knobs)
    same = ("token_ids", "arm", "touches", "target_passes", "drafted", "confidence", "knobs", "finish_reason")
    assert [getattr(done, name) for name in same] == [getattr(alone, name) for name in same]
    assert [token for part in parts for token in part] == done.token_ids
    assert steps > 1 and lane.free == 1
    if done.fork_point is not None:
        branch, result = ForkRun(fork_steps(models(), done)), None
        while result is None:
            result = branch.step()
        whole = STRATEGIES[strategy].fork(models(), done)
        assert replace(result, total_s=0.0) == replace(whole, total_s=0.0)


def test_a_request_that_is_given_up_says_what_was_decided() -> None:
    lane, knobs = Lane(models()), replace(LENIENT["token_cascade"], rule="chow")
    lane.add(ask(), lambda: knobs, None, None, "token_cascade")
    assert lane.cancel("other") is None and lane.rows == 1
    for _ in range(3):
        assert lane.step() == []
    given_up = lane.cancel("r0")
    assert given_up is not None and given_up.finish_reason == "cancelled" and len(given_up.token_ids) >= 3
    assert lane.free == 1 and lane.step() == []
    lane.add(ask(), lambda: LENIENT["sequence_cascade"], None, None, "sequence_cascade")
    lane.step()  # the draft has begun to answer: nothing was decided
    assert lane.cancel("r0") is None


def test_what_cannot_be_served_is_refused_at_once() -> None:
    lane = Lane(models())
    with pytest.raises(ValueError, match="prompt_ids"):
        lane.add(Request("r", [], SamplingParams()), lambda: LENIENT["bild"], None, None, "bild")
    assert lane.free == 1


@pytest.mark.parametrize("strategy", ["sequence_cascade", "speculative_sequence_cascade", "draft_only"])
def test_confidence_and_the_time_of_the_draft_are_told_whether_it_was_believed_or_not(strategy: str) -> None:
    """So from one knob the whole curve can be read: what would have been believed at any other."""
    said = []
    for theta in (1e-6, 1.0):
        done = STRATEGIES[strategy].generate(models(), ask(), lambda t=theta: replace(LENIENT[strategy], theta=t))
        assert isinstance(done, StrategyCompletion) and done.draft_s > 0 and done.confidence is not None
        said.append((done.arm, done.confidence))
    (arm, low), (lenient, high) = said
    assert lenient == "lenient" and low == high
    assert arm == ("lenient" if strategy == "draft_only" else "untouched")
    held = STRATEGIES[strategy].generate(models(), ask(), lambda: replace(LENIENT[strategy], theta=1.0, holdback=1.0))
    assert held.confidence == high and held.draft_s > 0
    lossless = STRATEGIES[strategy].generate(models(), ask(), lambda: Knobs.lossless(4))
    assert lossless.confidence is None and lossless.draft_s == 0


def test_an_answer_that_cannot_be_served_has_no_confidence() -> None:
    class Nowhere:
        def lenient_mask(self, output_ids: list[int], block: list[int]) -> list[bool]:
            return [False] * len(block)

    cascade, knobs = STRATEGIES["sequence_cascade"], replace(LENIENT["sequence_cascade"], theta=1.0)
    done = cascade.generate(models(), ask(spans=Nowhere()), lambda: knobs)
    assert (done.confidence, done.arm) == (0.0, "untouched")
    free = cascade.generate(models(), ask(spans=Nowhere()), lambda: replace(knobs, structured=True))
    assert free.arm == "lenient" and free.confidence is not None and free.confidence > 0


def test_what_the_models_can_do_is_listed_with_the_rules_that_work() -> None:
    able, ngrams = usable(models()), usable(Models.of(engine("ngram")))
    assert able == {name: strategy.rules for name, strategy in STRATEGIES.items()}
    assert set(ngrams) == {"plain", "speculative"} and "chow" not in ngrams["speculative"]
    assert {"threshold", "token_v3"} <= set(ngrams["speculative"])


def test_the_worker_s_own_traffic_follows_the_lease_s_strategy_with_coins_forks_and_confidence() -> None:
    lease = Lease(
        pool="p", traffic_class="default", epoch=1, seq=1, policy_revision=1, issued=0.0, ttl=60.0,
        rule="confidence_min", table=(KnobRow(8, 4, 1.0, 1.0),), strategy="speculative_sequence_cascade",
        holdback=0.5, fork=1.0, label=1.0,
    )  # fmt: skip
    stream, tasks = Stream(), [Task(prompts(8)[i][:20], SamplingParams(max_tokens=12, seed=i)) for i in range(8)]
    sender = TelemetrySender(stream, "p", "w", "b", start=False)
    reader = LeaseReader(Leases(lease), "p", able=usable(models()))
    reader.poll_once()
    source = SimpleNamespace(next=lambda stop: tasks.pop() if tasks else None)
    assert Worker(models(), source, sender, reader, pool="p", worker="w", boot="b").run() == 8
    sender.flush_once()
    requests = [entry for entry in stream.entries if isinstance(entry, RequestRecord)]
    forks = {entry.request_id: entry for entry in stream.entries if isinstance(entry, ForkRecord)}
    assert {r.strategy for r in requests} == {"speculative_sequence_cascade"}
    assert {r.arm for r in requests} == {"lenient", "holdback"} and {r.rule for r in requests} == {"confidence_min"}
    for r in requests:
        assert r.touches == 1 and r.first_touch_at is not None and r.fork_drawn and r.label_drawn
        assert r.confidence is not None and 0 < r.confidence <= 1 and 0 < r.draft_s <= r.total_s
        assert forks[r.request_id].done and (r.target_passes == 0) == (r.arm == "lenient")
        assert (forks[r.request_id].target_passes == 0) == (r.arm == "holdback")
