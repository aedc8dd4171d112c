"""The governor's benchmark counts what it says it counts, on traffic whose loss it knows."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench import governor as bench
from bench.governor_plant import MOST, TICKS, Scenario, gain, held_back, play, serve
from bench.governor_rivals import BurnRate, Fixed


def test_a_batch_loses_what_its_touches_say() -> None:
    """Expected loss is touches times the loss per touch, of those that kept leniency; forks come as often as said."""
    batch = serve(np.random.default_rng(1), 200_000, 2.0, 0.25, 0.01)
    assert batch.expected_loss == pytest.approx(200_000 * 2.0 * 0.01 * 0.9, rel=0.02)
    assert batch.forks == pytest.approx(200_000 * (1 - np.exp(-2.0)) * 0.25, rel=0.02)
    assert batch.lost == pytest.approx(batch.fork_touches * 0.01, rel=0.1)


def test_speed_rises_with_touches_up_to_the_widest_knob() -> None:
    """And holdback takes nothing while hardly anybody is touched."""
    found = gain(np.array([0.0, 1.0, 3.0, MOST, 50.0]))
    assert found[0] == 0 and np.all(np.diff(found[:4]) > 0) and found[3] == found[4]
    assert held_back(np.array([0.0]))[0] == 0 and 0.08 < held_back(np.array([10.0]))[0] < 0.1


def test_a_halving_without_cause_is_one_false_pull_back() -> None:
    """However long it lasts; with a cause it is none."""
    tau = np.ones(4 * TICKS)
    tau[250:300] = 0.2
    quiet, held = np.ones(len(tau), dtype=bool), np.zeros(len(tau))
    assert bench.false_pullbacks(tau, held, quiet) == 1
    assert bench.false_pullbacks(tau, held, ~quiet) == 0
    held[100:110] = 1
    assert bench.false_pullbacks(tau, held, quiet) == 2


def test_a_fixed_knob_spends_many_budgets_in_a_regression() -> None:
    """Nothing pulls it back: two windows at eight times the plan."""
    which = next(i for i, s in enumerate(bench.SCENARIOS) if s.changed_at is not None)
    _, row = bench.run(("fixed", which, 0.01, 0.02, 12))
    found = bench.summary([row])
    assert found["budget_spent_by_regression"] == pytest.approx(2 * 10 * 0.8 * 0.9, rel=0.1)
    assert found["p_budget_exceeded"] > 0.1


def test_the_governor_keeps_a_budget_that_rivals_do_not_know_of() -> None:
    """Four windows of good traffic: within the budget, and most of the oracle's gain after the first."""
    _, row = bench.run(("lenity", 0, 0.05, 0.02, 3))
    found = bench.summary([row])
    assert found["p_budget_exceeded"] == 0 and found["speed_kept"] > 0.75
    assert json.dumps(found, allow_nan=False)


def test_a_burn_rate_controller_reacts_only_to_what_burns_fast() -> None:
    """Three times the loss is mostly spent without a word; sixty times is stopped again and again."""
    for factor, reacts in ((3.0, False), (60.0, True)):
        scenario = Scenario("t", 2.0, factor=lambda t, f=factor: f if t > 0.5 else 1.0)  # type: ignore[misc]
        log = play(scenario, 0.002, BurnRate(scenario, 0.01, 0.002), np.random.default_rng(3), 2)
        assert (log["held"][TICKS:].mean() > 0.3) == reacts
    assert not Fixed(scenario, 0.01, 0.002).held
