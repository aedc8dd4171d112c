"""The cost model: recovers lines, ignores pauses, follows load, borrows between buckets, survives a restart."""

from __future__ import annotations

import json

import numpy as np
import pytest

from controller.costs import PASS_S, WARM_UP, CostModel
from tests.support_blocks import timing_block

G = 8
LENGTHS = np.arange(G + 1)


def fed(
    model: CostModel,
    rounds: int,
    *,
    widths=(1, 2, 4, 8),
    pass_s=0.020,
    slope=0.001,
    rows=1,
    noise=0.05,
    seed=0,
    pause: tuple[int, ...] = (),
    block=32,
    worker="w0",
    factor: float | np.ndarray = 1.0,
) -> CostModel:
    """Feed blocks of rounds whose seconds follow the lines draft .001 + .002 g, verify pass + slope g, with noise."""
    rng = np.random.default_rng(seed)
    width = rng.choice(widths, size=rounds)
    draft = np.where(width > 0, 0.001 + 0.002 * width, 0) * rng.normal(1, noise, rounds)
    verify = (pass_s + slope * width) * rng.normal(1, noise, rounds)
    verify[list(pause)] += 2.0
    draft, verify = draft * factor, verify * factor
    for i in range(0, rounds, block):
        at = slice(i, i + block)
        model.add(timing_block(width[at], draft_s=draft[at], verify_s=verify[at], rows=rows, worker=worker))
    return model


def test_lines_are_recovered_from_noisy_rounds():
    model = fed(CostModel(G), 600)
    assert model.draft_s(1)[0] == 0
    np.testing.assert_allclose(model.draft_s(1)[1:], 0.001 + 0.002 * LENGTHS[1:], rtol=0.05)
    np.testing.assert_allclose(model.verify_s(1), 0.020 + 0.001 * LENGTHS, rtol=0.03)
    assert model.overhead_s(1) == pytest.approx(0.001)
    assert model.width_cost(1) == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize("when", [0, 5, 15, 16, 17, 40, 399])
def test_a_two_second_pause_does_not_move_it(when):
    """A hundred passes' worth of seconds in one round, at the start, in the warm-up or later, moves it by under 2 %."""
    calm, paused = fed(CostModel(G), 400), fed(CostModel(G), 400, pause=(when,))
    np.testing.assert_allclose(paused.verify_s(1), calm.verify_s(1), rtol=0.02)
    plain_mean = 2.0 / 400 / 0.020
    assert plain_mean > 0.2  # what an ordinary average would have moved by


def test_a_pause_in_the_last_of_small_blocks_does_not_move_it():
    calm, paused = (fed(CostModel(G), 401, pause=p, block=1) for p in ((), (400,)))
    np.testing.assert_allclose(paused.verify_s(1), calm.verify_s(1), rtol=0.02)


@pytest.mark.parametrize("block", [4, 32])
def test_a_lasting_change_of_load_is_followed(block):
    model = fed(CostModel(G), 400, block=block)
    fed(model, 600, pass_s=0.060, slope=0.010, seed=1, block=block)
    np.testing.assert_allclose(model.verify_s(1), 0.060 + 0.010 * LENGTHS, rtol=0.3)
    fed(model, 1200, pass_s=0.060, slope=0.010, seed=2, block=block)
    np.testing.assert_allclose(model.verify_s(1), 0.060 + 0.010 * LENGTHS, rtol=0.1)
    fed(model, 2400, seed=3, block=block)
    np.testing.assert_allclose(model.verify_s(1), 0.020 + 0.001 * LENGTHS, rtol=0.05)


@pytest.mark.parametrize("block", [1, 3, 8])
def test_a_change_is_followed_as_fast_however_few_rounds_a_block_brings(block):
    """Passes become five times as slow: after 100 rounds small blocks have moved the line as far as large ones."""
    large, small = (
        fed(fed(CostModel(G), 400, block=b), 96, pass_s=0.100, slope=0.005, seed=1, block=b) for b in (32, block)
    )
    assert large.verify_s(1)[4] > 0.035
    np.testing.assert_allclose(small.verify_s(1), large.verify_s(1), rtol=0.1)


def test_seconds_never_fall_with_block_length_even_if_measured_so():
    model = CostModel(G)
    width = np.tile([1, 8], 100)
    model.add(timing_block(width, draft_s=0.010 - 0.001 * width, verify_s=0.030 - 0.002 * width))
    assert np.all(np.diff(model.draft_s(1)) >= 0)
    assert np.all(np.diff(model.verify_s(1)) >= 0)
    assert np.all(model.verify_s(1) > 0)


