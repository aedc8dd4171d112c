"""Options come from flags, variables, secret files and a settings file, in that order; faults are placed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from policies.settings import ConfigOption, from_environment

Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Call a command with arguments, variables, and the text of its settings file; the result of the runner."""
    app = typer.Typer(rich_markup_mode=None)

    @app.command(context_settings=from_environment("LENITY_TEST"))
    def command(
        url: Annotated[str, typer.Option(envvar="LENITY_SHARED_URL")] = "default",
        tick: float = 1.0,
        name: Annotated[list[str] | None, typer.Option()] = None,
        fast: Annotated[bool, typer.Option()] = False,
        config: ConfigOption = None,
    ) -> None:
        typer.echo(f"{url} {tick} {name or []} {fast}")

    def call(*args: str, file: str | None = None, **variables: str) -> Any:
        if file is not None:
            (tmp_path / "s.yaml").write_text(file)
            args = ("--config", str(tmp_path / "s.yaml"), *args)
        return CliRunner().invoke(app, list(args), env=variables)

    return call


def test_flag_beats_variable_beats_secret_beats_file_beats_default(run: Run, tmp_path: Path) -> None:
    """One source is taken away after the other."""
    (tmp_path / "secret").write_text("secret\n")
    file, secret = "url: file", str(tmp_path / "secret")
    assert run("--url", "flag", file=file, LENITY_SHARED_URL="variable").output.startswith("flag ")
    assert run(file=file, LENITY_SHARED_URL="variable").output.startswith("variable ")
    assert run(file=file, LENITY_SHARED_URL_FILE=secret).output.startswith("secret ")
    assert run(file=file).output.startswith("file ")
    assert run().output.startswith("default ")


def test_every_kind_of_option_can_be_set_from_both(run: Run) -> None:
    """Numbers in every notation, lists, and switches as words."""
    assert run(file="tick: 1E0\nname: [a, b]\nfast: yes\n").output == "default 1.0 ['a', 'b'] True\n"
    assert run(file="name: a\nfast: 'off'\n").output == "default 1.0 ['a'] False\n"
    said = run(LENITY_TEST_TICK="2", LENITY_TEST_NAME="a b", LENITY_TEST_FAST="1").output
    assert said == "default 2.0 ['a', 'b'] True\n"
    assert run(file="").output == run(file="# nothing\n").output == "default 1.0 [] False\n"


def test_the_file_may_be_named_by_a_variable(run: Run, tmp_path: Path) -> None:
    """As every option."""
    (tmp_path / "t.yaml").write_text("tick: 3")
    assert run(LENITY_TEST_CONFIG=str(tmp_path / "t.yaml")).output == "default 3.0 [] False\n"


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("tick: 2\ntik: 1\n", "s.yaml:2: tik: unknown key; did you mean tick?"),
        ("help: true\n", "s.yaml:1: help: unknown key; known here: url, tick, name, fast"),
        ("tick: 2\n\ntick: 1\n", "s.yaml:3: tick: given twice"),
        ("tick: soon\n", "s.yaml:1: tick: "),
        ("url:\n  host: a\n", "s.yaml:2: url: needs a value"),
        ("url:\n", "s.yaml:1: url: needs a value; leave the key out for the default"),
        ("url: [a]\n", "s.yaml:1: url: takes one value, not a list"),
        ("- url\n", "s.yaml:1: must be a mapping of options"),
        ("url: {\n", "s.yaml:2: not valid YAML"),
        ("url: a\n---\nurl: b\n", "s.yaml:2: not valid YAML"),
        ("url: " + "a" * 70_000, "s.yaml: larger than 64 KiB"),
    ],
)
def test_a_fault_in_the_file_is_refused_with_its_place(run: Run, file: str, says: str) -> None:
    """Nothing in the file is ignored."""
    result = run(file=file)
    assert result.exit_code == 2
    assert says in result.output


def test_a_secret_must_be_one_line_and_unambiguous(run: Run, tmp_path: Path) -> None:
    """A file that is missing, empty or of several lines, or a variable beside it, is refused."""
    good = tmp_path / "good"
    good.write_text("x")
    assert "both set" in run(LENITY_SHARED_URL="a", LENITY_SHARED_URL_FILE=str(good)).output
    for content in ("", "a\nb\n"):
        (tmp_path / "bad").write_text(content)
        assert "one line of text" in run(LENITY_SHARED_URL_FILE=str(tmp_path / "bad")).output
    assert "cannot be read" in run(LENITY_SHARED_URL_FILE=str(tmp_path / "none")).output


def test_a_misspelt_variable_is_pointed_out(run: Run) -> None:
    """It is not refused: whatever starts the process may set variables of its own, as Kubernetes does for services."""
    result = run(LENITY_TEST_TIK="2")
    assert result.exit_code == 0
    assert "LENITY_TEST_TIK is set, but there is no such option" in result.output
