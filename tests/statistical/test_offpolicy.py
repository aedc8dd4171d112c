"""Data taken at one knob predicts the others (DESIGN 2.4), on a source with memory.

Round starts are frozen: those of one long generation at the knob in use. At each of them blocks are drafted, and each
knob's accepted tokens and touches are counted with real coins; the estimator saw other blocks, other coins, one knob.

Chance to fail: each of 2 rules x 5 knobs x 2 quantities is tested at 3 standard errors of the difference (two-sided
.0027 each, about 5 % over all for a fresh seed, less as they are correlated); the seeds are fixed, so the outcome is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from controller.curve import Curve
from controller.estimate import CurveEstimator
from policies.rules import accept_prob, get_rule, lossless_accept
from storage.records import EXAMINED
from tests.support_blocks import MarkovSource, make_block

G, ROUNDS, IN_USE = 5, 12_000, 0.3
KNOBS = (0.0, 0.1, 0.5, 0.75, 1.0)
F = npt.NDArray[np.float64]


class Experiment:
    """One rule: estimate from data at IN_USE, and counts at other knobs from the same starts."""

    def __init__(self, rule: str):
        self.rule = rule
        self.source = MarkovSource(seed=3)
        rng = np.random.default_rng(11)
        self.starts = self.source.starts(ROUNDS, G, rng, rule, IN_USE)
        self.estimator = CurveEstimator(rule, G, half_life_rounds=1e12)
        self.naive = np.zeros((2, G, len(KNOBS)))  # per-position sums over examined tokens: acceptance, touch rate
        self.examined = np.zeros(G)
        self.lossless_by_round: F = np.empty((0, G))
        for i in range(0, ROUNDS, 100):
            self._observe(self.starts[i : i + 100], rng)

    def _observe(self, starts: npt.NDArray[np.int64], rng: np.random.Generator) -> None:
        states, tokens = self.source.draft(starts, G, rng)
        scalars = self.source.scalars(states[:, :G].ravel(), tokens.ravel())
        block = make_block(scalars, [G] * len(starts), rule=self.rule, theta=IN_USE, rng=rng)
        self.estimator.add(block)
        seen = ((block.flags & EXAMINED) > 0).reshape(-1, G)
        self.examined += seen.sum(axis=0)
        a0 = np.asarray(lossless_accept(scalars)).reshape(-1, G)
        for k, theta in enumerate(KNOBS):
            a = np.asarray(accept_prob(get_rule(self.rule), scalars, theta)).reshape(-1, G)
            self.naive[0, :, k] += (a * seen).sum(axis=0)
            self.naive[1, :, k] += ((a - a0) * seen).sum(axis=0)

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
        i = int(curve.settings.bounds[round(theta * 40) + 1]) - 1
        return float(curve.tokens[i, G]) - 1, float(curve.touches[i, G])

    def predicted_naively(self, k: int) -> tuple[float, float]:
        """From acceptance per position over examined tokens, as if positions were independent."""
        accept, touch = self.naive[:, :, k] / self.examined
        reach = np.cumprod(np.concatenate(([1.0], accept)))
        return float(reach[1:].sum()), float((reach[:-1] * touch).sum())


@pytest.fixture(scope="module", params=["threshold", "token_v3"])
def experiment(request: pytest.FixtureRequest) -> Experiment:
    return Experiment(request.param)


def deviations(experiment: Experiment, *, naive: bool) -> F:
    """Prediction minus count in standard errors of the difference, shape [knobs, 2]: accepted tokens, touches."""
    curve = experiment.estimator.curve()
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
    assert np.max(np.abs(found)) > 6, found


def test_lossless_has_no_touches_whatever_was_in_use(experiment):
    assert experiment.predicted(experiment.estimator.curve(), 0.0)[1] == 0
    assert experiment.counted(0.0, 5)[1].sum() == 0


def test_claimed_errors_cover_the_deviation(experiment):
    """The curve's own standard errors, with the count's, cover the difference at three of them too."""
    curve = experiment.estimator.curve()
    for k, theta in enumerate(KNOBS):
        i = int(curve.settings.bounds[round(theta * 40) + 1]) - 1
        accepted, touches = experiment.counted(theta, seed=100 + k)
        for count, value, error in (
            (accepted, curve.tokens[i, G] - 1, curve.reach_se[i, 1:].sum()),
            (touches, curve.touches[i, G], curve.touches_se[i, G]),
        ):
            assert abs(value - count.mean()) <= 3 * np.hypot(error, count.std() / np.sqrt(len(count)))
