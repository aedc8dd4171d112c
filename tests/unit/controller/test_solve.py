"""The solver at its limits, on garbage, and its hysteresis; brute force is in properties/test_solve.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from controller import speedup as sp
from controller.curve import Curve, flat, settings_path
from controller.solve import Solution, choose, enumerate_solve, frontier, gain_noise, solve
from policies.errors import Infeasible, SolveError, TooFewSamples
from storage.records import MAX_DEPTH
from tests.support_curves import constant_curve, costs

G = 12


def test_lossless_answer_is_the_closed_form():
    """Constant acceptance .8 and cost ratio .05: the best g of Eq. 3 and its speed."""
    found = solve(constant_curve(0.8, 0.1, G), *costs(G, 0.05), d_allowed=0.0)
    g = sp.best_block(0.8, 0.05, G)
    assert (found.g, found.theta, found.rho, found.depth, found.s) == (g, 0.0, 0.0, MAX_DEPTH, 0.0)
    assert found.speedup_plain == pytest.approx(sp.speedup(0.8, g, 0.05))
    assert found.speedup_lossless == 1.0
    assert found.target_passes_per_token == pytest.approx(1 / sp.block_efficiency(0.8, g))
    assert found.certified


def test_budget_buys_speed_and_is_not_exceeded():
    curve = constant_curve(0.8, 0.1, G)
    found = solve(curve, *costs(G, 0.05), d_allowed=0.02)
    assert found.certified
    assert found.theta > 0
    assert found.speedup_lossless > 1.02
    assert found.touches_per_token_upper == pytest.approx(0.02, rel=1e-6)


def test_pessimism_leaves_room_for_the_error_of_the_estimate():
    curve = constant_curve(0.8, 0.1, G)
    unsure = replace(curve, touches_se=0.3 * curve.touches)
    bold, careful = (solve(unsure, *costs(G, 0.05), d_allowed=0.02, pessimism=z) for z in (0.0, 2.0))
    assert careful.touches_per_token < bold.touches_per_token == pytest.approx(0.02, rel=1e-6)
    assert careful.touches_per_token_upper == pytest.approx(0.02, rel=1e-6)
    assert careful.seconds_per_token > bold.seconds_per_token


def test_value_of_budget_is_finite_at_zero_and_vanishes_when_the_knob_is_at_its_limit():
    curve = constant_curve(0.8, 0.1, G)
    at_zero = solve(curve, *costs(G, 0.05), d_allowed=0.0)
    assert 0 < at_zero.budget_value < 10
    small = solve(curve, *costs(G, 0.05), d_allowed=0.001)
    predicted = at_zero.seconds_per_token - at_zero.budget_value * 0.001 * at_zero.plain_seconds_per_token
    assert small.seconds_per_token == pytest.approx(predicted, rel=1e-3)
    assert solve(curve, *costs(G, 0.05), d_allowed=0.5).budget_value == 0.0


def test_plain_decoding_is_chosen_when_it_is_fastest():
    found = solve(constant_curve(0.3, 0.0, G), *costs(G, 0.5), d_allowed=0.1)
    assert (found.g, found.theta, found.touches_per_token) == (0, 0.0, 0.0)
    assert found.speedup_plain == 1.0
    assert found.certified


def test_dear_verification_at_high_load_turns_drafting_off():
    curve = constant_curve(0.88, 0.0, G)
    draft = 0.001 * np.arange(G + 1)
    free, dear = (solve(curve, draft, 0.02 * (1 + slope * np.arange(G + 1)), 0.001, d_allowed=0) for slope in (0.02, 1))
    assert free.g > 4
    assert dear.g == 0


def test_nothing_accepted_means_plain_and_everything_accepted_the_longest_block():
    assert solve(constant_curve(0.0, 0.0, G), *costs(G, 0.05), d_allowed=0.1).g == 0
    assert solve(constant_curve(1.0, 0.0, G), *costs(G, 0.05), d_allowed=0.1).g == G


def test_theta_stays_under_the_policy_cap():
    curve = constant_curve(0.5, 0.3, G)
    for cap in (0.0, 0.01, 0.5, 0.63, 0.9):
        assert solve(curve, *costs(G, 0.05), d_allowed=1.0, max_theta=cap).theta <= cap
    assert solve(curve, *costs(G, 0.05), d_allowed=1.0, max_theta=0.5).theta == 0.5


def test_a_rule_that_cannot_drift_stays_at_the_lossless_setting():
    assert solve(constant_curve(0.8, 0.0, G), *costs(G, 0.05), d_allowed=0.1).theta == 0.0


def test_block_length_is_limited_on_request():
    assert solve(constant_curve(1.0, 0.0, G), *costs(G, 0.05), d_allowed=0.0, g_max=3).g == 3
    assert solve(constant_curve(1.0, 0.0, G), *costs(G, 0.05), d_allowed=0.0, fixed_g=5).g == 5
    with pytest.raises(ValueError, match="fixed_g"):
        solve(constant_curve(1.0, 0.0, G), *costs(G, 0.05), d_allowed=0.0, fixed_g=G + 1)


def test_a_dip_of_a_noisy_estimate_does_not_let_the_knob_jump_over_a_bump():
    """Touches that fall again beyond a level that breaks the allowance are noise: the first break ends the climb."""
    curve = constant_curve(0.8, 0.2, G)
    touches = curve.touches.copy()
    touches[10] *= 5
    found = solve(replace(curve, touches=touches), *costs(G, 0.05), d_allowed=0.08)
    assert found.theta <= 10 / 40
    assert solve(curve, *costs(G, 0.05), d_allowed=0.08).theta > 10 / 40


@pytest.mark.parametrize("name", ["reach", "touches", "touches_se", "reach_se", "by_depth", "n_eff"])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -0.5])
def test_garbage_in_the_curve_is_refused(name, garbage):
    curve = constant_curve(0.8, 0.1, G)
    values = getattr(curve, name).copy()
    values[..., -1] = garbage
    with pytest.raises(SolveError):
        solve(replace(curve, **{name: values}), *costs(G, 0.05), d_allowed=0.01)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -1.0])
def test_garbage_in_the_costs_is_refused(which, garbage):
    parts = list(costs(G, 0.05))
    parts[which] = np.asarray(parts[which], dtype=float) * np.ones(G + 1)
    parts[which][3] = garbage
    with pytest.raises(SolveError, match="finite"):
        solve(constant_curve(0.8, 0.1, G), *parts, d_allowed=0.01)


def test_costs_of_zero_are_refused():
    zero = np.zeros(G + 1)
    with pytest.raises(SolveError, match="no time"):
        solve(constant_curve(0.8, 0.1, G), zero, zero, 0.0, d_allowed=0.01)


def test_errors_say_what_is_missing():
    curve, seconds = constant_curve(0.8, 0.1, G), costs(G, 0.05)
    with pytest.raises(Infeasible):
        solve(curve, *seconds, d_allowed=-0.01)
    with pytest.raises(SolveError, match="not a number"):
        solve(curve, *seconds, d_allowed=float("nan"))
    with pytest.raises(TooFewSamples):
        solve(replace(curve, n_eff=np.zeros(G + 1)), *seconds, d_allowed=0.01)
    with pytest.raises(SolveError, match="reach"):
        solve(replace(curve, reach=curve.reach * 1.1), *seconds, d_allowed=0.01)
    with pytest.raises(SolveError, match="lossless"):
        solve(replace(curve, touches=curve.touches + 0.1), *seconds, d_allowed=0.01)
    for options in ({"max_theta": 1.1}, {"pessimism": -1.0}, {"g_max": G + 1}):
        with pytest.raises(ValueError, match="g_max"):
            solve(curve, *seconds, d_allowed=0.01, **options)
    with pytest.raises(ValueError, match="verify_s"):
        solve(curve, seconds[0], seconds[1][:3], 0.0, d_allowed=0.01)


def test_one_frontier_serves_every_load():
    curve = constant_curve(0.8, 0.1, G)
    front = frontier(curve, d_allowed=0.02)
    for c in (0.01, 0.1, 0.4):
        draft, verify, overhead = costs(G, c)
        found = solve(curve, draft, verify, overhead, d_allowed=0.02)
        assert found.g == int(((draft + verify + overhead) / front.tokens).argmin())
        assert (found.theta, found.rho, found.depth) == front.knobs(curve, found.g)


def test_brute_force_agrees_on_a_plain_case():
    curve, seconds = constant_curve(0.8, 0.1, G), costs(G, 0.05)
    found = solve(curve, *seconds, d_allowed=0.02)
    g, level, depth, value = enumerate_solve(curve, *seconds, d_allowed=0.02)
    assert (found.g, found.theta) == (g, curve.settings.theta[level])
    assert found.depth == pytest.approx(depth)
    assert found.seconds_per_token == pytest.approx(value)


class TestHysteresis:
    curve = constant_curve(0.8, 0.1, G)

    def pair(self, longer: int, d_allowed: float = 0.01) -> tuple[Solution, Solution]:
        seconds = costs(G, 0.05)
        best = solve(self.curve, *seconds, d_allowed=d_allowed)
        return solve(self.curve, *seconds, d_allowed=d_allowed, fixed_g=best.g + longer), best

    def test_a_gain_within_the_noise_changes_nothing(self):
        current, best = self.pair(longer=1)
        assert current.g != best.g
        assert choose(current, best, 0.05) is current

    def test_a_gain_beyond_the_noise_moves_the_block_length(self):
        current, best = self.pair(longer=-5)
        assert choose(current, best, 0.05) is best
        assert choose(self.pair(longer=1)[0], best, 0.0) is best

    def test_the_knob_follows_a_shrinking_allowance_at_once(self):
        loose, _ = self.pair(longer=1, d_allowed=0.02)
        _, tight = self.pair(longer=1, d_allowed=0.0)
        assert choose(loose, tight, 10.0) is tight
        lying = replace(loose, d_allowed=0.0)
        assert choose(lying, tight, 10.0) is tight

    def test_first_answer_and_same_length_are_taken(self):
        current, best = self.pair(longer=1)
        assert choose(None, best) is best
        again = replace(best, theta=0.9)
        assert choose(again, best, 10.0) is best
        with pytest.raises(ValueError, match="noise"):
            choose(current, best, -1.0)

    def test_noise_counts_only_what_two_lengths_do_not_share(self):
        reach_se = np.full(self.curve.reach.shape, 0.01)
        reach_se[:, 0] = 0
        curve = replace(self.curve, reach_se=reach_se)
        current, best = self.pair(longer=1)
        assert gain_noise(curve, best, best) == 0
        noise = gain_noise(curve, current, best)
        assert 0 < noise < 0.01 * current.g / best.tokens_per_round
        assert noise == pytest.approx(gain_noise(curve, best, current))


def test_path_parameter_rises_with_the_allowance():
    curve = constant_curve(0.8, 0.1, G)
    found = [solve(curve, *costs(G, 0.05), d_allowed=d, fixed_g=6).s for d in (0.0, 1e-4, 0.003, 0.02, 0.2)]
    assert found[0] == 0
    assert found[-1] == 1
    assert found == sorted(found)


def jumping(touch: float, error: float, level: int = 30, a: float = 0.7, g_max: int = G) -> Curve:
    """A rule without touches below a level, ``touch`` at each position from there on; ``error`` is that of touches."""
    curve = constant_curve(a, 0.0, g_max)
    settings = curve.settings
    gain = np.where(np.arange(len(settings)) >= level, touch, 0.0)
    reach = (a + gain)[:, None] ** np.arange(g_max + 1)
    touches = np.zeros_like(reach)
    touches[:, 1:] = np.cumsum(reach[:, :-1] * gain[:, None], axis=1)
    touches_se = np.where(np.arange(len(settings))[:, None] > 0, error, 0.0) * np.ones_like(reach)
    touches_se[:, 0] = 0
    return replace(curve, reach=reach, touches=touches, touches_se=touches_se, by_depth=flat(reach))


def test_the_smallest_allowance_opens_a_rule_that_jumps():
    """At the first position only, with little weight: half as much allowance, half as much weight and half the gain."""
    curve = jumping(0.1, 0.0)
    found = [solve(curve, *costs(G, 0.05), d_allowed=d) for d in (2e-5, 1e-5)]
    assert {f.theta for f in found} == {30 / 40}
    assert found[0].depth == pytest.approx(2 * found[1].depth, rel=0.01)
    assert found[0].depth < 1
    gain = [f.speedup_lossless - 1 for f in found]
    assert gain[0] == pytest.approx(2 * gain[1], rel=0.01)
    assert gain[1] > 0


def test_levels_whose_touches_are_only_feared_do_not_hide_one_that_has_some():
    """With few rounds even the first level breaks a small allowance, since a touch there cannot be ruled out yet."""
    curve = jumping(0.1, 0.002)
    found = solve(curve, *costs(G, 0.05), d_allowed=1e-4)
    assert found.theta == 30 / 40
    assert found.touches_per_token_upper == pytest.approx(1e-4)
    assert found.touches_per_token > 0.5e-4
    assert solve(jumping(0.001, 0.002), *costs(G, 0.05), d_allowed=1e-4).theta <= 30 / 40


def test_leniency_goes_to_the_first_positions():
    """The same touches at all positions alike would give fewer tokens: docs/decisions/0001."""
    found = solve(jumping(0.1, 0.0, a=0.8), *costs(G, 0.05), d_allowed=0.02, fixed_g=8)
    assert 0 < found.depth < 8
    even = np.linspace(0, 0.1, 10_000)[:, None]
    tokens = ((0.8 + even) ** np.arange(9)).sum(axis=1)
    touches = even[:, 0] * ((0.8 + even) ** np.arange(8)).sum(axis=1)
    assert found.tokens_per_round > 1.01 * tokens[touches <= 0.02 * tokens].max()


def test_a_curve_over_few_levels_is_enough():
    settings = settings_path(2)
    curve = constant_curve(0.8, 0.1, G, settings)
    assert isinstance(curve, Curve)
    assert solve(curve, *costs(G, 0.05), d_allowed=0.02).certified
