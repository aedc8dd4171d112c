"""Three estimates of one loss, from outcomes that are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.evidence_pair import FORK, HOLDBACK, Outcome, by_fork, by_holdback, figures, requests_needed

N, TOUCHED, RIGHT, LOST = 600, 0.6, 0.95, 0.25  # of the touched ones that were right


def outcomes(seed: int) -> list[Outcome]:
    """Problems, a quarter of which leniency gets wrong where it touches them, with their coins."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(N):
        touched, right, lost, held, drawn = rng.random(5) < (TOUCHED, RIGHT, LOST, HOLDBACK, FORK)
        lossless, lenient = float(right), float(right and not (touched and lost))
        served, other = (lossless, lenient) if held or not touched else (lenient, lossless)
        arm = "untouched" if not touched else "holdback" if held else "lenient"
        fork = other if touched and drawn else None
        found.append(Outcome(lossless, lenient, not touched, 2 * int(touched), arm, served, fork))
    return found


def loss(found: list[Outcome]) -> float:
    return float(np.mean([o.lossless - o.lenient for o in found]))


def test_both_estimates_agree_with_the_two_arms_and_swapped_arms_do_not():
    """20 seeds; a 95 % interval misses in 4 or more of them with a chance of at most 1.6 %."""
    agree = {"holdback": 0, "fork": 0, "swapped": 0}
    for seed in range(20):
        found = outcomes(seed)
        agree["holdback"] += by_holdback(found).has(loss(found))
        agree["fork"] += by_fork(found).has(loss(found))
        swap = {"lenient": "holdback", "holdback": "lenient", "untouched": "untouched"}
        agree["swapped"] += by_fork([replace(o, arm=swap[o.arm]) for o in found]).has(loss(found))
    assert agree["holdback"] >= 17 and agree["fork"] >= 17 and agree["swapped"] == 0


def test_a_pair_is_lossless_first_whichever_was_served():
    assert Outcome(1.0, 0.0, False, 1, "holdback", 1.0, 0.0).pair == (1.0, 0.0)
    assert Outcome(1.0, 0.0, False, 1, "lenient", 0.0, 1.0).pair == (1.0, 0.0)
    assert Outcome(1.0, 0.0, False, 1, "lenient", 0.0, None).pair is None


def test_the_certified_bound_is_sharp_and_a_loss_without_a_touch_breaks_it():
    lost = Outcome(1.0, 0.0, False, 1, "lenient", 0.0, 1.0)
    kept = Outcome(1.0, 1.0, True, 0, "untouched", 1.0, None)
    row = figures([lost, kept])
    assert row["certified"] and row["two_arm"][0] == row["touched"] == row["touches_per_request"] == 0.5
    assert row["pairs_as_in_two_arm"] == [1, 1] and row["scores"] == {"two_arm": 4, "holdback": 1, "fork": 2}
    assert not figures([replace(lost, touches=0), kept])["certified"]


def test_nothing_touched_has_a_loss_of_nothing():
    row = figures([Outcome(1.0, 1.0, True, 0, "untouched", 1.0, None)] * 3)
    assert row["holdback"] == row["fork"] == [0.0, 0.0, 0.0] and row["holdback_agrees"] and row["fork_agrees"]


def test_fewer_requests_are_needed_the_more_is_known_of_them():
    found = requests_needed(outcomes(1), runs=3)
    assert found["fork"] < found["holdback"] < found["two_arm"]


@pytest.mark.parametrize("held", [0.0, 1.0])
def test_one_score_is_hardly_an_estimate(held: float):
    arm = "holdback" if held else "lenient"
    found = by_holdback([Outcome(1.0, 1.0, False, 1, arm, 1.0, None)])
    assert found.scores == 1 and found.low == -1.0 and found.high == 1.0
