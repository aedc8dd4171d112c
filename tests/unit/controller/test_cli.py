"""The `lenity` command."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from controller.cli import app
from controller.cli import main as entry

runner = CliRunner()
DEFAULTS = Path(__file__).parents[3] / "policies" / "defaults"


def test_the_bundled_policies_are_good() -> None:
    """`policy validate` of the directory says so for each file and exits 0."""
    result = runner.invoke(app, ["policy", "validate", str(DEFAULTS)])
    assert result.exit_code == 0
    assert "default.yaml: good (pool chat-7b)" in result.output
    assert "demo.yaml: good (pool demo)" in result.output


def test_a_bad_policy_is_named_with_line_and_key(tmp_path: Path) -> None:
    """Exit code 1, FILE:LINE: KEY, in text and in JSON."""
    path = tmp_path / "p.yaml"
    path.write_text((DEFAULTS / "default.yaml").read_text().replace("max_loss", "max_los", 1))
    result = runner.invoke(app, ["policy", "validate", str(path)])
    assert result.exit_code == 1
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "max_los:" in text)
    assert f"p.yaml:{line}: objective.max_los" in result.output
    result = runner.invoke(app, ["policy", "validate", "--json", str(path)])
    (row,) = json.loads(result.output)
    assert (row["ok"], row["line"], row["key"]) == (False, line, "objective.max_los")


def test_the_database_is_upgraded_and_says_its_schema(tmp_path: Path) -> None:
    """`db upgrade` makes the schema, `db status` reads it, `history` answers on it."""
    url = f"sqlite:///{tmp_path / 'h.db'}"
    assert runner.invoke(app, ["db", "upgrade", "--database", url]).exit_code == 0
    assert runner.invoke(app, ["db", "status", "--database", url]).exit_code == 0
    result = runner.invoke(app, ["history", "p", "--database", url, "--json"])
    assert json.loads(result.output) == []


def test_a_lease_must_outlast_three_ticks() -> None:
    """A ttl that one late tick would break is refused before anything starts."""
    result = runner.invoke(app, ["controller", "--policy", "x.yaml", "--tick", "1", "--ttl", "2"])
    assert result.exit_code == 2
    assert "three ticks" in result.output


def test_without_a_controller_one_line_says_what_to_do() -> None:
    """No traceback, and an exit code of its own."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    result = runner.invoke(app, ["status", "--url", f"http://127.0.0.1:{port}"])
    assert result.exit_code == 4
    assert "is `lenity controller` running" in result.stderr
    assert "Traceback" not in result.output


def test_a_missing_policy_file_is_one_line(tmp_path: Path) -> None:
    """The controller says which file it cannot read."""
    args = ["controller", "--policy", str(tmp_path / "none.yaml"), "--database", f"sqlite:///{tmp_path / 'h.db'}"]
    with pytest.raises(SystemExit, match=r"none\.yaml"):
        _run(args)


def _run(args: list[str]) -> None:
    """The command as the installed script runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["lenity", *args])
        entry()
