"""`lenity policy backtest`: a policy on the history of another one, and on a simulated pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from controller.cli import app
from storage.history import Alert, History
from tests.support_policy import CHECKS, POLICY, SCENARIO, play

runner = CliRunner()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eleven minutes of a pool whose touches begin to cost nearly every answer after eight."""
    directory = tmp_path_factory.mktemp("backtest")
    url = f"sqlite:///{directory / 'h.db'}"
    history = History(url)
    history.upgrade()
    played = play(11, "{0s: 0.005, 8m: 0.95}")
    played.save(history, str(directory / "sim.yaml"))
    firing: dict[str, bool] = {}
    alerts = []
    for now, _, decision, _ in played.ticks:
        for alert in decision.bounds["alerts"]:
            if firing.get(alert["name"], False) != alert["firing"]:
                firing[alert["name"]] = alert["firing"]
                alerts.append(Alert("sim", "default", now, alert["name"], alert["firing"], alert["detail"]))
    history.save_tick("sim", 1, played.ticks[-1][0] + 1, alerts=alerts)
    history.close()
    return url


def backtest(tmp_path: Path, policy: str, *args: str) -> tuple[dict[str, Any], dict[str, Any]]:
    path = tmp_path / "edit.yaml"
    path.write_text(policy)
    result = runner.invoke(app, ["policy", "backtest", str(path), *args, "--json"])
    assert result.exit_code == 0, result.output + result.stderr
    past, edit = json.loads(result.output)
    return past, edit


@pytest.fixture(scope="module")
def same(database: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was, and what the policy that was in force makes of it."""
    return backtest(tmp_path_factory.mktemp("same"), POLICY, "--database", database)


def test_the_policy_that_was_in_force_does_what_it_did(same: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """The same records through the same governor: the replay stands or falls with this."""
    past, edit = same
    assert (past["name"], edit["name"]) == ("as it was", "edit")
    assert past["requests"] > 500
    assert past["pages"], "the regression paged"
    assert edit["pages"]
    assert abs(edit["pages"][0]["begin"] - past["pages"][0]["begin"]) <= 60
    assert edit["unseen"] < 0.2
    assert edit["least_remaining"] == pytest.approx(past["least_remaining"], abs=0.1)
    assert edit["speed"] == pytest.approx(past["speed"], rel=0.03)


def test_a_stricter_policy_loses_less_and_is_slower(
    tmp_path: Path, database: str, same: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    _, strict = backtest(tmp_path, POLICY.replace("5%, window", "1%, window"), "--database", database)
    assert strict["loss"] < same[1]["loss"] / 2
    assert strict["speed"] < same[1]["speed"]
    _, none = backtest(tmp_path, POLICY.replace("5%, window", "0, window"), "--database", database)
    assert (none["loss"], none["lossless"], none["pages"]) == (0, 1, [])


def test_what_history_cannot_say_is_told(tmp_path: Path, database: str) -> None:
    path = tmp_path / "edit.yaml"
    path.write_text(POLICY.replace("5%, window", "40%, window"))
    result = runner.invoke(app, ["policy", "backtest", str(path), "--database", database])
    assert "history cannot say" in result.output
    assert "as it was" in result.output


def test_no_history_is_an_error(tmp_path: Path, database: str) -> None:
    path = tmp_path / "edit.yaml"
    path.write_text(POLICY.replace("pool: sim", "pool: other"))
    result = runner.invoke(app, ["policy", "backtest", str(path), "--database", database])
    assert result.exit_code == 1
    assert "no history of pool 'other'" in result.stderr
    assert runner.invoke(app, ["policy", "backtest", str(path), "--since", "7"]).exit_code == 2


def test_a_scenario_is_played_under_both_policies(tmp_path: Path) -> None:
    indented = "".join(f"  {line}\n" for line in POLICY.splitlines())
    scenario = tmp_path / "scenario.yaml"
    text = SCENARIO.replace("LOSS", "0.3").replace("duration: 1h", "duration: 4m")
    scenario.write_text(text + indented + CHECKS)
    picture = tmp_path / "run" / "picture.png"
    own, edit = backtest(
        tmp_path, POLICY.replace("5%, window", "0, window"), "--scenario", str(scenario), "--plot", str(picture)
    )
    assert own["loss"] > edit["loss"] == 0
    assert edit["lossless"] == 1
    assert own["requests"] == pytest.approx(960, rel=0.2)
    assert edit["speed"] > 1, "drafting stays, leniency goes"
    assert picture.stat().st_size > 5_000
