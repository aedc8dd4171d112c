"""The detector's bookkeeping: restart, dating, state, misuse; and that the acceptance signal ignores the knob."""

from __future__ import annotations

import json

import numpy as np
import pytest

from controller.detect import LENGTH_UNITS, SIGNALS, Detector, Watch, examined_and_accepted
from policies.rules import Scalars, lossless_accept
from storage.records import ACCEPTED, EXAMINED
from tests.support_blocks import coin_scalars, make_block


def coins(seed: int, n: int, a: float) -> np.ndarray:
    return (np.random.default_rng(seed).random(n) < a).astype(float)


def test_an_alarm_says_what_changed_and_since_when():
    detector = Detector()
    assert detector.add(np.ones(3000), coins(0, 3000, 0.8)) is None
    alarm = None
    for i in range(40):
        alarm = detector.add(np.ones(10), coins(1 + i, 10, 0.4))
        if alarm:
            break
    assert alarm is not None
    assert (alarm.signal, round(alarm.before, 1)) == ("draft", 0.8)
    assert alarm.since == pytest.approx(0.4, abs=0.12)
    assert alarm.units == pytest.approx(10 * (i + 1), abs=25)


def test_it_restarts_at_the_new_mean_and_finds_the_way_back():
    detector = Detector()
    detector.add(np.ones(3000), coins(0, 3000, 0.8))
    assert detector.add(np.ones(1000), coins(1, 1000, 0.5)) is not None
    assert detector.mean == pytest.approx(0.5, abs=0.05)
    assert detector.alarms == 1
    assert detector.add(np.ones(1000), coins(2, 1000, 0.8)) is not None
    assert detector.alarms == 2


@pytest.mark.parametrize("a", [0.0, 1.0])
def test_constant_acceptance_of_zero_or_one_is_watched_too(a):
    detector = Detector()
    assert detector.add(np.ones(5000), np.full(5000, a)) is None
    assert detector.add(np.ones(100), np.full(100, 0.5)) is not None


def test_how_the_stream_is_cut_does_not_matter_to_a_large_change():
    values = np.concatenate((coins(0, 2000, 0.9), coins(1, 200, 0.1)))
    found = []
    for cut in (1, 7, 500):
        detector = Detector()
        for i in range(0, len(values), cut):
            part = values[i : i + cut]
            if detector.add(np.ones(len(part)), part) is not None:
                found.append(i)
                break
    assert len(found) == 3
    assert max(found) - min(found) < 510


def test_correlation_raises_the_inflation_and_coins_do_not():
    runs = np.repeat(coins(3, 2000, 0.8), 10)
    alike, apart = Detector(), Detector()
    for i in range(0, 20_000, 200):
        alike.add(np.ones(200), runs[i : i + 200])
        apart.add(np.ones(200), coins(100 + i, 200, 0.8))
    assert alike.phi > 4
    assert apart.phi < 1.5


def test_a_restart_goes_on_bit_for_bit():
    one = Detector("cost", 5000.0)
    one.add(np.ones(1777), coins(0, 1777, 0.7))
    two = Detector.from_state(json.loads(json.dumps(one.to_state(), allow_nan=False)))
    for seed in range(5):
        assert one.add(np.ones(50), coins(seed, 50, 0.5)) == two.add(np.ones(50), coins(seed, 50, 0.5))
    assert one.to_state() == two.to_state()
    watch = Watch()
    for tokens in range(1, 2 * LENGTH_UNITS):
        watch.mix(tokens)
    again = Watch.from_state(json.loads(json.dumps(watch.to_state(), allow_nan=False)))
    assert again.to_state() == watch.to_state()
    assert tuple(again.detectors) == SIGNALS


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="run length"):
        Detector(run_length=0.5)
    for weight, value in (([1.0], [1.5]), ([1.0, 1.0], [0.5]), ([1.0], [-0.1]), ([np.inf], [1.0]), ([1.0], [np.nan])):
        with pytest.raises(ValueError, match="weights"):
            Detector().add(weight, value)


def test_the_acceptance_signal_is_accepted_over_examined_of_a_lossless_worker():
    rng = np.random.default_rng(0)
    block = make_block(coin_scalars((rng.random(4000) < 0.8).astype(float)), [4] * 1000)
    examined, accepted = examined_and_accepted(block)
    assert examined.sum() == np.count_nonzero(block.flags & EXAMINED)
    assert accepted.sum() == np.count_nonzero(block.flags & ACCEPTED)


def test_the_acceptance_signal_does_not_see_the_knob():
    rng = np.random.default_rng(1)
    scalars = coin_scalars(rng.beta(4, 1, 400), rng.random(400))
    signals = [examined_and_accepted(make_block(scalars, [4] * 100, theta=theta)) for theta in (0.0, 0.5, 1.0)]
    for other in signals[1:]:
        np.testing.assert_array_equal(other, signals[0])
    assert np.asarray(lossless_accept(scalars)).mean() == pytest.approx(
        signals[0][1].sum() / signals[0][0].sum(), abs=0.03
    )


def test_rounds_of_unequal_length_count_only_what_was_drafted():
    block = make_block(Scalars(*(np.full(6, v) for v in (0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.0))), [1, 2, 3])
    examined, accepted = examined_and_accepted(block)
    np.testing.assert_allclose(examined, [1, 2, 3])
    np.testing.assert_allclose(accepted, [1, 2, 3])
    assert examined_and_accepted(make_block(coin_scalars([]), [0, 0]))[0].size == 0


def test_cost_and_length_signals_move_with_what_they_watch():
    watch = Watch()
    rng = np.random.default_rng(2)
    assert watch.cost(rng.normal(0, 0.1, 2000)) is None
    slower = watch.cost(rng.normal(np.log(2), 0.1, 200))
    assert slower is not None
    assert (slower.signal, slower.since > slower.before) == ("cost", True)
    assert watch.cost(np.array([np.inf, -np.inf])) is None  # one absurd round is one round
    assert watch.cost(np.zeros(0)) is None
