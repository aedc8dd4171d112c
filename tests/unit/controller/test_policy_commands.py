"""`lenity policy`: what an edit would mean, rules, and the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from controller.cli import app
from policies.load import load_policy, parse_policy
from policies.reload import revision_of
from policies.restore import restored_text, write_policy
from storage.history import History
from tests.support_policy import POLICY, Played, play

runner = CliRunner()
GOOD = "version: lenity/v1\npool: {pool}\nobjective: {{metric: m, max_loss: 1%, window: 28d}}\n"


def run(*args: str, code: int = 0) -> str:
    result = runner.invoke(app, ["policy", *args])
    assert result.exit_code == code, result.output + result.stderr
    return result.output


@pytest.fixture(scope="module")
def played() -> Played:
    return play(7)


@pytest.fixture
def database(tmp_path: Path, played: Played) -> str:
    url = f"sqlite:///{tmp_path / 'h.db'}"
    history = History(url)
    history.upgrade()
    (tmp_path / "sim.yaml").write_text(POLICY)
    played.save(history, str(tmp_path / "sim.yaml"))
    history.close()
    return url


def test_every_fault_of_every_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD.format(pool="a"))
    (tmp_path / "b.yaml").write_text("# twice\n" + GOOD.format(pool="a"))
    (tmp_path / "c.yaml").write_text(GOOD.format(pool="c").replace("1%", "2").replace("28d", "1") + "blok: {}\n")
    (tmp_path / "_base.yaml").write_text("no policy\n")
    output = run("validate", str(tmp_path), code=1)
    faults = [line for line in output.splitlines() if ": good" not in line]
    places = [line.removeprefix(f"{tmp_path}/").split(": ")[:2] for line in faults]
    assert places == [
        ["b.yaml:3", "pool"],
        ["c.yaml:3", "objective.max_loss"],
        ["c.yaml:3", "objective.window"],
        ["c.yaml:4", "blok"],
    ]
    rows = json.loads(run("validate", "--json", str(tmp_path), code=1))
    assert [(row["ok"], len(row.get("faults", []))) for row in rows] == [(True, 0), (False, 1), (False, 3)]


def test_the_schema_is_printed() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(run("schema")))


def test_rules_are_printed_for_a_directory_and_for_nothing_bad(tmp_path: Path) -> None:
    for pool in ("a", "b"):
        (tmp_path / f"{pool}.yaml").write_text(GOOD.format(pool=pool))
    groups = yaml.safe_load(run("rules", str(tmp_path), "--runbooks", "https://x/"))["groups"]
    assert [g["name"] for g in groups] == ["lenity.a", "lenity.a.default", "lenity.b", "lenity.b.default", "lenity"]
    (tmp_path / "b.yaml").write_text("pool: b\n")
    assert "groups" not in run("rules", str(tmp_path), code=1)


def test_a_plan_shows_what_differs_and_what_it_means_now(tmp_path: Path, database: str) -> None:
    edit = tmp_path / "edit.yaml"
    edit.write_text(
        POLICY.replace("max_loss: 5%", "max_loss: 0").replace("max: 8", "max: 6") + "classes: {a: {window: 1h}}\n"
    )
    plan = json.loads(run("plan", str(edit), "--database", database, "--json"))
    assert [(c["traffic_class"], c["key"], c["before"], c["after"]) for c in plan["changes"]] == [
        ("", "objective.max_loss", "0.05", "0"),
        ("", "block.max", "8", "6"),
        ("a", "objective.window", "30m", "1h"),
    ]
    [now] = plan["classes"]
    assert now["before"]["theta"] > 0, "there is leniency to lose"
    assert (now["after"]["theta"], now["after"]["state"]) == (0.0, "disabled")
    assert [line.split(": ")[1] for line in plan["alerts_removed"][:1]] == ["LenityBudgetBurn 5m/1m"]
    text = run("plan", str(edit), "--database", database)
    assert "3 values differ from revision 1" in text
    assert "default: disabled (" in text


def test_a_plan_of_what_is_in_force_changes_nothing(tmp_path: Path, database: str) -> None:
    """The negative control: both columns come from the same code and state."""
    plan = json.loads(run("plan", str(tmp_path / "sim.yaml"), "--database", database, "--json"))
    assert (plan["changes"], plan["alerts_removed"], plan["alerts_added"]) == ([], [], [])
    assert [c["before"] for c in plan["classes"]] == [c["after"] for c in plan["classes"]]


def test_a_plan_for_an_unknown_pool_or_a_bad_file_says_so(tmp_path: Path, database: str) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(GOOD.format(pool="other"))
    assert runner.invoke(app, ["policy", "plan", str(other), "--database", database]).exit_code == 1
    other.write_text("pool: x\n")
    result = runner.invoke(app, ["policy", "plan", str(other), "--database", database])
    assert result.exit_code == 1


def test_rollback_writes_the_last_good_text_with_who_and_why(tmp_path: Path, database: str) -> None:
    path = tmp_path / "sim.yaml"
    worse = POLICY.replace("5%", "20%")
    path.write_text(worse)
    history = History(database)
    now = 1_800_010_000.0
    history.add_policy_revision("sim", worse, revision_of(worse), str(path), now, accepted=True, error=None)
    run("rollback", "sim", "--why", "a typing\nerror", "--who", "mia", "--database", database)
    first, rest = path.read_text().split("\n", 1)
    assert first.startswith("# Rolled back to revision 1 by mia, ")
    assert first.endswith(": a typing error")
    assert rest == POLICY
    # Refused edits do not count: the last good one is in force, and it is what comes back.
    history.add_policy_revision("sim", path.read_text(), "b" * 64, str(path), now + 1, accepted=True, error=None)
    history.add_policy_revision("sim", "junk", "c" * 64, str(path), now + 2, accepted=False, error="bad")
    path.write_text("junk")
    run("rollback", "sim", "--why", "junk", "--who", "leo", "--database", database)
    assert load_policy(path) == parse_policy(POLICY)
    assert path.read_text().count("Rolled back") == 1
    run("rollback", "sim", "--to", "2", "--why", "on purpose", "--database", database)
    assert load_policy(path).objective.max_loss == 0.2
    assert path.stat().st_mode & 0o777 == 0o644
    assert not list(tmp_path.glob(".sim.yaml.*"))
    history.close()


def test_rollback_to_what_never_was_good_is_refused(tmp_path: Path, database: str) -> None:
    before = (tmp_path / "sim.yaml").read_text()
    assert runner.invoke(app, ["policy", "rollback", "none", "--why", "x", "--database", database]).exit_code == 1
    for more in ([], ["--to", "9"]):
        args = ["policy", "rollback", "sim", "--why", "x", *more, "--database", database]
        assert runner.invoke(app, args).exit_code == 1
    assert (tmp_path / "sim.yaml").read_text() == before


def test_what_is_written_back_is_the_same_policy_whatever_its_directory_has_by_now(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    text = "# mine\n" + GOOD.format(pool="p")
    assert restored_text(text, path, "revision 3") == "# Rolled back to revision 3\n" + text
    (tmp_path / "_defaults.yaml").write_text("block: {max: 2}\n")
    path.write_text(restored_text(text, path, "revision 3"))
    assert load_policy(path) == parse_policy(text)


def test_a_mounted_config_map_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "p.yaml").write_text("x")
    (tmp_path / "p.yaml").symlink_to("..data/p.yaml")
    with pytest.raises(Exception, match="ConfigMap"):
        write_policy(tmp_path / "p.yaml", "y")
    assert (tmp_path / "p.yaml").read_text() == "x"


def test_a_link_elsewhere_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text("x")
    (tmp_path / "real.yaml").chmod(0o600)
    (tmp_path / "p.yaml").symlink_to("real.yaml")
    write_policy(tmp_path / "p.yaml", "y")
    assert (tmp_path / "p.yaml").is_symlink()
    assert (tmp_path / "real.yaml").read_text() == "y"
    assert (tmp_path / "real.yaml").stat().st_mode & 0o777 == 0o600


def test_help_names_what_a_command_does() -> None:
    result: Any = runner.invoke(app, ["policy", "--help"])
    for name in ("validate", "schema", "rules", "plan", "rollback"):
        assert name in result.output
