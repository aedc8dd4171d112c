"""Data taken at one knob predicts every rule at every knob (DESIGN 2.4), on a source with memory and on the pair.

Round starts are frozen: those of one long generation at the knob in use. At each of them blocks are drafted, and each
knob's accepted tokens and touches are counted with real coins; the estimator saw other blocks, other coins, one knob.

Chance to fail: each of 9 rules x 10 knobs x 2 quantities is tested at 3 standard errors of a difference whose variance
is bounded from above (two-sided .0027 each at most; the knobs of a rule share blocks and coins, so about 5 % over all
for a fresh seed); the seeds are fixed, so the outcome is. The pair: the same for 3 rules x 10 knobs, about 2 %.
Recorded texts: for 2 rules x 10 knobs, about 2 %.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from bench import mixture, offpolicy
from controller.curve import Curve
from controller.estimate import CurveEstimator
from decoder.demo.pair import load_pair
from decoder.demo.simulation import fresh_problems
from policies.rules import RULES, accept_prob, get_rule, lossless_accept
from storage.records import EXAMINED
from tests.support_blocks import MarkovSource, make_block

G, ROUNDS, PART = 5, 8_000, 400
IN_USE = ("token_v3", 0.3)
KNOBS = (0.0, 0.1, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
COMPLETED = [name for name in RULES if name != "lossless"]
F = npt.NDArray[np.float64]


class Recorded:
    """Round starts of one long generation at IN_USE, and the blocks drafted there, with the worker's coins."""

    def __init__(self) -> None:
        self.source = MarkovSource(seed=3)
        rng = np.random.default_rng(11)
        self.starts = self.source.starts(ROUNDS, G, rng, *IN_USE)
        self.blocks = []
        for i in range(0, ROUNDS, PART):
            states, tokens = self.source.draft(self.starts[i : i + PART], G, rng)
            scalars = self.source.scalars(states[:, :G].ravel(), tokens.ravel())
            self.blocks.append((scalars, make_block(scalars, [G] * PART, rule=IN_USE[0], theta=IN_USE[1], rng=rng)))


class Experiment:
    """One rule: estimate from the recorded blocks, and counts at other knobs from the same starts."""

    def __init__(self, rule: str, recorded: Recorded):
        self.rule, self.source, self.starts = rule, recorded.source, recorded.starts
        self.estimator = CurveEstimator(rule, G, half_life_rounds=1e12)
        self.naive = np.zeros((2, G, len(KNOBS)))  # per-position sums over examined tokens: acceptance, touch rate
        self.examined = np.zeros(G)
        for scalars, block in recorded.blocks:
            self.estimator.add(block)
            seen = ((block.flags & EXAMINED) > 0).reshape(-1, G)
            self.examined += seen.sum(axis=0)
            a0 = np.asarray(lossless_accept(scalars)).reshape(-1, G)
            for k, theta in enumerate(KNOBS):
                a = np.asarray(accept_prob(get_rule(rule), scalars, theta)).reshape(-1, G)
                self.naive[0, :, k] += (a * seen).sum(axis=0)
                self.naive[1, :, k] += ((a - a0) * seen).sum(axis=0)
        self.curve = self.estimator.curve()

    def counted(self, theta: float, seed: int) -> tuple[F, F]:
        """Accepted tokens and touches of each round at a knob, played with coins; shape [ROUNDS]."""
        rng = np.random.default_rng(seed)
        states, tokens = self.source.draft(self.starts, G, rng)
        scalars = self.source.scalars(states[:, :G].ravel(), tokens.ravel())
        a0 = np.asarray(lossless_accept(scalars)).reshape(-1, G)
        a = np.asarray(accept_prob(get_rule(self.rule), scalars, theta)).reshape(-1, G)
        u = rng.random(a.shape)
        alive = np.cumprod(u <= a, axis=1)
        return alive.sum(axis=1).astype(float), ((u > a0) & (alive > 0)).sum(axis=1).astype(float)

    def predicted(self, curve: Curve, theta: float) -> tuple[float, float]:
        i = curve.settings.level_of(theta)
        return float(curve.tokens[i, G]) - 1, float(curve.touches[i, G])

    def predicted_naively(self, k: int) -> tuple[float, float]:
        """From acceptance per position over examined tokens, as if positions were independent."""
        accept, touch = self.naive[:, :, k] / self.examined
        reach = np.cumprod(np.concatenate(([1.0], accept)))
        return float(reach[1:].sum()), float((reach[:-1] * touch).sum())


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture(scope="module", params=COMPLETED)
def experiment(request: pytest.FixtureRequest, recorded: Recorded) -> Experiment:
    return Experiment(request.param, recorded)


