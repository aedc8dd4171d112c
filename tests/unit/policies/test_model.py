"""The policy document: scalars as people write them, what one class sees, and what does not fit together."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from pydantic import ValidationError

from policies.model import KEYS, ClassPolicy, MetricGoal, PageRule, Policy
from policies.scalars import format_duration, parse_count, parse_duration, parse_number, parse_share


def document(**sections: Any) -> dict[str, Any]:
    """A good document, with whole sections replaced."""
    good = {
        "version": "lenity/v1",
        "pool": "chat-7b",
        "objective": {"metric": "answer_correct", "max_loss": 0.01, "window": "30d"},
    }
    return good | sections


def conflicts(**sections: Any) -> list[tuple[tuple[tuple[str, ...], ...], str]]:
    with pytest.raises(ValidationError) as caught:
        Policy.model_validate(document(**sections))
    [error] = caught.value.errors()
    assert error["type"] == "conflict"
    return list(error["ctx"]["faults"])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("28d", 2_419_200), ("15m", 900), ("90s", 90), ("1h30m", 5_400), ("0.5s", 0.5), ("250ms", 0.25), ("1.5h", 5_400)],
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "d", "1", "90", 90, 1.5, "1x", "-5s", "1m1h", "1h1h", "1 h", "5M", None, True, []]
)
def test_a_duration_without_one_meaning_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"needs a unit|must be a duration"):
        parse_duration(text)


@pytest.mark.parametrize("seconds", [0.001, 0.25, 1.0, 90.0, 5_400.0, 86_400.0, 2_419_200.0, 90_061.5])
def test_a_formatted_duration_reads_back_as_itself(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("written", "number"),
    [("1e-3", 1e-3), ("1.0e-3", 1e-3), ("1E5", 1e5), ("0.1", 0.1), (".5", 0.5), ("5.", 5.0), ("-2", -2.0), (7, 7.0)],
)
def test_a_number_may_be_written_in_any_decimal_notation(written: Any, number: float) -> None:
    assert parse_number(written) == number


@pytest.mark.parametrize(
    "written",
    ["nan", ".nan", ".inf", "1e999", "010", "0x10", "1:30", "1_000", "", "abc", True, None, math.inf, "9" * 5000],
)
def test_what_is_not_a_finite_decimal_number_is_refused(written: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a (finite )?number"):
        parse_number(written)


@pytest.mark.parametrize(
    ("written", "share"), [("2%", 0.02), ("0.5%", 0.005), (0.02, 0.02), ("100%", 1.0), ("1e1%", 0.1)]
)
def test_a_share_may_be_a_percentage(written: Any, share: float) -> None:
    assert parse_share(written) == share


def test_a_count_must_be_whole() -> None:
    assert parse_count("1e3") == 1000
    with pytest.raises(ValueError, match="whole number"):
        parse_count(2.5)


def test_left_out_sections_have_the_documented_defaults() -> None:
    policy = Policy.model_validate(document()).for_class("default")
    assert policy == ClassPolicy(
        pool="chat-7b",
        traffic_class="default",
        metric="answer_correct",
        max_loss=0.01,
        window_s=30 * 86_400.0,
        confidence=0.95,
        rules=("threshold", "token_v3"),
        max_theta=0.9,
        structured="lossless",
        holdback=0.1,
        fork_cold=1.0,
        fork_warm=0.05,
        label_deadline_s=900.0,
        min_labels=200,
        g_max=16,
        explore=0.01,
        start=0.2,
        stop=0.05,
        cooldown_s=1800.0,
        max_step_up=0.1,
        page=(
            PageRule(3_600, 300, 0.02),
            PageRule(21_600, 1_800, 0.05),
            PageRule(86_400, 7_200, 0.10),
            PageRule(259_200, 21_600, 0.10),
        ),
        strategies=("speculative",),
        calendar=None,
        floor=None,
        also=(),
        fork_passes_max=0.5,
    )


def test_generated_pages_for_30_days_are_the_workbook_rows() -> None:
    """SRE Workbook, chapter 5, table 5-8: 14.4, 6 and 1; the 1d/2h row has 3."""
    page = Policy.model_validate(document()).for_class("default").page
    assert [round(rule.factor(30 * 86_400), 9) for rule in page] == [14.4, 6, 3, 1]


def test_an_override_changes_its_class_and_no_other() -> None:
    policy = Policy.model_validate(
        document(
            classes={"code": {"max_loss": 0, "rules": ["token_v3"], "block": {"max": 4}, "pull_back": {"stop": 0.1}}}
        )
    )
    code, chat = policy.for_class("code"), policy.for_class("chat")
    changed = {f.name for f in dataclasses.fields(code) if getattr(code, f.name) != getattr(chat, f.name)}
    assert changed == {"traffic_class", "max_loss", "rules", "g_max", "stop"}
    assert (code.max_loss, code.rules, code.g_max, code.stop) == (0.0, ("token_v3",), 4, 0.1)
    assert dataclasses.replace(chat, traffic_class="default") == policy.for_class("default")


def test_a_class_window_of_its_own_gets_generated_pages_of_its_own() -> None:
    policy = Policy.model_validate(document(classes={"batch": {"window": "3d"}}))
    assert policy.for_class("batch").page[0] == PageRule(360.0, 30.0, 0.02)
    fixed = [{"long": "1h", "short": "5m", "budget": "5%"}]
    written = Policy.model_validate(document(alerts={"page": fixed}, classes={"batch": {"window": "3d"}}))
    assert written.for_class("batch").page == (PageRule(3600.0, 300.0, 0.05),)


def test_generated_pages_that_could_never_fire_are_left_out() -> None:
    """With max_loss 0.1 nothing burns faster than 12.5 times the plan, so that the row of 14.4 goes."""
    large = {"metric": "m", "max_loss": 0.1, "window": "30d"}
    policy = Policy.model_validate(document(objective=large, classes={"a": {"max_loss": 0.01}, "b": {"max_loss": 0.5}}))
    rows = {name: [round(r.factor(30 * 86_400), 9) for r in policy.for_class(name).page] for name in ("x", "a", "b")}
    assert rows == {"x": [6, 3, 1], "a": [14.4, 6, 3, 1], "b": [1]}
    assert [e.long for e in policy.alerts.page] == [r.long_s for r in policy.for_class("x").page]


def test_the_highest_burn_is_that_of_losing_everything() -> None:
    policy = Policy.model_validate(document(classes={"code": {"max_loss": 0}}))
    assert policy.for_class("default").highest_burn == pytest.approx(1 / (0.01 * 0.8))
    assert policy.for_class("code").highest_burn == math.inf


@pytest.mark.parametrize(
    ("sections", "key", "message"),
    [
        ({"pull_back": {"start": 0.2, "stop": 0.2}}, "pull_back.stop", "must be below pull_back.start"),
        ({"evidence": {"fork_cold": 0.1, "fork_warm": 0.2}}, "evidence.fork_warm", "must not exceed fork_cold"),
        ({"evidence": {"label_deadline": "30d"}}, "evidence.label_deadline", "shorter than the window"),
        ({"pull_back": {"cooldown": "31d"}}, "pull_back.cooldown", "not be longer than the window"),
        ({"leniency": {"rules": ["forgive", "forgive"]}}, "leniency.rules", "names a rule twice"),
        ({"alerts": {"page": [{"long": "1h", "short": "1h", "budget": "2%"}]}}, "alerts.page", "shorter than long"),
        (
            {"alerts": {"page": [{"long": "31d", "short": "1h", "budget": "100%"}]}},
            "alerts.page",
            "longer than the win",
        ),
        (
            {"alerts": {"page": [{"long": "3d", "short": "1h", "budget": "5%"}]}},
            "alerts.page",
            "pages while spending on",
        ),
        ({"alerts": {"page": [{"long": "1h", "short": "5m", "budget": "50%"}]}}, "alerts.page", "would never page"),
        ({"classes": {"default": {}}}, "classes.default", "the default class is the policy itself"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(sections: dict[str, Any], key: str, message: str) -> None:
    [(paths, text)] = conflicts(**sections)
    assert ".".join(paths[0]) == key
    assert message in text


def test_a_window_too_short_for_generated_pages_asks_for_written_ones() -> None:
    short = {"metric": "m", "max_loss": 0.01, "window": "2h"}
    [(_, text)] = conflicts(objective=short)
    assert "write alerts.page" in text
    Policy.model_validate(document(objective=short, alerts={"page": []}))
    Policy.model_validate(document(objective=short | {"window": "2h24m"}))


def test_a_conflict_of_one_class_names_that_class() -> None:
    [(paths, _)] = conflicts(classes={"code": {"pull_back": {"stop": 0.5}}, "chat": {}})
    assert paths[0] == ("classes", "code", "pull_back", "stop")


def test_a_fault_that_classes_inherit_is_told_once() -> None:
    assert len(conflicts(pull_back={"stop": 0.5}, classes={"a": {}, "b": {"max_loss": 0}})) == 1


def test_a_policy_cannot_be_changed_in_place() -> None:
    policy = Policy.model_validate(document())
    with pytest.raises(ValidationError, match="frozen"):
        policy.objective.max_loss = 1.0  # type: ignore[misc]


def test_every_field_of_a_class_policy_has_its_key() -> None:
    assert set(KEYS) == {f.name for f in dataclasses.fields(ClassPolicy)} - {"pool", "traffic_class"}


def test_a_calendar_gives_the_window_its_length_and_a_month_the_rows_of_30_days() -> None:
    objective = {"metric": "m", "max_loss": 0.01, "calendar": "month", "also": [{"metric": "polite", "max_loss": "2%"}]}
    policy = Policy.model_validate(
        document(objective=objective, classes={"a": {"window": "7d"}, "b": {"calendar": "day"}})
    )
    month, a, b = (policy.for_class(name) for name in ("x", "a", "b"))
    assert [(c.calendar, c.window_s / 86_400) for c in (month, a, b)] == [("month", 31), (None, 7), ("day", 1)]
    assert [(r.long_s, r.short_s) for r in month.page] == [(3600, 300), (21600, 1800), (86400, 7200), (259200, 21600)]
    assert month.also == (MetricGoal("polite", 0.02),)
    assert Policy.model_validate(policy.document()) == policy