def test_one_block_length_fixes_the_level_there_and_the_prior_the_slope():
    model = fed(CostModel(G), 300, widths=(4,), noise=0.0)
    assert model.verify_s(1)[4] == pytest.approx(0.024, rel=1e-3)
    assert model.draft_s(1)[4] == pytest.approx(0.009, rel=1e-3)
    verify, draft = model.verify_s(1), model.draft_s(1)
    assert verify[1] / verify[0] == pytest.approx(1.02, abs=0.005)
    assert (draft[2] - draft[1]) / draft[1] == pytest.approx(2 / 3, abs=0.05)


def test_plain_decoding_prices_drafting_by_the_prior_share_of_its_own_pass():
    model = fed(CostModel(G), 100, widths=(0,), pass_s=0.5, noise=0.0)
    assert model.verify_s(1)[0] == pytest.approx(0.5)
    np.testing.assert_allclose(model.draft_s(1), 0.05 * LENGTHS, rtol=1e-6)


def test_before_any_data_there_is_a_shape_and_it_says_so():
    model = CostModel(G)
    assert not model.ready
    assert model.seen_buckets == ()
    assert model.verify_s(1)[0] == PASS_S
    assert np.all(np.diff(model.draft_s(8)) > 0)
    assert model.overhead_s(1) == 0


def test_ready_after_the_warm_up_only():
    model = fed(CostModel(G), WARM_UP - 1)
    assert not model.ready
    assert model.verify_s(1)[0] == pytest.approx(0.020, rel=0.2)  # but what there is is used
    assert fed(model, 1, seed=1).ready


def test_unseen_batches_borrow_from_the_nearest_seen_bucket():
    model = fed(CostModel(G), 100, rows=1, pass_s=0.020)
    fed(model, 100, rows=16, pass_s=0.080)
    assert model.seen_buckets == (1, 16)
    near = {rows: round(float(model.verify_s(rows)[0]), 2) for rows in (1, 2, 3, 5, 8, 16, 17, 500)}
    assert near == {1: 0.02, 2: 0.02, 3: 0.08, 5: 0.08, 8: 0.08, 16: 0.08, 17: 0.08, 500: 0.08}
    with pytest.raises(ValueError, match="row"):
        model.verify_s(0)


def test_a_new_bucket_at_one_width_expects_width_to_cost_as_many_times_more_as_it_has_rows():
    """4 rows: 20 ms and 2 ms a token. 16 rows, seen at width 4 only, 52 ms: 20 ms and 8 ms, not a nearly free width."""
    model = fed(CostModel(G), 300, pass_s=0.020, slope=0.002, rows=4, noise=0.01)
    assert model.verify_s(16)[8] == model.verify_s(4)[8]  # borrowed as it is
    fed(model, 60, widths=(4,), pass_s=0.020, slope=0.008, rows=16, noise=0.01, seed=1)
    np.testing.assert_allclose(model.verify_s(16), 0.020 + 0.008 * LENGTHS, rtol=0.2)
    again = CostModel.from_state(json.loads(json.dumps(model.to_state())))
    for each in (model, again):
        fed(each, 60, widths=(4,), pass_s=0.020, slope=0.008, rows=16, seed=2)
    np.testing.assert_array_equal(again.verify_s(16), model.verify_s(16))


def test_a_round_counts_for_the_smallest_bucket_that_holds_it():
    model = CostModel(G)
    for rows, bucket in ((3, 4), (4, 4), (33, 32), (200, 32)):
        fed(model, 40, rows=rows)
        assert bucket in model.seen_buckets
    assert model.seen_buckets == (4, 32)


def test_rounds_without_a_measured_pass_are_left_out():
    model = CostModel(G)
    model.add(timing_block([4] * 50, draft_s=0.01, verify_s=0.0))
    assert not model.ready


def test_a_restart_goes_on_bit_for_bit():
    for rounds in (7, 300):
        model = fed(CostModel(G), rounds)
        again = CostModel.from_state(json.loads(json.dumps(model.to_state())))
        for m in (model, again):
            fed(m, 50, seed=9, pass_s=0.03)
            fed(m, 50, seed=9, rows=4)
        assert again.to_state() == model.to_state()
        np.testing.assert_array_equal(again.verify_s(1), model.verify_s(1))


def test_two_workers_of_different_speed_are_pooled_by_shape():
    """One twice as slow: the lines' ratios are those of each, whoever reports more, and factors say who is slower."""
    model = CostModel(G)
    for turn in range(60):
        fed(model, 32, seed=2 * turn)
        fed(model, 32 if turn % 3 else 64, seed=2 * turn + 1, worker="slow", factor=2.0)
    verify, draft = model.verify_s(1), model.draft_s(1)
    assert model.width_cost(1) == pytest.approx(0.05, abs=0.012)
    np.testing.assert_allclose(draft[1:] / verify[0], (0.001 + 0.002 * LENGTHS[1:]) / 0.020, rtol=0.06)
    assert model.worker_factors["slow"] / model.worker_factors["w0"] == pytest.approx(2.0, rel=0.05)
    assert model.distrusted == ()
    assert 0.020 * 0.95 < verify[0] < 0.040 * 1.05


