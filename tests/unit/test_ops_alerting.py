"""The configurations of Prometheus and Alertmanager are valid, and route what the rules send."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from policies.alert_texts import TEXTS

OPS = Path(__file__).parents[2] / "ops"
ALERTMANAGER = OPS / "alertmanager" / "alertmanager.yml"


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.peer("promtool")
def test_prometheus_takes_its_configuration_and_rules() -> None:
    """promtool follows `rule_files` and checks each of them."""
    said = run("promtool", "check", "config", str(OPS / "prometheus" / "prometheus.yml"))
    assert "1 rule files found" in said
    assert "SUCCESS" in run("promtool", "check", "rules", str(OPS / "prometheus" / "default.rules.yml"))


@pytest.mark.peer("amtool")
def test_alertmanager_takes_its_configuration() -> None:
    said = run("amtool", "check-config", str(ALERTMANAGER))
    assert "2 receivers" in said


@pytest.mark.peer("amtool")
@pytest.mark.parametrize("severity", ["page", "ticket"])
def test_an_alert_goes_to_the_receiver_of_its_severity(severity: str) -> None:
    said = run("amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}", f"severity={severity}", "pool=p")
    assert said.split() == [severity]


def test_inhibitions_name_alerts_that_exist() -> None:
    for rule in yaml.safe_load(ALERTMANAGER.read_text())["inhibit_rules"]:
        for matcher in rule["source_matchers"] + rule["target_matchers"]:
            names = matcher.partition('"')[2].rstrip('"').split("|")
            assert set(names) <= set(TEXTS)
