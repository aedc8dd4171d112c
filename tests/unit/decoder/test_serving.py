"""The serving loop: bounded, fair, nothing lost: every request is answered once and reported once."""

from __future__ import annotations

import threading

import pytest

from decoder.generate import Completion, Request
from decoder.knobs import Terms
from decoder.sampling import SamplingParams
from decoder.serving import MAX_FORKS, Busy, Draining, Job
from decoder.worker import MAX_FAILURES_IN_A_ROW
from storage.records import ForkRecord, KnobRow, Lease, QualityScore, RequestRecord
from tests.support_serving import SCORING, Batch, Bench, Listener


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


def test_a_fork_waits_for_a_request_that_comes_while_it_runs():
    bench = Bench(Batch(1, fork_drawn=True))
    bench.job("a", scoring=SCORING)
    bench.serving.turn()
    bench.serving.turn()
    assert (bench.rounds, bench.forked) == (1, 0)  # begun
    late = bench.job("b", 3)
    for _ in range(3):
        bench.serving.turn()
    assert late.said == ["stop"] and bench.forked == 0
    bench.turns()
    assert bench.forked == 1


def test_a_fork_that_has_waited_for_half_of_its_time_runs_in_a_free_row():
    """Under steady traffic the worker is never without requests; evidence has to come all the same."""
    bench = Bench(Batch(2, fork_drawn=True))
    bench.job("a", scoring=SCORING)
    bench.serving.turn()
    bench.job("b", 9)
    for now, forked in ((0.0, 0), (29.0, 0), (30.0, 1)):  # worth nothing from 60 on
        bench.now = now
        bench.serving.turn()
        assert bench.forked == forked
    assert [f.done for f in bench.records(ForkRecord)] == [True]


def test_a_fork_that_finds_no_row_waits_its_turn_and_is_counted_when_it_runs_or_is_given_up():
    """The row is taken for longer than one fork is worth anything: that one never runs, the next one does."""
    bench = Bench(Batch(1, fork_drawn=True), queue_size=4)
    for name in "ab":
        bench.job(name, scoring=SCORING)
    bench.serving.turn()
    bench.now = 40.0  # a's fork is worth nothing from 60 on, b's from 100
    bench.serving.turn()
    bench.job("c", 3, scoring=SCORING)
    for now in (50.0, 62.0, 63.0):
        bench.now = now
        bench.serving.turn()
    assert bench.forked == 0
    bench.turns()
    assert [(f.request_id, f.done, f.target_passes) for f in bench.records(ForkRecord)] == [
        ("a", False, 0),
        ("b", True, 1),
        ("c", True, 1),
    ]
    counted = {
        done: bench.metric("lenity_worker_forks_total", {"class": "default", "done": done})
        for done in ("true", "false")
    }
    assert counted == {"true": 2, "false": 1}
    assert bench.metric("lenity_worker_fork_target_passes_total", {"class": "default"}) == 2
    assert bench.metric("lenity_worker_target_passes_total", {"class": "default"}) == 3


def test_a_fork_past_its_deadline_or_that_fails_is_reported_as_never_run():
    bench = Bench(Batch(fork_drawn=True))
    bench.job("late", scoring=SCORING)
    bench.serving.turn()
    bench.now = 61.0
    bench.turns()
    bench.fork_fails = True
    bench.job("fails", scoring=SCORING)
    bench.turns()
    assert bench.forked == 0
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
    bench.job("a", terms=Terms(strategy="plain"))
    bench.turns()
    [record] = bench.records(RequestRecord)
    assert [k.g for k in bench.batch.knobs] == [0] and record.strategy == "plain"


# -- the lane ----------------------------------------------------------------------------------------------------------

CASCADE = Lease(
    pool="p", traffic_class="default", epoch=1, seq=1, policy_revision=1, issued=0.0, ttl=60.0,
    rule="confidence_min", table=(KnobRow(8, 4, 0.5, 1.0),), strategy="sequence_cascade", strategies=("speculative",),
)  # fmt: skip


def test_strategies_of_one_request_at_a_time_have_a_lane_and_starve_nobody():
    bench = Bench(lease=CASCADE)
    slow, waits = bench.job("slow", 5), bench.job("waits", 1)
    usual = [bench.job(name, 2, terms=Terms(strategy="speculative")) for name in "abcd"[:2]]
    bench.serving.turn()
    bench.serving.turn()
    assert [x.said for x in usual] == [["stop"]] * 2 and slow.said == waits.said == []
    bench.turns()
    assert slow.said == waits.said == ["stop"] and bench.lane.strategies == ["sequence_cascade"] * 2
    found = {r.request_id: r.strategy for r in bench.records(RequestRecord)}
    assert found == {"slow": "sequence_cascade", "waits": "sequence_cascade", "a": "speculative", "b": "speculative"}


def test_a_lane_that_is_busy_does_not_hold_up_the_batch_nor_a_full_batch_the_lane():
    bench = Bench(Batch(1), queue_size=9, lease=CASCADE)
    for name in ("x", "y"):
        bench.job(name, 50)
    for name in ("a", "b"):
        bench.job(name, 50, terms=Terms(strategy="plain"))
    bench.serving.turn()
    assert [*bench.lane.seats, *bench.batch.seats] == ["x", "a"]
    bench.serving.cancel(["x", "a"])
    bench.serving.turn()
    assert [*bench.lane.seats, *bench.batch.seats] == ["y", "b"]
    bench.serving.cancel(["y", "b"])
    bench.turns()
    assert bench.serving._taken == 0


def test_what_a_strategy_decodes_by_lossless_rounds_has_them_in_the_batch():
    """A pinned request, and one under a rule that the lease has no knobs for."""
    bench = Bench(lease=CASCADE)
    bench.job("pinned", request=Request("pinned", [1], SamplingParams(max_tokens=1), pinned=True))
    bench.job("rule", terms=Terms(rule="confidence_mean"))
    bench.turns()
    assert bench.lane.strategies == [] and all(not k.lenient and k.g == 4 for k in bench.batch.knobs)
    assert [r.strategy for r in bench.records(RequestRecord)] == ["sequence_cascade"] * 2


def test_a_step_that_fails_in_the_lane_loses_nobody_in_the_batch():
    bench = Bench(lease=CASCADE)
    bench.lane.fails = 1
    lost, kept = bench.job("a", 3), bench.job("b", 3, terms=Terms(strategy="plain"))
    bench.turns()
    assert (lost.said, kept.said) == ([RuntimeError], ["stop"])


def test_forks_are_kept_for_a_judge_until_the_label_deadline():
    bench = Bench(Batch(fork_drawn=True, total_s=0.5), judged=True)
    bench.job("a")
    bench.turns()
    assert bench.branches is not None and bench.forked == 1 and bench.records(QualityScore) == []
    kept = bench.branches.get("a")
    assert kept is not None and kept.deadline == 59.5  # 60 s after the touch, half a second before the end
    assert sorted((name, tuple(ids)) for name, ids, _ in kept.outputs) == [("fork", (1, 2)), ("served", (7,))]
    bench.now = 59.5
    assert bench.branches.get("a") is None and bench.branches.size == 0


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
