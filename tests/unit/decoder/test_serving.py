"""The serving loop: bounded, fair, nothing lost: every request is answered once and reported once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from decoder.generate import Completion, ForkResult, Knobs, Request
from decoder.knobs import LeaseReader, Terms
from decoder.sampling import SamplingParams
from decoder.serving import MAX_FORKS, Busy, Draining, Job, Serving
from decoder.telemetry import TelemetrySender
from decoder.worker import MAX_FAILURES_IN_A_ROW, Reporter, Scoring, WorkerMetrics
from storage.records import ForkRecord, QualityScore, Record, RequestRecord, from_fields, to_fields

SCORING = Scoring("m", "s", "1", lambda ids: 0.5)


def completion(request: Request, reason: str = "stop", **values: Any) -> Completion:
    touched = values.get("fork_drawn", False)
    given: dict[str, Any] = {
        "token_ids": [7] * min(9, request.params.max_tokens), "arm": "lenient" if touched else "untouched",
        "touches": int(touched), "first_touch_at": 5.0 if touched else None, "fork_drawn": False, "label_drawn": False,
        "holdback_prob": 0.0, "fork_prob": 1.0, "label_prob": 0.0, "knobs": Knobs(g=4), "target_passes": 1,
        "drafted": 4, "examined": 2, "accepted": 1, "first_token_s": 0.1, "total_s": 2.0, "fork_point": None,
    }  # fmt: skip
    return Completion(request=request, finish_reason=reason, **(given | values))


class Batch:
    """Rows that take as many rounds as they have tokens to make; ``outcome`` goes into their completions."""

    def __init__(self, size: int = 2, **outcome: Any):
        self.size, self.outcome = size, outcome
        self.seats: dict[str, list[Any]] = {}
        self.fails = 0
        self.knobs: list[Knobs] = []

    @property
    def rows(self) -> int:
        return len(self.seats)

    @property
    def free(self) -> int:
        return self.size - self.rows

    def add(self, request: Request, knobs: Callable[[], Knobs], observer: Any, on_tokens: Any) -> None:
        if not request.prompt_ids:
            raise ValueError("no prompt")
        self.seats[request.request_id] = [request, request.params.max_tokens, knobs, on_tokens]

    def step(self) -> list[Completion]:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("out of memory")
        done = []
        for name, seat in list(self.seats.items()):
            self.knobs.append(seat[2]())
            seat[1] -= 1
            if seat[3]:
                seat[3]([7])
            if not seat[1]:
                del self.seats[name]
                done.append(completion(seat[0], **self.outcome))
        return done

    def cancel(self, request_id: str) -> Completion | None:
        seat = self.seats.pop(request_id, None)
        if seat is None or seat[1] == seat[0].params.max_tokens:
            return None
        return completion(seat[0], "cancelled", **self.outcome)


class Listener:
    def __init__(self) -> None:
        self.said: list[Any] = []

    def tokens(self, ids: list[int]) -> None:
        self.said.append(ids)

    def finished(self, completion: Completion) -> None:
        self.said.append(completion.finish_reason)

    def failed(self, error: Exception) -> None:
        self.said.append(type(error))


class Stream:
    def __init__(self) -> None:
        self.entries: list[Record] = []

    def append(self, records: Sequence[Record]) -> int:
        self.entries += [from_fields(to_fields(r)) for r in records]
        return len(records)


class NoLeases:
    def read(self, pool: str, traffic_class: str) -> None:
        return None


class Bench:
    """A serving loop over fakes, turned by hand. It is also the engine that runs forks."""

    def __init__(self, batch: Batch | None = None, queue_size: int = 2):
        self.now, self.forked = 0.0, 0
        self.fork_fails = False
        self.batch = batch or Batch()
        self.stream = Stream()
        self.sender = TelemetrySender(self.stream, "p", "w", "b", start=False)
        reader = LeaseReader(NoLeases(), "p")
        metrics = WorkerMetrics(self.sender, reader)
        reporter = Reporter(self.sender, metrics, pool="p", worker="w", boot="b", wall=lambda: 1000.0)
        self.metric = metrics.registry.get_sample_value
        self.serving = Serving(
            self.batch, self, reader, reporter, queue_size=queue_size, clock=lambda: self.now, fork_deadline_s=60.0
        )  # type: ignore[arg-type]  # fmt: skip

    def fork(self, completion: Completion) -> ForkResult:
        self.forked += 1
        if self.fork_fails:
            raise RuntimeError("out of memory")
        return ForkResult([1, 2], 1, 1, 0.1, "stop")

    def job(self, name: str, rounds: int = 1, **values: Any) -> Listener:
        """Submit one request."""
        listener = Listener()
        request = Request(name, [1], SamplingParams(max_tokens=rounds))
        self.serving.submit([replace(Job(request, Terms(), listener), **values)])
        return listener

    def turns(self, most: int = 1000) -> int:
        """Turn until there is nothing to do."""
        return next(i for i in range(most) if not self.serving.turn())

    def records(self, kind: type) -> list[Any]:
        self.sender.flush_once()
        return [r for r in self.stream.entries if isinstance(r, kind)]


def test_requests_are_admitted_in_order_as_rows_become_free_and_answered_once():
    bench = Bench()
    listeners = [bench.job(name, rounds) for name, rounds in (("a", 3), ("b", 1), ("c", 1), ("d", 1))]
    bench.serving.turn()
    assert [x.said for x in listeners] == [[], ["stop"], [], []]
    bench.turns()
    assert [x.said for x in listeners] == [["stop"]] * 4
    assert [r.request_id for r in bench.records(RequestRecord)] == ["b", "c", "a", "d"]


def test_only_a_streaming_caller_hears_of_tokens():
    bench = Bench()
    quiet, streaming = bench.job("a", 2), bench.job("b", 2, streaming=True)
    bench.turns()
    assert quiet.said == ["stop"] and streaming.said == [[7], [7], "stop"]


def test_a_full_queue_refuses_with_a_time_to_come_back_until_there_is_room():
    bench = Bench(queue_size=1)
    for name in "abc":
        bench.job(name)
    with pytest.raises(Busy) as refused:
        bench.job("d")
    assert refused.value.retry_after >= 1
    bench.serving.turn()
    bench.job("d")
    bench.turns()
    assert len(bench.records(RequestRecord)) == 4
    assert bench.metric("lenity_worker_refused_requests_total", {"reason": "busy"}) == 1


def test_outputs_that_belong_together_are_taken_together_or_not_at_all():
    bench = Bench(queue_size=1)
    job = Job(Request("x", [1], SamplingParams(max_tokens=1)), Terms(), Listener())
    bench.job("a")
    with pytest.raises(Busy):
        bench.serving.submit([job] * 3)
    with pytest.raises(ValueError, match="at most 3"):
        bench.serving.submit([job] * 4)
    bench.turns()
    assert [r.request_id for r in bench.records(RequestRecord)] == ["a"]


def test_a_caller_who_leaves_frees_the_row_and_what_was_decoded_is_reported():
    bench = Bench(Batch(1))
    bench.job("a", 100)
    waits, next_one = bench.job("b"), bench.job("c")
    bench.serving.turn()
    bench.serving.cancel(["a", "b", "unknown"])
    bench.serving.turn()
    assert next_one.said == ["stop"] and waits.said == [] and bench.batch.rows == 0
    assert [(r.request_id, r.finish_reason) for r in bench.records(RequestRecord)] == [
        ("a", "cancelled"),
        ("c", "stop"),
    ]
    assert bench.metric("lenity_worker_cancelled_requests_total", {}) == 2
    for name in "def":  # all the room is there again
        bench.job(name)


def test_a_request_that_cannot_be_decoded_is_its_callers_fault_and_nobody_elses():
    bench = Bench()
    bad, good = bench.job("a", request=Request("a", [], SamplingParams())), bench.job("b")
    bench.turns()
    assert (bad.said, good.said) == ([ValueError], ["stop"])


def test_a_round_that_fails_loses_its_requests_and_many_in_a_row_end_the_worker():
    bench = Bench()
    bench.batch.fails = 1
    lost = bench.job("a")
    bench.turns()
    kept = bench.job("b")
    bench.turns()
    assert (lost.said, kept.said) == ([RuntimeError], ["stop"])
    bench.batch.fails = 1000
    for i in range(MAX_FAILURES_IN_A_ROW - 1):
        bench.job(f"c{i}")
        bench.serving.turn()
    bench.job("last")
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.serving.turn()


def test_forks_wait_until_no_request_is_there():
    bench = Bench(Batch(1, fork_drawn=True))
    for name in "ab":
        bench.job(name, scoring=SCORING)
    bench.serving.turn()
    bench.serving.turn()
    assert bench.forked == 0
    bench.turns()
    assert bench.forked == 2
    assert [(f.request_id, f.done) for f in bench.records(ForkRecord)] == [("a", True), ("b", True)]
    scores = [(s.request_id, s.branch) for s in bench.records(QualityScore)]
    assert scores == [("a", "served"), ("a", "fork"), ("b", "served"), ("b", "fork")]


def test_a_fork_past_its_deadline_or_that_fails_is_reported_as_never_run():
    bench = Bench(Batch(fork_drawn=True))
    bench.job("late", scoring=SCORING)
    bench.serving.turn()
    bench.now = 61.0
    bench.turns()
    bench.fork_fails = True
    bench.job("fails", scoring=SCORING)
    bench.turns()
    assert bench.forked == 1
    assert [(f.request_id, f.done) for f in bench.records(ForkRecord)] == [("late", False), ("fails", False)]
    assert bench.records(QualityScore) == []


def test_the_forks_that_wait_are_bounded():
    bench = Bench(Batch(1, fork_drawn=True), queue_size=MAX_FORKS + 5)
    for i in range(MAX_FORKS + 2):
        bench.job(f"r{i}", scoring=SCORING)
    for _ in range(MAX_FORKS + 2):
        bench.serving.turn()
    assert [(f.request_id, f.done) for f in bench.records(ForkRecord)] == [("r0", False), ("r1", False)]


def test_a_cancelled_request_has_no_fork_which_takes_the_worst_case():
    bench = Bench(Batch(fork_drawn=True))
    bench.job("a", 9, scoring=SCORING)
    bench.serving.turn()
    bench.serving.cancel(["a"])
    bench.turns()
    assert [f.done for f in bench.records(ForkRecord)] == [False] and bench.forked == 0


@pytest.mark.parametrize(("drawn", "scores"), [(True, 1), (False, 0)])
def test_a_drawn_label_scores_the_served_branch(drawn, scores):
    bench = Bench(Batch(label_drawn=drawn))
    bench.job("a", scoring=SCORING)
    bench.turns()
    assert [s.branch for s in bench.records(QualityScore)] == ["served"] * scores


def test_a_callers_terms_reach_the_knobs_and_the_record():
    bench = Bench()
    bench.job("a", terms=Terms(plain=True))
    bench.turns()
    [record] = bench.records(RequestRecord)
    assert [k.g for k in bench.batch.knobs] == [0] and record.strategy == "plain"


def drained(bench: Bench, grace_s: float) -> bool:
    """Run the loop in a thread and drain it."""
    thread = threading.Thread(target=bench.serving.run)
    thread.start()
    in_time = bench.serving.drain(grace_s)
    thread.join(10)
    assert not thread.is_alive()
    return in_time


def test_draining_finishes_what_was_taken_and_refuses_what_is_new():
    bench = Bench()
    listeners = [bench.job(name, 5) for name in "abcd"]
    assert drained(bench, 30.0) and [x.said for x in listeners] == [["stop"]] * 4
    with pytest.raises(Draining):
        bench.job("e")


def test_what_does_not_finish_in_time_is_given_up_and_said_so():
    bench = Bench(Batch(1, fork_drawn=True))
    endless, waits = bench.job("a", 1 << 40), bench.job("b")
    bench.serving.turn()
    assert not drained(bench, 0.0)
    assert (endless.said, waits.said) == ([Draining], [Draining])
    assert [r.finish_reason for r in bench.records(RequestRecord)] == ["cancelled"]
    assert [f.done for f in bench.records(ForkRecord)] == [False]


def test_forks_that_are_left_at_the_end_are_reported_as_never_run():
    bench = Bench(Batch(fork_drawn=True))
    bench.job("a", scoring=SCORING)
    bench.serving.turn()
    bench.serving._stop_now = True
    bench.serving.run()
    assert [f.done for f in bench.records(ForkRecord)] == [False] and bench.forked == 0


def test_a_listener_that_fails_harms_nobody():
    class Broken(Listener):
        def finished(self, completion: Completion) -> None:
            raise RuntimeError("the loop is closed")

    bench = Bench()
    bench.job("a", listener=Broken())
    good = bench.job("b")
    bench.turns()
    assert good.said == ["stop"]
