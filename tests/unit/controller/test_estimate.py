"""The curve estimator: products within the round, actual lengths, pinned positions, borrowing, forgetting, restart."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from controller.curve import settings_path
from controller.estimate import BORROW_BELOW, CurveEstimator
from controller.solve import solve
from policies.errors import TooFewSamples
from policies.rules import Scalars, accept_prob, get_rule, lossless_accept
from tests.support_blocks import coin_scalars, make_block
from tests.support_curves import costs

HALF = 40 // 2  # the level at theta = 1/2


def level_end(level: int) -> int:
    return level


def random_scalars(n: int, seed: int) -> Scalars:
    rng = np.random.default_rng(seed)
    return coin_scalars(rng.beta(4, 1, n), rng.random(n))


def test_a_round_by_hand():
    """A0 = (.5, .8, .4), the second token plausible at theta = 1/2: there A = (.5, 1, .4), with .2 of drift reached."""
    estimator = CurveEstimator("token_v3", 3)
    estimator.add(make_block(coin_scalars([0.5, 0.8, 0.4] * 50, [0.1, 0.9, 0.1] * 50), [3] * 50))
    curve = estimator.curve()
    half = level_end(HALF)
    np.testing.assert_allclose(curve.reach[0], [1, 0.5, 0.4, 0.16], rtol=1e-5)
    np.testing.assert_allclose(curve.touches[0], 0)
    np.testing.assert_allclose(curve.reach[half], [1, 0.5, 0.5, 0.2], rtol=1e-5)
    np.testing.assert_allclose(curve.touches[half], [0, 0, 0.5 * 0.2, 0.5 * 0.2], rtol=1e-5)


def test_many_equal_rounds_give_the_plain_mean_of_products():
    scalars = random_scalars(4 * 500, 1)
    estimator = CurveEstimator("token_v3", 4, half_life_rounds=1e12)
    estimator.add(make_block(scalars, [4] * 500))
    curve = estimator.curve()
    i = level_end(HALF)
    a0 = np.asarray(scalars.target_prob / scalars.draft_prob).reshape(500, 4)
    a = np.where((scalars.target_prob_raw >= 0.5 * scalars.target_max_raw).reshape(500, 4), 1.0, a0)
    after = np.cumprod(a, axis=1)
    before = np.column_stack((np.ones(500), after[:, :-1]))
    np.testing.assert_allclose(curve.reach[i, 1:], after.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(curve.touches[i, 1:], np.cumsum((before * (a - a0)).mean(axis=0)), rtol=1e-5)
    np.testing.assert_allclose(curve.reach[0, 1:], np.cumprod(a0, axis=1).mean(axis=0), rtol=1e-5)


def test_touches_are_what_acceptance_gains_per_arrival():
    """DESIGN 2.2 over a round: at rho = 1, S_1 - S_1(lossless) = T_1."""
    estimator = CurveEstimator("threshold", 4)
    estimator.add(make_block(random_scalars(800, 2), [4] * 200))
    curve = estimator.curve()
    np.testing.assert_allclose(curve.reach[:, 1] - curve.reach[0, 1], curve.touches[:, 1], atol=1e-6)


def test_acceptance_counts_examined_tokens_and_actual_lengths():
    """a = .8, block length 8, many last drafts shortened: .80; accepted / drafted would say about .42."""
    rng = np.random.default_rng(3)
    length = np.where(rng.random(6000) < 0.15, rng.integers(1, 8, 6000), 8)
    block = make_block(coin_scalars(np.full(int(length.sum()), 0.8)), length, rng=rng)
    estimator = CurveEstimator("token_v3", 8, half_life_rounds=1e9)
    estimator.add(block)
    assert estimator.acceptance == pytest.approx(0.80, abs=0.01)
    accepted_over_drafted = np.count_nonzero(block.flags & 2) / len(block.flags)
    assert accepted_over_drafted == pytest.approx(0.42, abs=0.03)
    np.testing.assert_allclose(estimator.curve().reach[0], 0.8 ** np.arange(9), rtol=3e-4)


def test_pinned_positions_are_lossless_at_every_setting():
    n = 400
    pinned = np.tile([False, True], n // 2)
    scalars = coin_scalars(np.full(n, 0.5))
    estimator = CurveEstimator("token_v3", 2)
    estimator.add(make_block(scalars, [2] * (n // 2), pinned=pinned))
    top = estimator.curve()
    np.testing.assert_allclose(top.reach[-1], [1, 1, 0.5])
    np.testing.assert_allclose(top.touches[-1], [0, 0.5, 0.5])


def test_the_knob_in_use_does_not_enter_the_curve():
    scalars = random_scalars(600, 4)
    made = []
    for theta in (0.0, 0.4, 1.0):
        estimator = CurveEstimator("token_v3", 3)
        estimator.add(make_block(scalars, [3] * 200, theta=theta))
        made.append(estimator.curve())
    for other in made[1:]:
        np.testing.assert_array_equal(other.reach, made[0].reach)
        np.testing.assert_array_equal(other.touches, made[0].touches)


def test_curves_rise_along_the_path_at_full_weight_and_fall_with_position():
    estimator = CurveEstimator("lenience", 5)
    estimator.add(make_block(random_scalars(1000, 5), [5] * 200))
    curve = estimator.curve()
    ends = [level_end(level) for level in range(1, 41)]
    assert np.all(np.diff(curve.reach[ends], axis=0) >= -1e-6)
    assert np.all(np.diff(curve.reach, axis=1) <= 1e-9)
    assert np.all(np.diff(curve.touches, axis=1) >= 0)


@pytest.mark.parametrize("rule", ["threshold", "forgive", "token_v3"])
def test_a_depth_is_what_decoding_with_it_gives(rule):
    """Lenient at the first positions, with part of the weight at the next, lossless after that: exact, also between."""
    scalars = random_scalars(2400, 6)
    estimator = CurveEstimator(rule, 6, settings=settings_path(5), half_life_rounds=1e12)
    estimator.add(make_block(scalars, [6] * 400))
    curve = estimator.curve()
    a0 = np.asarray(lossless_accept(scalars)).reshape(400, 6)
    for level, depth in ((1, 0.4), (2, 1.0), (3, 2.5), (4, 4.75), (5, 6.0), (5, 9.0)):
        weights = np.clip(depth - np.arange(6), 0, 1)
        full = np.asarray(accept_prob(get_rule(rule), scalars, level / 5)).reshape(400, 6)
        a = a0 + weights * (full - a0)
        after = np.cumprod(a, axis=1)
        before = np.column_stack((np.ones(400), after[:, :-1]))
        reach, touches = curve.at(level, depth)
        np.testing.assert_allclose(reach[1:], after.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(touches[1:], np.cumsum((before * (a - a0)).mean(axis=0)), rtol=1e-4, atol=1e-7)


def test_a_depth_with_rounds_of_unequal_length():
    """Independent positions: beyond the depth rounds keep .5 of what is left, whatever the lengths."""
    rng = np.random.default_rng(8)
    length = rng.integers(1, 6, 2000)
    estimator = CurveEstimator("token_v3", 5)
    n = int(length.sum())
    estimator.add(make_block(coin_scalars(np.full(n, 0.5), np.where(rng.random(n) < 0.3, 0.9, 0.1)), length))
    reach, _ = estimator.curve().at(HALF, 2)
    np.testing.assert_allclose(reach[1:], [0.65, 0.65**2, 0.65**2 / 2, 0.65**2 / 4, 0.65**2 / 8], rtol=0.06)


def test_unseen_positions_go_on_as_the_last_seen_one_with_wider_errors():
    seen, longer = CurveEstimator("token_v3", 8), CurveEstimator("token_v3", 8)
    scalars = coin_scalars(np.full(4 * 400, 0.7), np.tile([0.1, 0.1, 0.1, 0.9], 400))
    seen.add(make_block(scalars, [4] * 400))
    curve = seen.curve()
    np.testing.assert_allclose(curve.reach[0], 0.7 ** np.arange(9), rtol=1e-5)
    i = level_end(HALF)
    last = (curve.touches[i, 4] - curve.touches[i, 3]) / curve.reach[i, 3]
    np.testing.assert_allclose(np.diff(curve.touches[i, 4:]) / curve.reach[i, 4:-1], last, rtol=1e-5)
    assert curve.n_eff[5] == 0
    longer.add(make_block(coin_scalars(np.full(8 * 400, 0.7), np.tile([0.1, 0.1, 0.1, 0.9] * 2, 400)), [8] * 400))
    informed = longer.curve()
    assert np.all(curve.reach_se[0, 5:] > 1.5 * informed.reach_se[0, 5:])
    assert np.all(curve.touches_se[i, 5:] > 1.5 * informed.touches_se[i, 5:])


def test_a_few_longer_blocks_inform_the_curve_in_proportion():
    estimator = CurveEstimator("token_v3", 2)
    n = 500
    estimator.add(make_block(coin_scalars(np.full(n, 0.8)), [1] * n))
    for probes, ratio in ((8, 0.8 - 0.25 * 0.6), (24, 0.2), (100, 0.2)):
        estimator.add(make_block(coin_scalars(np.tile([0.8, 0.2], probes)), [2] * probes))
        curve = estimator.curve()
        assert curve.reach[0, 2] / curve.reach[0, 1] == pytest.approx(ratio, abs=0.02)
    assert curve.n_eff[2] > BORROW_BELOW


def test_standard_errors_cover_what_repetition_shows():
    """For independent rounds errors are upper estimates, by less than a factor of four where touches are common."""
    i = level_end(HALF)
    found, claimed = [], []
    for seed in range(60):
        estimator = CurveEstimator("token_v3", 4, half_life_rounds=1e9)
        for part in range(5):
            estimator.add(make_block(random_scalars(4 * 80, 1000 * seed + part), [4] * 80))
        curve = estimator.curve()
        found.append(np.concatenate((curve.reach[i, 1:], curve.touches[i, 1:])))
        claimed.append(np.concatenate((curve.reach_se[i, 1:], curve.touches_se[i, 1:])))
    spread, mean = np.std(found, axis=0), np.mean(claimed, axis=0)
    assert np.all(mean > 0.8 * spread)
    assert np.all(mean < 4 * spread)


def test_correlated_rounds_widen_the_errors():
    """Rounds that come in runs of 64 alike carry far less than as many independent ones."""
    rng = np.random.default_rng(8)
    errors = {}
    for run in (1, 64):
        estimator = CurveEstimator("token_v3", 2, half_life_rounds=1e9)
        for part in range(40):
            plausible = np.repeat(rng.random(64 // run), 2 * run)
            a0 = np.repeat(rng.choice([0.2, 0.9], 64 // run), 2 * run)
            estimator.add(make_block(coin_scalars(a0, plausible), [2] * 64, seq=part))
        curve = estimator.curve()
        errors[run] = (curve.reach_se[0, 2], curve.touches_se[level_end(HALF), 2])
    assert errors[64][0] > 2 * errors[1][0]
    assert errors[64][1] > 2 * errors[1][1]


def test_no_touch_seen_is_not_no_touch():
    estimator = CurveEstimator("token_v3", 2)
    estimator.add(make_block(coin_scalars(np.full(200, 0.8), np.full(200, 1e-3)), [2] * 100))
    curve = estimator.curve()
    i = level_end(HALF)
    assert curve.touches[i, 2] == 0
    assert curve.touches_se[i, 2] >= 1 / 100
    assert curve.touches_se[0, 2] == 0


def test_old_rounds_are_forgotten_at_the_half_life():
    estimator = CurveEstimator("token_v3", 1, half_life_rounds=100)
    for _ in range(20):
        estimator.add(make_block(coin_scalars(np.full(100, 0.2)), [1] * 100))
    estimator.add(make_block(coin_scalars(np.full(100, 0.8)), [1] * 100))
    assert estimator.curve().reach[0, 1] == pytest.approx(0.5, abs=0.01)
    assert estimator.rounds_effective == pytest.approx(2 * 100 / np.log(2), rel=0.01)


def test_how_rounds_are_cut_into_blocks_does_not_matter():
    scalars = random_scalars(4 * 120, 9)
    whole, parts = (CurveEstimator("token_v3", 4, half_life_rounds=50) for _ in range(2))
    whole.add(make_block(scalars, [4] * 120))
    for i in range(0, 480, 40):
        parts.add(make_block(Scalars(*(v[i : i + 40] for v in scalars)), [4] * 10))
    np.testing.assert_allclose(parts.curve().reach, whole.curve().reach, rtol=1e-5)
    np.testing.assert_allclose(parts.curve().touches, whole.curve().touches, rtol=1e-4, atol=1e-7)
    assert parts.rounds_effective == pytest.approx(whole.rounds_effective)


def test_rounds_of_several_requests_are_kept_apart():
    """Two rows in the same round index are two rounds; order of entries does not matter."""
    block = make_block(coin_scalars(np.tile([0.9, 0.8, 0.3, 0.2], 100)), [4] * 100)
    two = replace(
        block,
        request=np.tile([1, 1, 2, 2], 100).astype(np.uint16),
        position=np.tile([1, 2, 1, 2], 100).astype(np.uint8),
    )
    order = np.random.default_rng(0).permutation(400)
    names = ("request", "round", "position", "theta", "flags", *Scalars._fields)
    shuffled = replace(two, **{name: getattr(two, name)[order] for name in names})
    for made in (two, shuffled):
        estimator = CurveEstimator("token_v3", 2, half_life_rounds=1e9)
        estimator.add(made)
        np.testing.assert_allclose(estimator.curve().reach[0], [1, 0.6, (0.72 + 0.06) / 2], rtol=1e-5)
        assert estimator.rounds_effective == pytest.approx(200)


def test_broken_rounds_are_left_out_and_long_ones_cut():
    block = make_block(coin_scalars(np.full(6, 0.5)), [2, 2, 2])
    broken = replace(block, position=np.array([1, 2, 2, 3, 1, 2], dtype=np.uint8))
    estimator = CurveEstimator("token_v3", 1)
    estimator.add(broken)
    assert estimator.rounds_effective == pytest.approx(2, rel=1e-3)
    assert estimator.curve().reach.shape[1] == 2


def test_nothing_drafted_says_so():
    estimator = CurveEstimator("token_v3", 4)
    estimator.add(make_block(coin_scalars([]), [0, 0]))
    assert estimator.acceptance is None
    assert estimator.rounds_effective == 0
    with pytest.raises(TooFewSamples):
        estimator.curve()


def test_forgetting_on_request_makes_room_for_new_evidence():
    estimator = CurveEstimator("token_v3", 1)
    estimator.add(make_block(coin_scalars(np.full(400, 0.2)), [1] * 400))
    before = estimator.rounds_effective
    estimator.forget(0.1)
    assert estimator.rounds_effective < 0.3 * before
    assert estimator.curve().reach[0, 1] == pytest.approx(0.2)
    estimator.add(make_block(coin_scalars(np.full(100, 0.8)), [1] * 100))
    assert estimator.curve().reach[0, 1] > 0.6


def test_a_restart_goes_on_bit_for_bit():
    one = CurveEstimator("token_v3", 5, half_life_rounds=300)
    for seed in range(6):
        one.add(make_block(random_scalars(5 * 40, seed), [5] * 40))
    two = CurveEstimator.from_state(json.loads(json.dumps(one.to_state())))
    for seed in range(6, 12):
        block = make_block(random_scalars(3 * 40, seed), [3] * 40)
        one.add(block)
        two.add(block)
    assert one.to_state() == two.to_state()
    for name in ("reach", "touches", "reach_se", "touches_se", "by_depth", "n_eff"):
        np.testing.assert_array_equal(getattr(one.curve(), name), getattr(two.curve(), name))


def test_a_state_of_another_shape_is_refused():
    state = CurveEstimator("token_v3", 5).to_state()
    with pytest.raises(ValueError, match="numbers"):
        CurveEstimator.from_state(state | {"g_max": 4})


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="unknown accept rule"):
        CurveEstimator("nonsense", 4)
    with pytest.raises(ValueError, match="g_max"):
        CurveEstimator("token_v3", 0)
    with pytest.raises(ValueError, match="level"):
        settings_path(0)
    estimator = CurveEstimator("token_v3", 2)
    estimator.add(make_block(coin_scalars([0.5] * 4), [2, 2]))
    with pytest.raises(ValueError, match="path"):
        estimator.curve().at(41, 1.0)
    with pytest.raises(ValueError, match="path"):
        estimator.curve().at(1, -0.5)


def test_the_path_runs_from_lossless_to_full_leniency():
    settings = settings_path()
    assert (settings.theta[0], settings.theta[-1], len(settings)) == (0, 1, 41)
    assert np.all(np.diff(settings.theta) > 0)
    assert [settings.level_of(theta) for theta in settings.theta] == list(range(41))
    assert settings.level_of(0.512) == 20


def test_estimate_and_solver_fit_together():
    estimator = CurveEstimator("token_v3", 8)
    for seed in range(20):
        estimator.add(make_block(random_scalars(8 * 64, seed), [8] * 64))
    found = solve(estimator.curve(), *costs(8, 0.05), d_allowed=0.02)
    assert found.certified
    assert 0 < found.touches_per_token < found.touches_per_token_upper <= 0.02 * (1 + 1e-6)