def deviations(experiment: Experiment, *, naive: bool) -> F:
    """Prediction minus count in standard errors of the difference, shape [knobs, 2]: accepted tokens, touches."""
    curve = experiment.curve
    found = np.zeros((len(KNOBS), 2))
    for k, theta in enumerate(KNOBS):
        predicted = experiment.predicted_naively(k) if naive else experiment.predicted(curve, theta)
        for q, count in enumerate(experiment.counted(theta, seed=100 + k)):
            # The prediction averages products where the count averages coins, so it varies less: twice the count's
            # variance is an upper bound on the difference's, given the starts.
            error = np.sqrt(2 * count.var() / len(count))
            found[k, q] = (predicted[q] - count.mean()) / error if error > 0 else predicted[q] - count.mean()
    return found


def test_one_knob_predicts_the_others_within_three_standard_errors(experiment):
    found = deviations(experiment, naive=False)
    assert np.all(np.abs(found) < 3), found


def test_acceptance_per_position_over_examined_tokens_does_not(experiment):
    """The negative control: the contexts behind a rejection are missing from it, so it fails, and by far."""
    found = deviations(experiment, naive=True)
    assert np.max(np.abs(found)) > 4, found


def test_lossless_has_no_touches_whatever_was_in_use(experiment):
    assert experiment.predicted(experiment.curve, 0.0)[1] == 0
    assert experiment.counted(0.0, 5)[1].sum() == 0


def test_claimed_errors_cover_the_deviation(experiment):
    """The curve's own standard errors, with the count's, cover the difference at three of them too."""
    curve = experiment.curve
    for k, theta in enumerate(KNOBS):
        i = curve.settings.level_of(theta)
        accepted, touches = experiment.counted(theta, seed=100 + k)
        for count, value, error in (
            (accepted, curve.tokens[i, G] - 1, curve.reach_se[i, 1:].sum()),
            (touches, curve.touches[i, G], curve.touches_se[i, G]),
        ):
            assert abs(value - count.mean()) <= 3 * np.hypot(error, count.std() / np.sqrt(len(count)))


@pytest.fixture(scope="module")
def played():
    """A few problems of the bundled pair, decoded at one knob, with two blocks drafted at each round start."""
    torch.set_num_threads(1)
    return offpolicy.play(load_pair(), fresh_problems(5, 50, "easy"), *offpolicy.IN_USE, record=True)


@pytest.mark.parametrize("rule", ["threshold", "forgive", "token_v3"])
def test_on_the_bundled_pair_one_knob_predicts_the_others_at_frozen_starts(played, rule):
    curve = offpolicy.curve_of(rule, played.recorded)
    found = offpolicy.frozen(rule, curve, played, np.random.default_rng(1))
    assert len(found["curve"]) >= 2 * len(offpolicy.KNOBS) - 2
    assert np.max(np.abs(found["curve"])) < 3


@pytest.mark.parametrize("rule", mixture.RULES)
def test_on_recorded_easy_and_hard_texts_products_hold_and_positions_alone_do_not(rule):
    """The negative control on the bundled pair's texts: late positions were examined in easy requests."""
    a0, requests = mixture.round_starts()
    found = mixture.deviations(a0, requests, rule, np.random.default_rng(1))
    assert len(found["products"]) >= 2 * len(mixture.KNOBS) - 2
    assert np.max(np.abs(found["products"])) < 3
    assert np.max(np.abs(found["control"])) > 10
