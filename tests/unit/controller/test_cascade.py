"""A cascade's curve over thresholds from the answers it drafted, its best threshold, and the choice of a strategy."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from controller.cascade import (
    CascadeEstimator,
    Drafted,
    Option,
    cascade_curve,
    cascade_option,
    choose_strategy,
    solution_option,
    threshold_of,
)
from controller.solve import solve
from policies.errors import Infeasible, TooFewSamples
from policies.rules import confidence_threshold, theta_of_confidence
from storage.records import RequestRecord
from tests.support_curves import constant_curve, costs

RECORD = RequestRecord(
    request_id="r1",
    pool="p",
    traffic_class="default",
    worker="w",
    boot="b",
    epoch=1,
    lease_seq=1,
    rule="confidence_mean",
    theta=0.3,
    rho=1.0,
    arm="untouched",
    holdback_prob=0.1,
    fork_prob=0.1,
    label_prob=0.1,
    fork_drawn=False,
    label_drawn=False,
    touches=0,
    first_touch_at=None,
    started=1.0,
    prompt_tokens=10,
    tokens=20,
    target_passes=20,
    first_token_s=0.1,
    total_s=3.0,
    finish_reason="stop",
    strategy="sequence_cascade",
    confidence=0.6,
    draft_s=1.0,
)


def answers(n: int, seed: int = 0) -> list[Drafted]:
    """Confidence uniform on [0, 1]; a draft takes .2 s, the target 2 s, for 20 tokens."""
    rng = np.random.default_rng(seed)
    return [Drafted(float(c), 0.2, None if c >= 0.7 else 2.0, 20) for c in rng.random(n)]


def test_four_kinds_of_answers_by_hand():
    drafted = [Drafted(c, 1.0, t, 10) for c, t in ((0.9, None), (0.8, None), (0.5, 3.0), (0.2, 5.0))] * 10
    curve = cascade_curve(drafted, target_s_per_token=0.4)
    assert curve.answers == 40
    np.testing.assert_allclose(curve.threshold[1:], [0.9, 0.8, 0.5, 0.2])
    np.testing.assert_allclose(curve.share, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(curve.seconds_per_token, [20 / 40, 16 / 40, 12 / 40, 9 / 40, 4 / 40])
    np.testing.assert_allclose(curve.theta, [0, 0.1, 0.2, 0.5, 0.8])


def test_believed_answers_cost_the_target_what_the_others_did():
    drafted = [Drafted(0.9, 1.0, None, 30), Drafted(0.1, 1.0, 4.0, 20)] * 20
    curve = cascade_curve(drafted)
    assert curve.seconds_per_token[0] == pytest.approx((2.0 + 4.0 + 30 * 0.2) / 50)


def test_errors_cover_what_repetition_shows():
    found = [cascade_curve(answers(200, seed)) for seed in range(200)]
    at = [int(np.searchsorted(-c.threshold, -0.7)) - 1 for c in found]
    values = np.array([c.seconds_per_token[i] for c, i in zip(found, at, strict=True)])
    claimed = np.mean([c.seconds_se[i] for c, i in zip(found, at, strict=True)])
    assert values.std() == pytest.approx(claimed, rel=0.2)


def test_the_best_threshold_spends_what_is_allowed_and_no_more():
    curve = cascade_curve(answers(2000))
    assert cascade_option("sequence_cascade", curve, allowed=0.0) is None
    last = np.inf
    for allowed in (0.02, 0.1, 0.3, 0.8, 1.1):
        option = cascade_option("sequence_cascade", curve, allowed=allowed)
        assert option is not None
        assert option.touches_per_request <= option.touches_upper <= allowed
        assert option.touches_per_request == pytest.approx(min(1.0, allowed), abs=0.03)
        assert threshold_of(option) == pytest.approx(1 - option.touches_per_request, abs=0.03)
        assert option.seconds_per_token < last
        last = option.seconds_per_token
    capped = cascade_option("sequence_cascade", curve, allowed=1.1, max_theta=0.4)
    assert capped is not None
    assert capped.theta <= 0.4
    with pytest.raises(Infeasible):
        cascade_option("sequence_cascade", curve, allowed=-0.1)


def test_the_threshold_and_the_knob_say_the_same():
    for theta in (0.0, 0.25, 1.0):
        assert theta_of_confidence(confidence_threshold(theta)) == theta
    assert theta_of_confidence(1.5) == 0.0


def test_records_become_answers_and_a_restart_goes_on():
    estimator = CascadeEstimator()
    for i in range(40):
        estimator.add(
            replace(RECORD, request_id=f"r{i}", confidence=(i % 10) / 10, arm="lenient" if i % 2 else "untouched")
        )
    estimator.add(replace(RECORD, confidence=None))
    estimator.add(replace(RECORD, draft_s=0.0))
    assert len(estimator) == 40
    again = CascadeEstimator.from_state(json.loads(json.dumps(estimator.to_state())))
    assert again.to_state() == estimator.to_state()
    assert Drafted.of(replace(RECORD, arm="holdback")) == Drafted(0.6, 1.0, 2.0, 20)
    assert Drafted.of(replace(RECORD, arm="lenient")) == Drafted(0.6, 3.0, None, 20)
    np.testing.assert_allclose(again.curve(0.1).seconds_per_token, estimator.curve(0.1).seconds_per_token)


def test_too_little_is_said():
    with pytest.raises(TooFewSamples, match="30"):
        cascade_curve(answers(29))
    with pytest.raises(TooFewSamples, match="not known"):
        cascade_curve([Drafted(0.9, 1.0, None, 10)] * 40)


def test_speculation_plain_decoding_and_a_cascade_in_the_same_units():
    found = solve(constant_curve(0.8, 0.1, 8), *costs(8, 0.05), d_allowed=0.01)
    option = solution_option(found, mean_length=50, relative_error=0.01)
    assert (option.strategy, option.theta) == ("speculative", found.theta)
    assert option.touches_per_request == pytest.approx(50 * found.touches_per_token)
    plain = solve(constant_curve(0.0, 0.0, 8), *costs(8, 0.05), d_allowed=0.01)
    assert solution_option(plain, 50).strategy == "plain"


def test_a_strategy_is_left_only_for_one_that_is_faster_beyond_the_noise():
    held = Option("speculative", 0.5, 0.010, 0.0001, 0.1, 0.12)
    near = Option("sequence_cascade", 0.3, 0.0099, 0.0001, 0.1, 0.12)
    noisy = Option("sequence_cascade", 0.3, 0.0090, 0.0010, 0.1, 0.12)
    sure = Option("sequence_cascade", 0.3, 0.0090, 0.0001, 0.1, 0.12)
    assert choose_strategy(held, [held, near]) is held
    assert choose_strategy(held, [held, noisy]) is held
    assert choose_strategy(held, [held, sure]) is sure
    assert choose_strategy(None, [held, near]) is near
    with pytest.raises(ValueError, match="no strategy"):
        choose_strategy(None, [])