def test_the_lines_follow_what_all_workers_share():
    model = CostModel(G)
    for pass_s, slope, turns in ((0.020, 0.001, 20), (0.060, 0.010, 60)):
        for turn in range(turns):
            for k, worker in enumerate(("a", "b")):
                fed(model, 32, seed=2 * turn + k, worker=worker, pass_s=pass_s, slope=slope)
    np.testing.assert_allclose(model.verify_s(1), 0.060 + 0.010 * LENGTHS, rtol=0.1)


@pytest.mark.parametrize("factor", [1e-3, 1e3, None])
@pytest.mark.parametrize("when", ["later", "at once"])
def test_a_worker_with_a_wrong_clock_does_not_move_the_model(factor, when):
    """Durations a thousand times too short or long, or anything between (None), beside one honest worker."""
    rng = np.random.default_rng(5)
    model = CostModel(G)
    fed(model, 320 if when == "later" else 64, seed=99)
    for turn in range(40):
        wrong = 10 ** rng.uniform(-3, 3, 32) if factor is None else factor
        fed(model, 32, seed=2 * turn, worker="wrong", factor=wrong)
        fed(model, 32, seed=2 * turn + 1)
    np.testing.assert_allclose(model.verify_s(1), 0.020 + 0.001 * LENGTHS, rtol=0.06)
    np.testing.assert_allclose(model.draft_s(1)[1:], 0.001 + 0.002 * LENGTHS[1:], rtol=0.08)
    assert model.distrusted == ("wrong",)


def test_two_honest_workers_outvote_a_wrong_one_that_came_first():
    model = fed(CostModel(G), 64, worker="wrong", factor=1000.0)
    for turn in range(80):
        for k, (worker, factor) in enumerate((("wrong", 1000.0), ("a", 1.0), ("b", 1.0))):
            fed(model, 32, seed=3 * turn + k, worker=worker, factor=factor)
    assert model.distrusted == ("wrong",)
    np.testing.assert_allclose(model.verify_s(1), 0.020 + 0.001 * LENGTHS, rtol=0.1)


def test_durations_that_cannot_be_are_left_out():
    model = fed(CostModel(G), 100)
    before = model.to_state()["lines"]
    model.add(timing_block([4] * 50, draft_s=0.01, verify_s=1e-7))
    model.add(timing_block([4] * 50, draft_s=0.01, verify_s=3000.0))
    assert model.to_state()["lines"] == before


def test_a_worker_that_restarts_keeps_its_factor():
    model = CostModel(G)
    for turn in range(30):
        fed(model, 32, seed=2 * turn)
        fed(model, 32, seed=2 * turn + 1, worker="slow", factor=2.0)
    before = model.verify_s(1)
    again = CostModel.from_state(json.loads(json.dumps(model.to_state())))
    fed(again, 32, seed=77, worker="slow", factor=2.0)
    np.testing.assert_allclose(again.verify_s(1), before, rtol=0.02)


def test_log_ratio_is_of_this_workers_own_expectation():
    model = CostModel(G)
    for turn in range(30):
        fed(model, 32, seed=2 * turn)
        fed(model, 32, seed=2 * turn + 1, worker="slow", factor=2.0)
    width = np.full(32, 4)
    usual = timing_block(width, draft_s=0.018, verify_s=0.048, worker="slow")
    loaded = timing_block(width, draft_s=0.036, verify_s=0.096, overhead_s=0.002, worker="slow")
    assert np.median(model.log_ratio(usual)) == pytest.approx(0.0, abs=0.06)
    assert np.median(model.log_ratio(loaded)) == pytest.approx(np.log(2), abs=0.06)
    assert CostModel(G).log_ratio(usual).size == 0


def test_forgetting_lets_new_rounds_outweigh_old_ones():
    slow, quick = (fed(CostModel(G), 1500) for _ in range(2))
    quick.forget(0.05)
    for model in (slow, quick):
        fed(model, 96, pass_s=0.060, seed=1)
    assert abs(quick.verify_s(1)[0] - 0.060) < 0.3 * abs(slow.verify_s(1)[0] - 0.060)


def test_plain_rounds_in_memory_are_counted():
    model = fed(CostModel(G), 64, widths=(0,))
    assert model.narrow_rounds(1) == pytest.approx(64, rel=0.1)
    assert model.narrow_rounds(8) == np.inf
    fed(model, 3000, widths=(4,))
    assert model.narrow_rounds(1) < 0.1


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="half life"):
        CostModel(G, half_life_rounds=0)
