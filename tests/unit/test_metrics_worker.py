"""The worker's metrics: named by convention, bounded, and in the table of `docs/metrics.md`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from decoder.knobs import LEASED
from decoder.serving import ServingMetrics
from decoder.worker import WorkerMetrics

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture
def registry() -> CollectorRegistry:
    """Every metric of a worker that serves, each with a sample."""
    registry = CollectorRegistry()
    counts = ("dropped_positions", "dropped_records", "sent_blocks", "sent_records", "failed_appends")
    sender = SimpleNamespace(**dict.fromkeys(counts, 0))
    reader = SimpleNamespace(pool="demo", state={"default": LEASED}, fallbacks={"no lease": 1})
    made = [WorkerMetrics(cast("Any", sender), cast("Any", reader), registry), ServingMetrics(registry)]
    for metric in (value for owner in made for value in vars(owner).values()):
        names = getattr(metric, "_labelnames", ())
        if names:
            metric.labels(*("x" for _ in names))
    return registry


def exported(registry: CollectorRegistry) -> dict[str, tuple[str, tuple[str, ...]]]:
    families = {}
    for family in registry.collect():
        labels = tuple(sorted(label for label in family.samples[0].labels if label != "le"))
        families[family.name + ("_total" if family.type == "counter" else "")] = (family.type, labels)
    return families


def test_every_metric_is_documented_and_every_documented_one_exists(registry: CollectorRegistry) -> None:
    rows = re.findall(r"^\| `(lenity_worker_\w+)` \| (\w+) \| ([\w, ]+) \| [^|]+ \| \S[^|]* \|$", DOC.read_text(), re.M)
    documented = {
        name: (kind, () if labels == "none" else tuple(sorted(labels.split(", ")))) for name, kind, labels in rows
    }
    assert documented == exported(registry)


def test_names_and_labels_follow_the_convention(registry: CollectorRegistry) -> None:
    for name, (kind, labels) in exported(registry).items():
        assert re.fullmatch(r"lenity_worker_[a-z_]+", name)
        assert name.endswith("_total") == (kind == "counter")
        assert set(labels) <= {"class", "arm", "branch", "done", "reason", "what", "pool"}


@pytest.mark.peer("promtool")
def test_prometheus_finds_nothing_to_say_against_them(registry: CollectorRegistry) -> None:
    check = subprocess.run(
        ["promtool", "check", "metrics"], input=generate_latest(registry), capture_output=True, check=False
    )
    assert (check.returncode, check.stdout.decode(), check.stderr.decode()) == (0, "", "")
