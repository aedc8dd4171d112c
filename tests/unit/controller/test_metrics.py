"""What is exported to Prometheus, and that the documentation says the same."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from controller.metrics import MAX_CLASSES, MAX_NAMES, ControllerMetrics
from controller.view import STATES, AlertView, Board, ClassView, PoolView
from storage.records import KnobRow, Lease

DOC = Path(__file__).parents[3] / "docs" / "metrics.md"

CLASS = ClassView(
    traffic_class="default",
    state="measured",
    reason="steady",
    explanation="Leniency is open within the budget.",
    rule="token_v3",
    g=5,
    theta=0.4,
    rho=1.0,
    mu=2.5,
    lease_epoch=3,
    lease_seq=17,
    lease_ttl_s=10.0,
    predicted_speedup_plain=2.1,
    predicted_speedup_lossless=1.2,
    touches_per_request_allowed=0.8,
    touches_per_request_seen=0.7,
    remaining=-0.25,
    burn={"1h": 3.5},
    burn_lower={"1h": 0.02},
    override="freeze",
    lease=Lease(
        "demo", "default", 3, 17, 4, 1.7e9, 10.0, "token_v3", (KnobRow(1, 5, 0.4, 1.0),), holdback=0.1, fork=0.5
    ),
    alerts=(AlertView(name="burn 1h/5m", firing=True, detail="3.5 times the plan"),),
    labels_needed=40,
    counters={
        "requests.untouched": 70.0,
        "requests.lenient": 27.0,
        "requests.holdback": 3.0,
        "touches": 55.0,
        "lenient_touches": 52.0,
        "fork_target_passes": 700.0,
        "detected.draft": 2.0,
        "tokens": 9_000.0,
        "target_passes": 3_000.0,
        "scores.lenient.answer.v2": 25.0,
        "score_sum.lenient.answer.v2": 22.5,
    },
)
POOL = PoolView(
    pool="demo",
    policy_revision=4,
    policy_source="policy.yaml",
    policy_rejected=None,
    epoch=3,
    leader=True,
    time=1_700_000_000.0,
    tick_seconds=0.02,
    interval_s=1.0,
    last_telemetry_age_s=0.4,
    stream_lag=12,
    dead_letters=2,
    classes=(CLASS,),
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def board(registry: CollectorRegistry) -> Board:
    board = Board()
    ControllerMetrics(registry, board)
    return board


def read(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    labels = {"class" if key == "cls" else key: value for key, value in labels.items()}
    return registry.get_sample_value(name, {"pool": "demo"} | labels)


def test_counters_are_the_views_totals(registry: CollectorRegistry, board: Board) -> None:
    """A total is taken over as it is, so that a restored controller continues where it was."""
    board.publish(POOL)
    board.publish(replace(POOL, classes=(replace(CLASS, counters={**CLASS.counters, "touches": 60.0}),)))
    assert read(registry, "lenity_requests_total", cls="default", arm="holdback") == 3
    assert read(registry, "lenity_touches_total", cls="default") == 60
    assert read(registry, "lenity_lenient_touches_total", cls="default") == 52
    assert read(registry, "lenity_fork_target_passes_total", cls="default") == 700
    assert read(registry, "lenity_detected_changes_total", cls="default", signal="draft") == 2
    assert read(registry, "lenity_dead_letters_total") == 2
    assert read(registry, "lenity_forks_total", cls="default") == 0, "a missing total reads as zero"
    assert read(registry, "lenity_ticks_total") == 2
    assert read(registry, "lenity_tick_seconds_sum") == pytest.approx(0.04)


def test_score_sums_keep_metric_and_arm_apart(registry: CollectorRegistry, board: Board) -> None:
    """A metric's name may hold dots; arms without a score are exported as zero, so that rates begin at once."""
    board.publish(POOL)
    labels = {"cls": "default", "metric": "answer.v2"}
    assert read(registry, "lenity_scores_total", arm="lenient", **labels) == 25
    assert read(registry, "lenity_score_sum_total", arm="lenient", **labels) == 22.5
    assert read(registry, "lenity_scores_total", arm="holdback", **labels) == 0


@pytest.mark.parametrize("state", [*STATES, "something new"])
def test_exactly_one_state_is_set(registry: CollectorRegistry, board: Board, state: str) -> None:
    board.publish(replace(POOL, classes=(replace(CLASS, state=state),)))
    shown = {s: read(registry, "lenity_state", cls="default", state=s) for s in (*STATES, "other")}
    assert {s for s, value in shown.items() if value == 1} == {state if state in STATES else "other"}


