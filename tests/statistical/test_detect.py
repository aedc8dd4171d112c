"""The detector keeps its word: run length to a false alarm, and delay. Acceptance .8, coins, blocks of 256 tokens.

Run lengths. ``n`` tokens with a true mean run length of 100,000 would show more than ``limit`` alarms with the stated
Poisson probability; seeds are fixed. The negative control has no inflation for correlation and must fail.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from controller.detect import Detector

F = npt.NDArray[np.float64]
TOKENS = 1_500_000
LIMIT = 15  # what a run length of exactly 100,000 gives in the mean: a longer one is claimed, and twice it measured


def coins(rng: np.random.Generator, n: int) -> F:
    return (rng.random(n) < 0.8).astype(float)


def correlated(rng: np.random.Generator, n: int, dwell: float = 30, low: float = 0.65, high: float = 0.95) -> F:
    """Stationary with mean .8: easy and hard stretches of a geometric number of tokens."""
    lengths = rng.geometric(1 / dwell, size=int(3 * n / dwell) + 10)
    level = np.where(np.arange(len(lengths)) % 2 == 0, low, high)
    return (rng.random(n) < np.repeat(level, lengths)[:n]).astype(float)


def alarms(detector: Detector, values: F, block: int = 256) -> int:
    for i in range(0, len(values), block):
        part = values[i : i + block]
        detector.add(np.ones(len(part)), part)
    return detector.alarms


@pytest.mark.parametrize("source", [coins, correlated])
def test_a_false_alarm_takes_100_000_examined_tokens(source):
    """Chance to fail with a fresh seed, at the measured rates of one alarm in 300,000 and 150,000 tokens: under 5 %."""
    assert alarms(Detector(), source(np.random.default_rng(7), TOKENS)) <= LIMIT


class Uninflated(Detector):
    phi = 1.0  # type: ignore[assignment]


def test_without_inflation_correlation_is_taken_for_change():
    """The negative control."""
    assert alarms(Uninflated(), correlated(np.random.default_rng(7), 300_000)) > 4 * 300_000 / 100_000


def delays(rng: np.random.Generator, learnt: int, after: float, runs: int) -> list[int]:
    found = []
    for _ in range(runs):
        detector = Detector()
        alarms(detector, coins(rng, learnt))
        for i in range(5000):
            if detector.add([1.0], [float(rng.random() < after)]) is not None:
                found.append(i + 1)
                break
    return found


def test_a_fall_from_8_to_6_is_found_within_150_examined_tokens():
    """Median of 60 after 5,000 tokens at .8; measured: about 100. Chance to fail: below .001."""
    found = delays(np.random.default_rng(3), 5000, 0.6, 60)
    assert len(found) == 60
    assert np.median(found) <= 150


def test_a_large_change_is_found_in_a_handful_even_after_little():
    """From .1, known from 300 tokens, to .9: what a few probes of a class that is off must show."""
    rng = np.random.default_rng(4)
    found = []
    for _ in range(40):
        detector = Detector()
        alarms(detector, (rng.random(300) < 0.1).astype(float))
        found.append(next(i for i in range(1, 500) if detector.add([1.0], [float(rng.random() < 0.9)]) is not None))
    assert np.median(found) <= 16


def mixture(rng: np.random.Generator, n: int) -> F:
    """Nine requests of 120 tokens at .93 for one of 60 at .45, in random order: stationary, in clusters."""
    parts: list[F] = []
    while sum(map(len, parts)) < n:
        rare = rng.random() < 0.1
        parts.append((rng.random(60 if rare else 120) < (0.45 if rare else 0.93)).astype(float))
    return np.concatenate(parts)[:n]


def test_requests_of_a_rarer_kind_are_no_change_once_one_was_seen():
    """Per run the first rare requests may alarm, in 2,000 tokens; of 10 runs of 20,000 more, measured: 3 of 16 have an
    alarm. Chance that 6 of 10 have: below .01."""
    early, late = 0, 0
    for seed in range(10):
        detector, values = Detector(), mixture(np.random.default_rng([9, seed]), 22_000)
        first = alarms(detector, values[:2000], block=60)
        early, late = early + first, late + (alarms(detector, values[2000:], block=60) > first)
    assert early <= 15
    assert late <= 5


def test_a_change_that_stays_is_found_after_spells_too():
    """The price of having seen spells: from .93 to .45 for good takes some rare requests' tokens, not thousands."""
    found = []
    for seed in range(10):
        rng = np.random.default_rng([8, seed])
        detector = Detector()
        alarms(detector, mixture(rng, 10_000), block=60)
        for i in range(0, 3000, 20):
            if detector.add(np.ones(20), (rng.random(20) < 0.45).astype(float)) is not None:
                found.append(i + 20)
                break
    assert len(found) == 10
    assert np.median(found) <= 600
