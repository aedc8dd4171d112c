"""The Grafana dashboards: valid, laid out without overlap, and every query reads what is exported."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from controller.metrics import FAMILIES
from tests.support_grafana import SCHEMA, dashboards, queries
from tests.support_prometheus import metric_names

ALL = dashboards()
PROVISIONING = Path(__file__).parents[2] / "ops" / "grafana" / "provisioning"
OWN = {"lenity_ticks_total", "lenity_tick_seconds_bucket", "lenity_worker_leased"}


@pytest.mark.parametrize("name", ALL)
def test_a_dashboard_is_valid_against_the_schema(name: str) -> None:
    errors = sorted(jsonschema.Draft202012Validator(SCHEMA).iter_errors(ALL[name]), key=lambda e: list(e.path))
    assert [f"{list(e.path)}: {e.message}" for e in errors] == []


def test_the_schema_can_refuse() -> None:
    """The negative control: a panel without a query, one beyond the grid, an unknown key."""
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for change in ({"targets": []}, {"gridPos": {"x": 24, "y": 0, "w": 1, "h": 1}}, {"typo": 1}):
        bad: dict[str, Any] = {**ALL["lenity-pool.json"]}
        bad["panels"] = [bad["panels"][0] | change]
        assert not validator.is_valid(bad), change


@pytest.mark.parametrize("name", ALL)
def test_panels_do_not_overlap_and_have_their_own_ids(name: str) -> None:
    panels = ALL[name]["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    for a, b in itertools.combinations([p["gridPos"] for p in panels], 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart_x or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in panels)
    for panel in panels:
        refs = [t["refId"] for t in panel.get("targets", [])]
        assert len(set(refs)) == len(refs)


@pytest.mark.peer("promtool")
@pytest.mark.parametrize("name", ALL)
def test_every_query_parses(name: str, tmp_path: Path) -> None:
    rules = [{"record": f"q{i}", "expr": query} for i, (_, query) in enumerate(queries(ALL[name]))]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    result = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(rules)} rules found" in result.stdout


@pytest.mark.parametrize("name", ALL)
def test_every_query_reads_only_what_is_exported(name: str) -> None:
    exported = OWN | {f.name + ("_total" if f.kind.__name__.startswith("Counter") else "") for f in FAMILIES}
    for title, query in queries(ALL[name]):
        names = metric_names(query)
        assert names <= exported, title
        assert names or query.startswith("ALERTS"), title


def test_provisioning_names_the_source_and_the_folder() -> None:
    [source] = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    chosen = [v for v in ALL["lenity-pools.json"]["templating"]["list"] if v["type"] == "datasource"]
    assert [v["current"]["value"] for v in chosen] == [source["uid"]]
    [provider] = yaml.safe_load((PROVISIONING / "dashboards" / "lenity.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
