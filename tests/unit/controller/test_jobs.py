"""The ticker, and jobs beside it."""

from __future__ import annotations

import threading

import pytest
import time_machine

from controller.desk import Desk
from controller.jobs import Jobs, Ticker
from tests.support import wait_until


class Stop(Exception):
    pass


def test_a_tick_that_raises_is_counted_and_the_next_one_comes() -> None:
    """One bad tick does not end the loop, and its reason is kept until a tick succeeds."""
    calls: list[float] = []

    def tick(now: float) -> None:
        calls.append(now)
        if len(calls) == 1:
            raise ZeroDivisionError("bad block")

    ticker = Ticker(tick, lambda: 10.0 + len(calls), 1.0)
    ticker.run_once()
    assert (ticker.ticks, ticker.failures, ticker.last_failure) == (0, 1, "ZeroDivisionError: bad block")
    ticker.run_once()
    assert (ticker.ticks, ticker.failures, ticker.last_failure) == (1, 1, None)
    assert calls == [10.0, 11.0]


def test_it_stops_for_good_on_a_named_exception() -> None:
    """A fenced-off controller must not tick again."""
    stopped: list[Exception] = []

    def tick(now: float) -> None:
        raise Stop("fenced")

    ticker = Ticker(tick, lambda: 1.0, 1.0, stop_on=(Stop,), on_stop=stopped.append)
    ticker.run_once()
    ticker.run_once()
    assert [str(e) for e in stopped] == ["fenced"]
    assert ticker.failures == 0


@pytest.mark.parametrize(("now", "late"), [(101.0, False), (102.1, True)])
def test_it_is_late_after_two_intervals_without_success(now: float, late: bool) -> None:
    """Readiness turns false within two ticks of a dead loop."""
    ticker = Ticker(lambda now: None, lambda: 100.0, 1.0)
    assert ticker.late(100.0), "nothing has succeeded yet"
    ticker.run_once()
    assert ticker.late(now) is late


def test_the_schedule_ticks_until_stopped() -> None:
    """Started, it ticks by itself; stopped, it does not."""
    three = threading.Event()
    count = [0]

    def tick(now: float) -> None:
        count[0] += 1
        if count[0] >= 3:
            three.set()

    ticker = Ticker(tick, lambda: 0.0, 0.01)
    ticker.start()
    assert three.wait(10)
    assert ticker.stop()
    after = count[0]
    ticker.run_once()
    assert count[0] == after


def test_a_wall_clock_that_steps_an_hour_back_does_not_stop_the_ticks() -> None:
    """What is due is told by a clock that does not step."""
    count = [0]

    def tick(now: float) -> None:
        count[0] += 1

    ticker = Ticker(tick, lambda: 0.0, 0.01)
    with time_machine.travel(1_800_000_000, tick=True) as clock:
        ticker.start()
        clock.shift(-3600)
        before = count[0]
        wait_until(lambda: count[0] >= before + 3)
    ticker.stop()


@pytest.mark.parametrize(("pause", "missed"), [(1.0, 0), (1.4, 0), (5.0, 4), (600.0, 599)])
def test_ticks_that_were_missed_run_once_and_are_counted(pause: float, missed: int) -> None:
    """The process was blocked for five seconds, or the machine slept for ten minutes."""
    times, runs = [100.0], []
    ticker = Ticker(lambda now: runs.append(times[0]), lambda: times[0], 1.0, elapsed=lambda: times[0])
    ticker.run_once()
    times[0] += pause
    ticker.run_once()
    assert runs == [100.0, 100.0 + pause]
    assert ticker.missed == missed


def test_a_late_tick_does_not_shift_the_later_ones() -> None:
    """They stay on the grid of the first."""
    times, waits = [0.0], []
    ticker = Ticker(lambda now: None, lambda: times[0], 1.0, elapsed=lambda: times[0])
    for at in (0.0, 1.3, 2.0, 3.0):
        times[0] = at
        ticker.run_once()
        waits.append(ticker.next_due)
    assert waits == [1.0, 2.0, 3.0, 4.0]


def test_stopping_does_not_wait_for_a_tick_that_hangs() -> None:
    """Within the given time; the thread is a daemon."""
    entered, release = threading.Event(), threading.Event()
    calls = [0]

    def tick(now: float) -> None:
        calls[0] += 1
        if calls[0] == 2:
            entered.set()
            release.wait(30)

    ticker = Ticker(tick, lambda: 0.0, 0.001)
    ticker.start()
    assert entered.wait(10)
    assert not ticker.stop(0.01)
    release.set()
    assert ticker.stop()


def test_of_four_controllers_one_does_the_job_of_each_period() -> None:
    """Whenever in the period each of them asks; the others do nothing and that is no miss."""
    taken: set[int] = set()
    time, done = [0.0], list[float]()

    def turn(name: str, period_s: float) -> bool:
        slot = int(time[0] // period_s)
        return slot not in taken and not taken.add(slot)  # type: ignore[func-returns-value]

    four = [Jobs(turn, elapsed=lambda: time[0], desk=Desk("test", inline=True)) for _ in range(4)]
    for second in range(300):
        time[0] = float(second)
        for i, jobs in enumerate(four):
            if second % 60 == 13 * i:
                jobs.due("retention", 60.0, lambda: done.append(time[0]))
    assert [int(t // 60) for t in done] == [0, 1, 2, 3, 4]
    assert sum(jobs.runs.get("retention", 0) for jobs in four) == 5
    assert not any(jobs.missed for jobs in four)


def test_a_job_that_is_not_done_when_due_again_is_missed_and_not_started_twice() -> None:
    """And nothing waits for it."""
    started, release = threading.Event(), threading.Event()
    count = [0]

    def work() -> None:
        count[0] += 1
        started.set()
        release.wait(30)

    jobs = Jobs(elapsed=lambda: 0.0)
    jobs.due("slow", 60.0, work)
    assert started.wait(10)
    jobs.due("slow", 60.0, work)
    assert (count[0], jobs.missed) == (1, {"slow": 1})
    release.set()
    wait_until(lambda: jobs.runs == {"slow": 1})
    assert jobs.stop()


def test_a_job_after_a_long_sleep_runs_once_and_says_what_it_missed() -> None:
    """Ten minutes of a one-minute job."""
    time, done = [0.0], list[float]()
    jobs = Jobs(elapsed=lambda: time[0], desk=Desk("test", inline=True))
    for at in (0.0, 60.0, 660.0, 720.0):
        time[0] = at
        jobs.due("minute", 60.0, lambda: done.append(time[0]))
    assert done == [0.0, 60.0, 660.0, 720.0]
    assert jobs.missed == {"minute": 9}


def test_a_job_that_fails_is_counted_and_comes_again() -> None:
    """With its reason in the log."""

    def work() -> None:
        raise OSError("disk full")

    jobs = Jobs(elapsed=lambda: 0.0, desk=Desk("test", inline=True))
    jobs.due("retention", 60.0, work)
    jobs.due("retention", 60.0, work)
    assert jobs.failures == {"retention": 2}


def test_the_schedule_calls_jobs_until_stopped() -> None:
    """By APScheduler; after stop nothing starts."""
    done = threading.Event()
    jobs = Jobs()
    jobs.add("often", 0.01, done.set)
    jobs.start()
    assert done.wait(10)
    assert jobs.stop()
    runs = dict(jobs.runs)
    jobs.due("often", 0.01, done.set)
    assert jobs.runs == runs