def test_gauges_follow_the_newest_view(registry: CollectorRegistry, board: Board) -> None:
    board.publish(POOL)
    assert read(registry, "lenity_budget_remaining_ratio", cls="default") == -0.25
    assert read(registry, "lenity_burn_rate", cls="default", window="1h") == 3.5
    assert read(registry, "lenity_loss_per_touch_lower", cls="default", window="1h") == 0.02
    assert read(registry, "lenity_drawn_ratio", cls="default", what="fork") == 0.5
    assert read(registry, "lenity_override", cls="default", order="freeze") == 1
    assert read(registry, "lenity_override", cls="default", order="lossless") == 0
    assert read(registry, "lenity_alert_firing", cls="default", alert="burn 1h/5m") == 1
    assert read(registry, "lenity_policy_rejected") == 0
    board.publish(replace(POOL, policy_rejected="policy.yaml:3: bad", last_telemetry_age_s=None))
    assert read(registry, "lenity_policy_rejected") == 1
    assert read(registry, "lenity_telemetry_age_seconds") is None, "what is not known has no sample"


def test_a_class_that_is_gone_leaves_no_series(registry: CollectorRegistry, board: Board) -> None:
    board.publish(POOL)
    board.publish(replace(POOL, classes=()))
    assert read(registry, "lenity_theta", cls="default") is None


def test_a_pool_led_elsewhere_shows_no_classes(registry: CollectorRegistry, board: Board) -> None:
    board.publish(replace(POOL, leader=False))
    assert read(registry, "lenity_leader") == 0
    assert read(registry, "lenity_requests_total", cls="default", arm="lenient") is None


def test_a_pool_that_is_gone_leaves_no_series(registry: CollectorRegistry) -> None:
    metrics = ControllerMetrics(registry)
    metrics.forget("demo")
    metrics.update(POOL)
    metrics.forget("demo")
    assert [s for family in registry.collect() for s in family.samples if "pool" in s.labels] == []


def test_labels_stay_bounded(registry: CollectorRegistry, board: Board) -> None:
    """Whatever the traffic calls itself, the number of series has an end."""
    wild = replace(
        CLASS,
        burn={f"w{i}": 1.0 for i in range(1_000)},
        burn_lower={f"w{i}": 0.1 for i in range(1_000)},
        alerts=tuple(AlertView(name=f"a{i}", firing=False, detail="") for i in range(1_000)),
        counters={f"scores.lenient.m{i}": 1.0 for i in range(1_000)},
    )
    board.publish(replace(POOL, classes=tuple(replace(wild, traffic_class=f"c{i}") for i in range(200))))
    samples = [s for family in registry.collect() for s in family.samples]
    assert not {label for s in samples for label in s.labels if "request" in label}
    for label, bound in {"class": MAX_CLASSES, "window": MAX_NAMES, "alert": MAX_NAMES, "metric": MAX_NAMES}.items():
        assert len({s.labels[label] for s in samples if label in s.labels}) == bound


def test_the_exposition_is_valid_openmetrics(registry: CollectorRegistry, board: Board) -> None:
    """The reference parser reads it back, hostile label values included."""
    hostile = replace(CLASS, traffic_class='a"b\\c\nd')
    board.publish(replace(POOL, classes=(CLASS, hostile)))
    families = {f.name: f for f in text_string_to_metric_families(openmetrics(registry).decode())}
    assert {s.labels["class"] for s in families["lenity_theta"].samples} == {"default", 'a"b\\c\nd'}


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name, type and labels of every row of the table."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]+) \| [^|]* \| \S[^|]* \|$", DOC.read_text(), re.MULTILINE)
    named = {name: (kind, tuple(labels.split(", "))) for name, kind, labels in rows if "_worker_" not in name}
    return {name: (kind, () if labels == ("none",) else labels) for name, (kind, labels) in named.items()}


def exported(registry: CollectorRegistry) -> dict[str, tuple[str, tuple[str, ...]]]:
    families: dict[str, tuple[str, tuple[str, ...]]] = {}
    for family in registry.collect():
        labels: tuple[Any, ...] = tuple(label for label in family.samples[0].labels if label != "le")
        families[family.name + ("_total" if family.type == "counter" else "")] = (family.type, labels)
    return families


def test_every_metric_is_documented_and_every_documented_one_exists(registry: CollectorRegistry, board: Board) -> None:
    board.publish(POOL)
    assert documented() == exported(registry)


def test_names_follow_the_convention(registry: CollectorRegistry, board: Board) -> None:
    board.publish(POOL)
    for name, (kind, _) in exported(registry).items():
        assert re.fullmatch(r"lenity_[a-z_]+", name)
        assert name.endswith("_total") == (kind == "counter")


@pytest.mark.peer("promtool")
def test_prometheus_finds_nothing_to_say_against_names_and_helps(registry: CollectorRegistry, board: Board) -> None:
    board.publish(POOL)
    check = subprocess.run(
        ["promtool", "check", "metrics"], input=generate_latest(registry), capture_output=True, check=False
    )
    assert (check.returncode, check.stdout.decode(), check.stderr.decode()) == (0, "", "")
