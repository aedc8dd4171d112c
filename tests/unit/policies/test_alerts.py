"""Policies to Prometheus rules: promtool says that they are valid and that they fire when they should."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.metrics import FAMILIES
from policies.alert_texts import TEXTS
from policies.alerts import fleet_group, prometheus_duration, rule_groups, rules_yaml
from policies.load import load_policy, parse_policy
from policies.model import Policy
from tests.support_prometheus import Series, firing, metric_names, run_rule_test

ROOT = Path(__file__).parents[3]
DEFAULTS = ROOT / "policies" / "defaults"
RUNBOOKS = ROOT / "docs" / "runbooks"
BURN = firing("LenityBudgetBurn")

HEAD = "version: lenity/v1\npool: p\nobjective: {metric: m, max_loss: 0.01, window: 30d}\n"
FLOOR = HEAD.replace("metric: m,", "metric: m, floor: 0.8,") + "alerts: {page: []}\n"
CALM = HEAD + "alerts: {page: []}\n"
FAST = HEAD + "alerts: {page: [{long: 1h, short: 5m, budget: 2%}]}\n"  # factor 14.4 against a plan of 0.008


def rules(text: str) -> list[dict[str, Any]]:
    document = yaml.safe_load(rules_yaml([parse_policy(text)]))
    return [rule for group in document["groups"] for rule in group["rules"]]


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., None]:
    """Runs promtool on the rules of a policy."""

    def run(text: str, interval: str, series: Series, expected: dict[str, dict[str, int]]) -> None:
        path = tmp_path / "rules.yml"
        path.write_text(rules_yaml([parse_policy(text)]))
        run_rule_test(path, interval, series, expected)

    return run


def served(steps: list[tuple[int, int, int]], *, instance: str = "a", start: int = 0, cls: str = "default") -> Series:
    """Counters from (untouched, touched, touches) per step, as the controller exports them."""
    own = f'pool="p", class="{cls}", instance="{instance}"'
    counts = [list(accumulate((step[i] for step in steps), initial=start)) for i in range(3)]
    return {
        f'lenity_requests_total{{{own}, arm="untouched"}}': counts[0],
        f'lenity_requests_total{{{own}, arm="lenient"}}': counts[1],
        f'lenity_requests_total{{{own}, arm="holdback"}}': [start] * len(counts[0]),
        f"lenity_lenient_touches_total{{{own}}}": counts[2],
    }


def known(steps: int, lower: float, labels: int = 1000, *, instance: str = "a", window: str = "1h") -> Series:
    own = f'pool="p", class="default", instance="{instance}"'
    return {
        f'lenity_loss_per_touch_lower{{{own}, window="{window}"}}': [lower] * (steps + 1),
        f"lenity_evidence_forks{{{own}}}": [labels] * (steps + 1),
    }


GOOD, BAD = (90, 10, 10), (70, 30, 60)  # with .2 a touch: a burn of 2.5, and of 15


@pytest.mark.peer("promtool")
@pytest.mark.parametrize("names", [["default"], ["demo"], ["default", "demo"]])
def test_generated_rules_are_valid_and_without_duplicates(names: list[str], tmp_path: Path) -> None:
    path = tmp_path / "rules.yml"
    path.write_text(rules_yaml([load_policy(DEFAULTS / f"{name}.yaml") for name in names]))
    result = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SUCCESS" in result.stdout


@pytest.mark.peer("promtool")
def test_a_fast_burn_pages_and_ends_soon_after_its_cause(check: Callable[..., None]) -> None:
    steps = [GOOD] * 60 + [BAD] * 60 + [GOOD] * 60
    series = served(steps) | known(180, 0.2)
    # The hour's mean passes 14.4 when 12.35 of 15 of it are bad: 57 minutes in. The 5 minutes end it at 2 minutes.
    expected = {"60m": {BURN: 0}, "112m": {BURN: 0}, "119m": {BURN: 1}, "120m": {BURN: 1}, "122m": {BURN: 0}}
    check(FAST, "1m", series, expected)


@pytest.mark.peer("promtool")
def test_a_spike_that_is_over_pages_nobody(check: Callable[..., None]) -> None:
    steps = [GOOD] * 60 + [(0, 100, 300)] * 5 + [GOOD] * 60
    check(FAST, "1m", served(steps) | known(125, 0.2), {f"{m}m": {BURN: 0} for m in range(60, 125, 2)})


@pytest.mark.peer("promtool")
def test_a_slow_burn_is_seen_by_the_long_windows_only(check: Callable[..., None]) -> None:
    """One and a half times the plan for four days: 3d/6h with factor 1 pages, the faster rows do not."""
    steps = [(2820, 180, 180)] * (4 * 48)  # a touched share of .06, .2 a touch: .012 of a plan of .008
    evidence = known(len(steps), 0.2, window="3d") | known(len(steps), 0.2, window="1d") | known(len(steps), 0.2)
    of = 'ALERTS{alertname="LenityBudgetBurn", alertstate="firing", long="%s"}'
    expected = {"95h": {f"count({of % '3d'})": 1, f"count({of % '1d'})": 0, f"count({of % '1h'})": 0}}
    check(HEAD, "30m", served(steps) | evidence, expected)


@pytest.mark.peer("promtool")
@pytest.mark.parametrize(
    ("steps", "lower", "labels"),
    [
        ([(0, 0, 0)] * 120, 0.2, 1000),  # no traffic: no ratio of zeros
        ([(0, 1, 5)] * 120, 0.0, 3),  # 120 requests, all touched, three labels: no lower bound yet
        ([BAD] * 120, 0.2, 199),  # one label short of the minimum
        ([BAD] * 120, 0.0, 1000),  # many labels and no proven loss
    ],
)
def test_little_evidence_pages_nobody(
    check: Callable[..., None], steps: list[tuple[int, int, int]], lower: float, labels: int
) -> None:
    check(FAST, "1m", served(steps) | known(120, lower, labels), {"90m": {BURN: 0}, "119m": {BURN: 0}})


@pytest.mark.peer("promtool")
def test_without_the_lower_bound_nothing_is_guessed(check: Callable[..., None]) -> None:
    """A missing gauge must not turn the touched share into a burn."""
    evidence = {name: values for name, values in known(120, 0.2).items() if "lower" not in name}
    check(FAST, "1m", served([(0, 100, 300)] * 120) | evidence, {"100m": {BURN: 0}})


@pytest.mark.peer("promtool")
def test_a_restart_with_a_counter_reset_neither_hides_a_burn_nor_makes_one(check: Callable[..., None]) -> None:
    before, after = served([BAD] * 90), served([BAD] * 60)
    reset = {name: [*before[name], *after[name]] for name in before}
    check(FAST, "1m", reset | known(152, 0.2), {"89m": {BURN: 1}, "95m": {BURN: 1}, "140m": {BURN: 1}})
    before, after = served([GOOD] * 90, start=10_000), served([GOOD] * 60)
    reset = {name: [*before[name], *after[name]] for name in before}
    check(FAST, "1m", reset | known(152, 0.2), {f"{m}m": {BURN: 0} for m in range(80, 150, 5)})


@pytest.mark.peer("promtool")
def test_a_change_of_leader_counts_nothing_twice(check: Callable[..., None]) -> None:
    """The next leader continues the totals under another instance; the first value of a series is no increase."""
    old = {name: [*values, *[None] * 60] for name, values in served([GOOD] * 60, start=50_000).items()}
    new = {
        name: [*[None] * 61, *values]
        for name, values in served([GOOD] * 60, instance="b", start=50_000 + 60 * 10).items()
    }
    evidence = known(121, 0.2) | known(121, 0.2, instance="b")
    check(FAST, "1m", old | new | evidence, {f"{m}m": {BURN: 0} for m in range(50, 120, 3)})


@pytest.mark.peer("promtool")
def test_classes_have_their_own_rules_and_lossless_ones_none(check: Callable[..., None]) -> None:
    text = FAST + "classes: {code: {max_loss: 0}, sums: {max_loss: 5%}, a.b: {}}\n"
    names = [group["name"] for group in rule_groups(parse_policy(text))]
    assert names == ["lenity.p", "lenity.p.default", "lenity.p.a.b", "lenity.p.sums"]
    series: dict[str, Any] = {}
    for cls in ("chat", "sums", "code"):
        series |= served([BAD] * 120, cls=cls)
        series |= {name.replace("default", cls): values for name, values in known(120, 0.2).items()}
    # A burn of 15 in chat, which has the policy's plan, is one of 3 in sums.
    expected = {"119m": {BURN: 1, 'count(ALERTS{alertname="LenityBudgetBurn", class="chat"})': 1}}
    check(text, "1m", series, expected)


@pytest.mark.peer("promtool")
def test_what_holds_for_a_pool_fires(check: Callable[..., None]) -> None:
    """Each alert once with its cause, and none of them in the minutes before."""
    quiet, minutes = 20, 42
    own, cls = 'pool="p", instance="a"', 'pool="p", class="default", instance="a"'

    def then(before: float, after: float) -> list[float | None]:
        return [before] * quiet + [after] * (minutes - quiet)

    alive: list[float | None] = [60.0 * i for i in range(minutes)]
    causes: dict[str, dict[str, list[float | None]]] = {
        "LenityPolicyRejected": {f"lenity_policy_rejected{{{own}}}": then(0, 1)},
        "LenityLeaderless": {f"lenity_leader{{{own}}}": then(1, 0)},
        "LenityDegraded": {f"lenity_degraded{{{own}}}": then(0, 2)},
        "LenityDeadLetters": {f"lenity_dead_letters_total{{{own}}}": then(0, 3)},
        "LenityBudgetLow": {f"lenity_budget_remaining_ratio{{{cls}}}": then(0.2, 0.1)},
        "LenityBudgetExhausted": {f"lenity_budget_remaining_ratio{{{cls}}}": then(0.2, 0.03)},
        "LenityTelemetryStale": {f'lenity_alert_firing{{{cls}, alert="LenityTelemetryStale"}}': then(0, 1)},
        "LenityLabelsStale": {f'lenity_alert_firing{{{cls}, alert="LenityLabelsStale"}}': then(0, 1)},
        "LenityFloorBreached": {f'lenity_alert_firing{{{cls}, alert="LenityFloorBreached"}}': then(0, 1)},
        "LenityWorkerLossless": {'lenity_worker_leased{instance="w", class="default"}': then(1, 0)},
        "LenityTelemetryDropped": {'lenity_worker_telemetry_dropped_total{instance="w", what="positions"}': then(0, 9)},
        "LenityControllerDown": {f"lenity_ticks_total{{{own}}}": [*alive[:quiet], *[None] * (minutes - quiet)]},
        "LenityTicksLate": {
            f"lenity_ticks_total{{{own}}}": [*alive[:quiet], *[alive[quiet]] * (minutes - quiet)],
            f"lenity_tick_interval_seconds{{{own}}}": [1.0] * minutes,
            f"lenity_leader{{{own}}}": [1.0] * minutes,
        },
    }
    about = 'lenity_worker_info{instance="w", pool="p"}'
    late = ("LenityDeadLetters", "LenityTelemetryDropped")  # an increase is over after 15 minutes
    for alert, series in causes.items():
        others: dict[str, list[float | None]] = {about: [1.0] * minutes}
        if "lenity_ticks_total" not in str(series):
            others[f"lenity_ticks_total{{{own}}}"] = alive
        at = f"{quiet + (5 if alert in late else 20)}m"
        text = FLOOR if alert == "LenityFloorBreached" else CALM
        check(text, "1m", others | series, {f"{quiet - 2}m": {firing(alert): 0}, at: {firing(alert): 1}})


@pytest.mark.peer("promtool")
def test_a_collapse_of_acceptance_fires_and_little_traffic_does_not(check: Callable[..., None]) -> None:
    own = 'pool="p", class="default", instance="a"'

    def tokens(scale: int) -> Series:
        rate = [0.8] * 288 + [0.3] * 12
        accepted = list(accumulate((scale * r for r in rate), initial=0.0))
        return {
            f"lenity_examined_tokens_total{{{own}}}": [scale * i for i in range(len(accepted))],
            f"lenity_accepted_tokens_total{{{own}}}": [round(a, 3) for a in accepted],
        }

    alert = firing("LenityAcceptanceCollapse")
    check(CALM, "5m", tokens(10_000), {"23h": {alert: 0}, "1495m": {alert: 1}})
    check(CALM, "5m", tokens(100), {"1495m": {alert: 0}})


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    policy = parse_policy(FLOOR.replace("alerts: {page: []}\n", ""))
    groups = [*rule_groups(policy), fleet_group()]
    made = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    assert made == set(TEXTS)
    pages = {path.stem for path in RUNBOOKS.glob("Lenity*.md")}
    assert pages == set(TEXTS)
    for name in sorted(pages):
        text = (RUNBOOKS / f"{name}.md").read_text()
        parts = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert text.startswith(f"# {name}\n"), name
        assert parts[:3] == ["What it means", "What Lenity already did", "What to do"], name


def test_every_alert_says_what_why_and_where_to_read_on() -> None:
    assert not [rule for rule in rules(HEAD) if rule.get("alert") == "LenityFloorBreached"], "there is no floor"
    for rule in rules(HEAD) + rules(FLOOR):
        if "alert" not in rule:
            continue
        assert rule["labels"]["severity"] in ("page", "ticket")
        notes = rule["annotations"]
        assert set(notes) == {"summary", "description", "runbook_url"}
        assert (ROOT / notes["runbook_url"]).exists()
        assert "<" not in notes["summary"] + notes["description"]
    [burn, *_] = yaml.safe_load(rules_yaml([parse_policy(HEAD)], "https://x/"))["groups"][0]["rules"]
    assert burn["annotations"]["runbook_url"] == "https://x/LenityControllerDown.md"


def test_rules_read_only_what_is_exported_or_recorded() -> None:
    exported = {f.name + ("_total" if f.kind.__name__.startswith("Counter") else "") for f in FAMILIES}
    exported |= {
        "lenity_ticks_total",
        "lenity_worker_leased",
        "lenity_worker_info",
        "lenity_worker_telemetry_dropped_total",
    }
    all_rules = rules(HEAD)
    recorded = {rule["record"] for rule in all_rules if "record" in rule}
    read = {name for rule in all_rules for name in metric_names(rule["expr"])}
    assert read - recorded - exported == set()
    assert recorded, "there are recording rules"


@pytest.mark.parametrize(
    ("policy", "rules"),
    [("policies/defaults/default.yaml", "default.rules.yml"), ("ops/compose/policies/demo.yaml", "rules/demo.yml")],
)
def test_the_shipped_rules_are_those_of_their_policies(policy: str, rules: str) -> None:
    """To update: lenity policy rules POLICY > ops/prometheus/RULES"""
    assert (ROOT / "ops" / "prometheus" / rules).read_text() == rules_yaml([load_policy(ROOT / policy)])


@pytest.mark.peer("promtool")
def test_the_check_itself_can_fail(check: Callable[..., None]) -> None:
    """The negative control of everything above that promtool says."""
    with pytest.raises(AssertionError, match="exp:"):
        check(FAST, "1m", served([GOOD] * 20) | known(20, 0.2), {"19m": {BURN: 1}})


def test_a_short_window_asks_for_frequent_scrapes() -> None:
    assert "scrape at least four times as often" in rules_yaml([load_policy(DEFAULTS / "demo.yaml")])
    assert "scrape" not in rules_yaml([load_policy(DEFAULTS / "default.yaml")])


@pytest.mark.parametrize(("seconds", "text"), [(3600, "1h"), (5400, "1h30m"), (1.5, "1s500ms"), (0.25, "250ms")])
def test_durations_are_written_as_prometheus_reads_them(seconds: float, text: str) -> None:
    assert prometheus_duration(seconds) == text


def test_the_same_policies_in_any_order_give_the_same_text() -> None:
    a, b = (load_policy(DEFAULTS / f"{name}.yaml") for name in ("default", "demo"))
    assert rules_yaml([a, b]) == rules_yaml([b, a])
    assert isinstance(a, Policy)
