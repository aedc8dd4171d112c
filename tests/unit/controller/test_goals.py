"""Several metrics, operators' orders, calendar windows, the floor, and how often forks are drawn."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime

import pytest

from controller.calendar import period_start
from controller.goals import Goals
from controller.governor import Allowance, Governor
from policies.class_policy import MetricGoal
from storage.records import OperatorAction
from tests.unit.controller.test_governor import POLICY, Feed, done, record, score


def order(action: str, amount: float | None = None) -> OperatorAction:
    """An operator's order."""
    return OperatorAction(1, "p", "default", action, amount, "ann", "a release", 0.0)  # type: ignore[arg-type]


def two_metrics(style_loss: int) -> tuple[Goals, Allowance]:
    """Traffic whose `correct` is harmless and whose `style` loses every ``style_loss``-th time."""
    policy = dataclasses.replace(POLICY, also=(MetricGoal("style", 0.1),))
    goals = Goals(policy, "token_v3")
    for now in range(1, 40):
        allowance = goals.decide(float(now))
        goals.leased(1, now, allowance.tau_allowed)
        for i in range(20):
            key = f"r{now}-{i}"
            goals.observe_request(record(key, i % 2, "lenient", True, now), float(now))
            if i % 2:
                for metric, lost in (("correct", False), ("style", (now * 20 + i) % style_loss == 1)):
                    goals.observe_score(score(key, "served", 1.0 - lost, metric=metric), float(now))
                    goals.observe_score(score(key, "fork", 1.0, metric=metric), float(now))
    return goals, goals.decide(40.0)


def test_the_tightest_metric_decides() -> None:
    """Harmless in one, harmful in the other: the other's budget holds, and the explanation names it."""
    _, mild = two_metrics(style_loss=1000)
    goals, harsh = two_metrics(style_loss=4)
    assert harsh.tau_allowed < mild.tau_allowed / 3
    assert "style" in harsh.explanation
    assert goals.policy.confidence == pytest.approx(0.975), "the significance is shared"
    policy = dataclasses.replace(POLICY, also=(MetricGoal("style", 0.1),))
    again = Goals.from_state(json.loads(json.dumps(goals.to_state())), policy, "token_v3")
    assert again.decide(41.0) == goals.decide(41.0)


def test_a_freeze_lets_nothing_rise_and_resume_does() -> None:
    """The order's author and reason are told."""
    feed = Feed().opened(10.0)
    feed.governor.act(order("freeze"), 11.0)
    before = feed.last
    for now in range(12, 30):
        a = feed.tick(float(now))
        for i in range(20):
            key = feed.request(float(now), i % 2)
            if i % 2:
                feed.settle(key, float(now))
    assert before is not None and a.tau_allowed <= before.tau_allowed and a.reason == "frozen"
    assert "ann" in a.explanation and "a release" in a.explanation
    feed.governor.act(order("resume"), 30.0)
    for now in range(31, 36):
        feed.settle(feed.request(float(now), 1), float(now))
        a = feed.tick(float(now))
    assert a.tau_allowed > before.tau_allowed


def test_forced_lossless_is_lossless_at_once() -> None:
    """Until it is resumed, also through a restart."""
    feed = Feed().opened(20.0)
    feed.governor.act(order("lossless"), 21.5)
    a = feed.tick(21.6)
    assert (a.tau_allowed, a.reason) == (0.0, "forced_lossless")
    again = Governor.from_state(json.loads(json.dumps(feed.governor.to_state())), POLICY, "token_v3")
    assert again.decide(22.0).reason == "forced_lossless"


def test_a_budget_is_reset_and_adjusted_by_an_order() -> None:
    """A reset forgives what was spent; an adjustment adds loss units for a window."""
    feed = Feed(dataclasses.replace(POLICY, page=())).opened(30.0)
    for _ in range(1500):
        feed.settle(feed.request(31.5, 1), 31.5, served=0.0)
    assert feed.tick(31.6).reason == "exhausted"
    feed.governor.act(order("reset_budget"), 31.7)
    after = feed.tick(31.8)
    assert after.state != "breached" and after.spent == 0.0
    feed.governor.act(order("adjust_budget", 50.0), 31.9)
    assert feed.tick(32.0).budget == pytest.approx(after.budget + 50.0, rel=0.05)
    assert feed.governor.counts["operator.reset_budget"] == 1


def test_a_calendar_window_starts_its_budget_anew() -> None:
    """At midnight what was spent is over; evidence is not."""
    day = datetime(2026, 3, 4, tzinfo=UTC).timestamp()
    policy = dataclasses.replace(POLICY, calendar="day", window_s=86_400.0, page=())
    feed = Feed(policy)
    for i in range(400):
        now = day - 4000.0 + 10 * i
        feed.tick(now)
        feed.settle(feed.request(now, 1), now, served=float(i % 50 > 0))
    before = feed.tick(day - 5.0)
    after = feed.tick(day + 5.0)
    assert before.spent > 5 and after.spent == 0.0
    assert after.forks_matured == before.forks_matured


@pytest.mark.parametrize(
    ("calendar", "start"),
    [("day", 4), ("week", 2), ("month", 1)],
)
def test_periods_begin_in_utc(calendar: str, start: int) -> None:
    """Wednesday the 4th of March 2026: its day, its Monday, its month."""
    now = datetime(2026, 3, 4, 15, 30, tzinfo=UTC).timestamp()
    assert period_start(calendar, now) == datetime(2026, 3, start, tzinfo=UTC).timestamp()


