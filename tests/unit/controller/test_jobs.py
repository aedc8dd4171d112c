"""The ticker."""

from __future__ import annotations

import pytest

from controller.jobs import Ticker


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
    import threading

    three = threading.Event()
    count = [0]

    def tick(now: float) -> None:
        count[0] += 1
        if count[0] >= 3:
            three.set()

    ticker = Ticker(tick, lambda: 0.0, 0.01)
    ticker.start()
    assert three.wait(10)
    ticker.stop()
    after = count[0]
    ticker.run_once()
    assert count[0] == after
