"""Clock, arrivals and ratios of the benchmark of forks."""

from __future__ import annotations

import numpy as np
import pytest

from bench.forks import Clock, Seen, arrivals_of, compare, figures


def test_the_clock_goes_on_from_where_it_was_put_forward_to_and_never_back():
    ticks = iter([1.0, 1.5, 2.0, 2.5])
    clock = Clock(lambda: next(ticks))
    clock.skip_to(9.0)  # at 1.0
    assert clock() == 9.5
    clock.skip_to(5.0)
    assert clock() == 10.5


def test_arrivals_come_at_the_rate_and_are_a_function_of_the_seed():
    """2,000 gaps: their mean is off by 10 % with a chance of 1e-5."""
    arrivals = arrivals_of(2000, 4.0, seed=3)
    assert arrivals == arrivals_of(2000, 4.0, seed=3) and np.all(np.diff([0.0, *arrivals]) > 0)
    assert arrivals[-1] == pytest.approx(500.0, rel=0.1)


def test_the_same_latencies_have_a_ratio_of_one_and_slower_ones_more():
    off = np.random.default_rng(1).gamma(4.0, 0.05, 300)
    assert compare(off, off)["p99_ratio"] == [1.0, 1.0, 1.0]
    slower = compare(off, 1.1 * off)
    assert slower["p50_ratio"] == slower["p99_ratio"] == [1.1, 1.1, 1.1]
    assert slower["p99_off_ms"] == pytest.approx(1000 * np.quantile(off, 0.99), abs=0.01)


def test_figures_say_what_forks_took_and_that_the_same_was_served():
    off = Seen([0.1] * 3, [0.05] * 3, passes=30, spent=2.0, busy=1.0)
    on = Seen([0.1] * 3, [0.05] * 3, passes=30, fork_passes=12, drawn=3, ran=2, dropped=1, spent=2.0, busy=1.0)
    row = figures(off, on)
    assert row["busy"] == 0.5 and row["same_work_served"] and row["extra_target_passes"] == 12
    assert (row["forks_drawn"], row["forks_run"], row["forks_dropped"]) == (3, 2, 1)
    assert not figures(off, Seen([0.1] * 3, [0.05] * 3, passes=29, spent=2.0, busy=1.0))["same_work_served"]