def test_a_floor_only_tightens() -> None:
    """Served answers below it: lossless. Above it nothing is gained."""
    low = Feed(dataclasses.replace(POLICY, floor=0.9, page=()))
    high = Feed(dataclasses.replace(POLICY, floor=0.5, page=()))
    none = Feed(dataclasses.replace(POLICY, page=()))
    for now in range(1, 30):
        for feed in (low, high, none):
            feed.tick(float(now))
            for i in range(20):
                key = feed.request(float(now), i % 2)
                if i % 2:
                    both = float(i % 4 == 1)  # right half of the time, whoever decodes
                    feed.settle(key, float(now), served=both, fork=both)
    assert low.last is not None and (low.last.state, low.last.reason) == ("breached", "floor")
    assert "below the floor of 0.9" in low.last.explanation
    assert high.last is not None and none.last is not None
    assert dataclasses.replace(high.last, alerts=high.last.alerts[:-1]) == none.last


def test_below_the_floor_somebody_is_told() -> None:
    """From `min_labels` scores on, also where something else holds leniency back; with two metrics, and never without
    a floor."""
    floored = dataclasses.replace(POLICY, floor=0.9, page=())
    forced = Feed(floored)
    forced.governor.act(order("lossless"), 0.5)
    for feed, told in ((Feed(floored), True), (forced, True), (Feed(dataclasses.replace(floored, floor=0.4)), False)):
        feed.tick(1.0)
        for i in range(2 * POLICY.min_labels):
            feed.settle(feed.request(1.0, 1), 1.0, served=float(i % 2), fork=float(i % 2))
        (alert,) = [a for a in feed.tick(2.0).alerts if a.name == "LenityFloorBreached"]
        assert alert.firing is told, alert.detail
    assert not [a for a in Feed(POLICY).tick(1.0).alerts if a.name == "LenityFloorBreached"]
    goals = Goals(dataclasses.replace(floored, also=(MetricGoal("style", 0.1),)), "token_v3")
    assert [a.firing for a in goals.decide(1.0).alerts if a.name == "LenityFloorBreached"] == [False]


def test_forks_cost_no_more_passes_than_the_policy_allows() -> None:
    """Forks as long as requests, every request touched: half of the passes are half of the forks."""
    forked = dataclasses.replace(POLICY, fork_warm=1.0)
    capped = Feed(dataclasses.replace(forked, fork_passes_max=0.25)).opened(20.0).last
    free = Feed(dataclasses.replace(forked, fork_passes_max=10.0)).opened(20.0).last
    assert free is not None and free.fork == 1.0
    assert capped is not None and 0.2 < capped.fork < 0.4


def test_a_rise_of_loss_is_answered_at_once_and_a_fall_never() -> None:
    """The detector's word tightens; fresh labels then say how much was true."""
    feed = Feed(dataclasses.replace(POLICY, page=())).opened(30.0)
    before = feed.tick(31.5)
    feed.governor.alarm(0.3, 0.1, 31.6)
    assert feed.tick(31.7).tau_allowed == pytest.approx(before.tau_allowed, rel=1e-3)
    feed.governor.alarm(0.02, 0.2, 31.8)
    a = feed.tick(31.9)
    assert a.tau_allowed < before.tau_allowed / 5 and a.reason == "quality_alarm"
    for _ in range(300):
        feed.settle(feed.request(34.0, 1), 34.0)
    assert feed.tick(34.1).tau_allowed > 2 * a.tau_allowed, "the labels since then were good"


def test_a_loud_alarm_pages_by_the_burn_it_means() -> None:
    """With many touches in use, half of the detected loss burns too fast: a page and a hold, before exhaustion."""
    feed = Feed(dataclasses.replace(POLICY, page=(dataclasses.replace(POLICY.page[0], share=0.21),))).opened(30.0)
    for _ in range(100):
        feed.request(31.4, 3)
    feed.governor.alarm(0.01, 0.6, 31.5)
    a = feed.tick(31.6)
    assert a.reason == "fast_burn" and a.remaining > POLICY.stop
    assert max(a.burn_lower.values()) > 0


def test_what_is_worth_a_label_is_told_without_the_arm() -> None:
    """Missing branches of touched requests whose fork was drawn, oldest touch first."""
    feed = Feed()
    keys = [feed.request(1.0 + i / 10, 1, arm=("lenient", "holdback")[i % 2]) for i in range(20)]
    feed.governor.observe_score(score(keys[0], "served", 1.0), 3.0)
    for key in keys[:10]:
        feed.governor.observe_fork(done(key), 3.0)
    found = feed.governor.missing(15)
    assert [key for key, *_ in found] == keys[:15]
    assert found[0][1] == ("fork",)
    assert {order for _, order, *_ in found[1:10]} == {("served", "fork"), ("fork", "served")}
    assert all(order == ("served",) for _, order, *_ in found[10:]), "a fork that has not run has no text"
    assert found[0][3] == pytest.approx(21.0)


def test_slices_are_rows_for_the_database() -> None:
    """Counts by slice, evidence epoch and level; sums are the ledger's."""
    feed = Feed().opened(20.0)
    rows = feed.governor.slices()
    assert sum(row["requests"] for row in rows) == 400
    assert {"start", "evidence_epoch", "level", "rule", "touched", "touches", "forks", "labelled"} <= set(rows[0])
    assert {row["rule"] for row in rows} == {"token_v3"}
