"""From a steered class to its view and its row of history."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from pydantic import TypeAdapter

from controller.costs import CostModel
from controller.steer import ClassSteer, Fence
from controller.view import ClassView
from controller.views import class_view, point_of
from policies.load import parse_policy
from storage.records import OperatorAction
from tests.support_blocks import coin_scalars, make_block
from tests.support_storage import a_request

POLICY = parse_policy(
    """
version: lenity/v1
pool: p
objective: {metric: correct, max_loss: 0.1, window: 1h}
leniency: {rules: [token_v3]}
block: {max: 8}
alerts: {page: []}
"""
)
NOW = 1_000_000.0


def a_steer(blocks: int) -> ClassSteer:
    """A class that has seen so many blocks of rounds, and requests."""
    policy = POLICY.for_class("default")
    steer = ClassSteer(policy, CostModel(policy.g_max), half_life_rounds=4000.0)
    rng = np.random.default_rng(5)
    for i in range(blocks):
        a0 = rng.uniform(0.5, 1.0, 160)
        steer.observe_block(make_block(coin_scalars(a0), np.full(40, 4), rng=rng, pool="p", seq=i), NOW)
    for i in range(10):
        steer.observe_request(a_request("p", f"r{i}", total_s=0.5, first_token_s=0.02), NOW + i)
    return steer


def test_a_class_that_has_measured_nothing_can_be_shown() -> None:
    """Unknown is unknown, and there is no frontier."""
    steer = a_steer(0)
    steer.decide(NOW + 10, Fence(1, 1, 1, 5.0))
    view = class_view(steer, 1, 1, 5.0)
    assert (view.frontier, view.frontier_at, view.positions) == ((), None, ())
    assert view.seconds_per_request == pytest.approx(0.5)
    assert view.estimates["loss_per_touch"].high == 1
    assert json.loads(TypeAdapter(ClassView).dump_json(view))["lease"]["rule"] == "token_v3"


def test_the_point_in_use_lies_on_the_frontier_and_within_what_is_allowed() -> None:
    """Up to the coarseness of the drawn curve; the positions are those of the block in use."""
    steer = a_steer(30)
    decision = steer.decide(NOW + 10, Fence(1, 1, 1, 5.0))
    view = class_view(steer, 1, 1, 5.0)
    assert view.frontier_at is not None and view.frontier_allowed is not None
    touches, speed = view.frontier_at
    assert touches <= view.frontier_allowed * 1.001
    at, along = np.array(view.frontier).T
    assert speed == pytest.approx(np.interp(touches, at, along), rel=0.05)
    assert len(view.positions) == view.g
    assert view.lease == decision.lease
    for estimate in view.estimates.values():
        assert all(v is None or math.isfinite(v) for v in (estimate.value, estimate.low, estimate.high))


def test_the_history_keeps_what_is_plotted() -> None:
    """Loss with its bound, latency, and acceptance at some positions."""
    steer = a_steer(30)
    decision = steer.decide(NOW + 60, Fence(1, 1, 1, 5.0))
    values = point_of(steer, decision, NOW + 60).values
    assert values["max_loss"] == 0.1
    assert 0 <= values["loss"] <= values["loss_upper"]
    assert (values["seconds_per_request"], values["seconds_to_first_token"]) == (
        pytest.approx(0.5),
        pytest.approx(0.02),
    )
    assert 0 < values["accepted_1"] <= 1 and 0 < values["accepted_2"] <= 1


def test_an_order_in_force_is_shown_with_who_and_why() -> None:
    """Until it is resumed; the decision's reason names it too."""
    steer = a_steer(30)
    steer.decide(NOW + 10, Fence(1, 1, 1, 5.0))
    order = OperatorAction(1, "p", "*", "lossless", None, "alice", "wrong sums reported", NOW + 1)
    steer.act(order, NOW + 12)
    steer.decide(NOW + 12, Fence(1, 2, 1, 5.0))
    view = class_view(steer, 1, 2, 5.0)
    assert (view.override, view.override_who, view.override_why) == ("lossless", "alice", "wrong sums reported")
    assert (view.theta, view.reason) == (0.0, "forced_lossless")
    assert "alice" in view.explanation
    steer.act(OperatorAction(2, "p", "*", "resume", None, "alice", "fixed", NOW + 13), NOW + 13)
    steer.decide(NOW + 13, Fence(1, 3, 1, 5.0))
    assert class_view(steer, 1, 3, 5.0).override is None
