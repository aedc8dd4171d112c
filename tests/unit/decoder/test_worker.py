"""The worker's order of work: decode, report, fork, score; it says what did not happen and invents nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from decoder.knobs import LeaseReader, trial_coin
from decoder.request import Completion, ForkPoint, ForkResult, Knobs, Request
from decoder.sampling import SamplingParams
from decoder.steps import Steps
from decoder.telemetry import TelemetrySender
from decoder.worker import MAX_FAILURES_IN_A_ROW, Scoring, Task, Worker
from storage.records import (
    ForkRecord,
    KnobRow,
    Lease,
    QualityScore,
    Record,
    RequestRecord,
    Trial,
    from_fields,
    to_fields,
)
from tests.support_serving import Leases

SERVED, FORK = [1, 2, 3], [1, 2, 4, 5]
KNOBS = Knobs(g=4, rule="threshold", theta=0.5, holdback=0.1, fork=1.0, epoch=2, lease_seq=9)
PLAIN: dict[str, Any] = {"arm": "untouched", "touches": 0, "first_touch_at": None, "fork_drawn": False}
TOUCHED: dict[str, Any] = {"arm": "lenient", "touches": 2, "first_touch_at": 50.0, "fork_drawn": True}


class Engine:
    """Gives one prepared completion for every request."""

    def __init__(self, **outcome: Any):
        self.outcome = outcome
        self.during: Callable[[], None] = lambda: None
        self.fails = self.fork_fails = 0
        self.forks = 0

    def steps(self, request: Request, knobs: Callable[[], Knobs], observer: object) -> Steps[Completion]:
        yield from ()
        self.during()
        knobs()
        if self.fails:
            self.fails -= 1
            raise RuntimeError("out of memory")
        point = ForkPoint("holdback", [1, 2, 4], 1, KNOBS) if self.outcome["touches"] else None
        return Completion(
            request=request, token_ids=SERVED, finish_reason="stop", label_drawn=self.outcome.get("label_drawn", False),
            holdback_prob=0.1, fork_prob=1.0, label_prob=0.0, knobs=KNOBS, target_passes=2, drafted=8, examined=3,
            accepted=2, first_token_s=0.01, total_s=0.1, fork_point=point,
            **{k: v for k, v in self.outcome.items() if k != "label_drawn"},
        )  # fmt: skip

    def fork_steps(self, completion: Completion) -> Steps[ForkResult]:
        yield from ()
        self.forks += 1
        if self.fork_fails:
            raise RuntimeError("out of memory")
        return ForkResult(token_ids=FORK, touches=2, target_passes=3, total_s=0.2, finish_reason="length")


class Source:
    """A number of equal tasks."""

    def __init__(self, task: Task, count: int = 1):
        self.tasks = [task] * count

    def next(self, stop: threading.Event) -> Task | None:
        return self.tasks.pop() if self.tasks else None


class Stream:
    def __init__(self) -> None:
        self.entries: list[Record] = []

    def append(self, records: Sequence[Record]) -> int:
        self.entries += [from_fields(to_fields(r)) for r in records]
        return len(records)


def score(token_ids: Sequence[int]) -> float:
    return {tuple(SERVED): 1.0, tuple(FORK): 0.25}[tuple(token_ids)]


SCORING = Scoring("answer_correct", "bundled", "1", score)
TASK = Task([5, 6], SamplingParams(), "code", SCORING)


class Bench:
    """A worker over fakes; ``entries`` is what reached the stream."""

    def __init__(
        self,
        engine: Engine,
        task: Task = TASK,
        count: int = 1,
        max_requests: int | None = None,
        lease: Lease | None = None,
    ):
        self.stream = Stream()
        self.sender = TelemetrySender(self.stream, "p", "w", "b", start=False)
        self.reader = LeaseReader(Leases(lease), "p")
        self.reader.poll_once()
        models = SimpleNamespace(engine=engine, drafter=None)
        self.worker = Worker(
            models, Source(task, count), self.sender, self.reader, pool="p", worker="w", boot="b",
            max_requests=max_requests, wall=lambda: 1000.0,
        )  # type: ignore[arg-type]  # fmt: skip

    def run(self) -> list[Record]:
        self.worker.run()
        self.sender.flush_once()
        return self.stream.entries

    def metric(self, name: str, **labels: str) -> float | None:
        labels = {"class" if key == "traffic_class" else key: value for key, value in labels.items()}
        return self.worker.metrics.registry.get_sample_value(name, labels)


def test_a_request_is_reported_with_the_knobs_and_coins_of_its_touch():
    [record] = Bench(Engine(**{**TOUCHED, "fork_drawn": False})).run()
    assert record == RequestRecord(
        request_id="w.b.1", pool="p", traffic_class="code", worker="w", boot="b", epoch=2, lease_seq=9,
        rule="threshold", theta=0.5, rho=1.0, arm="lenient", holdback_prob=0.1, fork_prob=1.0, label_prob=0.0,
        fork_drawn=False, label_drawn=False, touches=2, first_touch_at=50.0, started=1000.0, prompt_tokens=2, tokens=3,
        target_passes=2, first_token_s=0.01, total_s=0.1, finish_reason="stop",
    )  # fmt: skip


def test_a_request_gets_the_lease_s_strategy_or_by_its_coin_that_of_the_trial_and_the_record_says_which():
    lease = Lease(
        pool="p", traffic_class="code", epoch=2, seq=9, policy_revision=1, issued=0.0, ttl=60.0, rule="threshold",
        table=(KnobRow(8, 4, 0.5, 1.0),), strategy="plain",
        trial=Trial(0.5, "speculative", "token_v3", (KnobRow(8, 4, 0.5, 1.0),)),
    )  # fmt: skip
    engine, got = Engine(**PLAIN), []
    task = replace(TASK, scoring=None)
    bench = Bench(engine, lease=lease)
    bench.reader.knobs("code")
    bench.reader.poll_once()
    for seed in range(20):
        bench.worker.serve(replace(task, params=SamplingParams(seed=seed)))
        got.append("speculative" if trial_coin(seed) < 0.5 else "plain")
    bench.sender.flush_once()
    assert [r.strategy for r in bench.stream.entries if isinstance(r, RequestRecord)] == got
    assert {*got} == {"plain", "speculative"}


def test_a_drawn_fork_is_run_and_both_branches_are_scored():
    request, fork, served, other = Bench(Engine(**TOUCHED)).run()
    assert isinstance(request, RequestRecord) and request.fork_drawn
    assert isinstance(fork, ForkRecord) and fork.done and (fork.touches, fork.tokens, fork.target_passes) == (2, 4, 3)
    assert isinstance(served, QualityScore) and (served.branch, served.score) == ("served", 1.0)
    assert isinstance(other, QualityScore) and (other.branch, other.score) == ("fork", 0.25)
    assert {r.request_id for r in (request, fork, served, other)} == {"w.b.1"}


@pytest.mark.parametrize(
    ("label_drawn", "always", "scores"), [(False, False, 0), (True, False, 1), (False, True, 1), (True, True, 1)]
)
def test_without_a_fork_the_served_branch_is_scored_when_drawn_or_always(label_drawn, always, scores):
    task = replace(TASK, scoring=replace(SCORING, always=always))
    engine = Engine(**{**TOUCHED, "fork_drawn": False}, label_drawn=label_drawn)
    found = [r for r in Bench(engine, task).run() if isinstance(r, QualityScore)]
    assert [r.branch for r in found] == ["served"] * scores and engine.forks == 0


def test_a_task_without_a_scorer_gets_its_fork_but_no_scores():
    kinds = [type(r) for r in Bench(Engine(**TOUCHED), replace(TASK, scoring=None)).run()]
    assert kinds == [RequestRecord, ForkRecord]


@pytest.mark.parametrize("bad", [math.nan, 1.5, -0.1, None])
def test_a_score_that_could_not_be_made_is_counted_and_never_invented(bad):
    def judge(token_ids: Sequence[int]) -> float:
        if list(token_ids) == FORK:
            return 0.5
        if bad is None:
            raise RuntimeError("the judge is away")
        return bad

    bench = Bench(Engine(**TOUCHED), replace(TASK, scoring=replace(SCORING, score=judge)))
    scores = [r for r in bench.run() if isinstance(r, QualityScore)]
    assert [(r.branch, r.score) for r in scores] == [("fork", 0.5)]
    assert bench.metric("lenity_worker_scores_failed_total", traffic_class="code") == 1


def test_the_scorer_sees_tokens_only_the_same_for_both_arms():
    seen: dict[str, list[Any]] = {}
    for arm in ("lenient", "holdback"):
        calls = seen.setdefault(arm, [])

        def judge(*args: Any, calls: list[Any] = calls, **kwargs: Any) -> float:
            calls.append((args, kwargs))
            return 1.0

        task = replace(TASK, scoring=replace(SCORING, score=judge))
        records = Bench(Engine(**{**TOUCHED, "arm": arm}), task).run()
        scores = [to_fields(r) for r in records if isinstance(r, QualityScore)]
        assert not any(arm.encode() in value for entry in scores for value in entry.values())
    assert seen["lenient"] == seen["holdback"] == [((SERVED,), {}), ((FORK,), {})]


def test_a_fork_that_fails_is_reported_as_not_done():
    engine = Engine(**TOUCHED)
    engine.fork_fails = 1
    bench = Bench(engine)
    _, fork = bench.run()
    assert isinstance(fork, ForkRecord) and not fork.done
    assert bench.metric("lenity_worker_forks_total", traffic_class="code", done="false") == 1


def test_stopping_finishes_the_request_in_hand_and_reports_its_fork_as_not_done():
    engine = Engine(**TOUCHED)
    bench = Bench(engine, count=10)
    engine.during = bench.worker.stop
    request, fork = bench.run()
    assert isinstance(request, RequestRecord) and request.fork_drawn
    assert isinstance(fork, ForkRecord) and not fork.done
    assert engine.forks == 0 and bench.worker.served == 1


def test_a_worker_told_to_stop_before_it_began_serves_nothing():
    bench = Bench(Engine(**PLAIN), count=3)
    bench.worker.stop()
    assert bench.run() == []


def test_the_number_of_requests_can_be_limited():
    bench = Bench(Engine(**PLAIN), count=10, max_requests=3)
    ids = [r.request_id for r in bench.run()]
    assert ids == ["w.b.1", "w.b.2", "w.b.3"]


def test_a_request_that_fails_does_not_end_the_worker_but_many_in_a_row_do():
    engine = Engine(**PLAIN)
    engine.fails = MAX_FAILURES_IN_A_ROW - 1
    bench = Bench(engine, count=MAX_FAILURES_IN_A_ROW)
    assert [r.request_id for r in bench.run()] == [f"w.b.{MAX_FAILURES_IN_A_ROW}"]
    assert bench.metric("lenity_worker_failed_requests_total", traffic_class="code") == MAX_FAILURES_IN_A_ROW - 1
    engine.fails = MAX_FAILURES_IN_A_ROW
    with pytest.raises(RuntimeError, match="out of memory"):
        Bench(engine, count=20).run()


def test_raw_counters_are_exported():
    bench = Bench(Engine(**TOUCHED), count=2)
    bench.run()
    for name, value in (
        ("drafted_tokens", 16), ("examined_tokens", 6), ("accepted_tokens", 4),
        ("touches", 4), ("tokens", 6), ("target_passes", 4),
    ):  # fmt: skip
        assert bench.metric(f"lenity_worker_{name}_total", traffic_class="code") == value
    assert bench.metric("lenity_worker_requests_total", traffic_class="code", arm="lenient") == 2
    assert bench.metric("lenity_worker_lossless_fallbacks_total", reason="no lease") == 1
    assert bench.metric("lenity_worker_telemetry_dropped_total", what="records") == 0
    assert bench.metric("lenity_worker_leased", traffic_class="code") == 0
    assert b"lenity_worker_telemetry_sent_total" in generate_latest(bench.worker.metrics.registry)
