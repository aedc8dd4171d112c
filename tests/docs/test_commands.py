"""Every command in the documents parses; those that can run here are run, and print what the page says."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from controller.why import ADVICE
from storage.embedded import EmbeddedServer
from tests.docs.commands import PAGES, ROOT, Command, console_commands, lenity_lines, play, simple_commands
from tests.docs.feed import spent_pool
from tests.support_cli import commands, markdown_rows, parse

COMMANDS = [c for page in PAGES for c in console_commands(page)]
# What a reader's own system has; the others are ours, or are checked below.
PLAIN = {"cat", "cp", "curl", "cd", "echo", "export", "git", "head", "install", "kill", "ls", "mkdir", "sed", "sleep",
         "redis-server", "systemctl", "systemd-analyze", "useradd", "createdb", "wait", "grep", "true"}  # fmt: skip
TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def check(words: list[str]) -> None:
    """Raise AssertionError where a simple command cannot be meant as it stands."""
    program, *rest = words
    if Path(program).name == "lenity":
        try:
            parse(rest)
        except AssertionError as e:
            if "does not exist" not in str(e):  # a file that the reader, or a command before, is to write
                raise
    elif program == "make":
        assert {w for w in rest if "=" not in w} <= TARGETS, words
    elif Path(program).name == "pip":
        named = {e for w in rest for e in ",".join(re.findall(r"\[(.*?)\]", w)).split(",") if e}
        assert named <= EXTRAS, words
    elif Path(program).name == "python":
        if "-m" in rest:
            module = rest[rest.index("-m") + 1]
            assert find_spec(module) is not None, words
    elif program in ("docker", "kubectl"):
        for flag in ("-f", "-k", "--file"):
            if flag in rest:
                assert (ROOT / rest[rest.index(flag) + 1]).exists(), words
        if "compose" in rest and "--profile" in rest:
            services = yaml.safe_load((ROOT / "ops" / "compose" / "compose.yaml").read_text())["services"].values()
            assert rest[rest.index("--profile") + 1] in {p for s in services for p in s.get("profiles", [])}, words
    elif program.startswith("ops/"):
        assert (ROOT / program).is_file(), words
    else:
        assert program in PLAIN, f"{program}: say in this test what it is"


@pytest.mark.parametrize("command", COMMANDS, ids=[c.where for c in COMMANDS])
def test_every_command_parses(command: Command) -> None:
    """Ours against the real command line; targets, extras, modules and files against what is there."""
    found = list(simple_commands(command.text))
    assert found
    for words in found:
        check(words)


def test_lines_of_ours_outside_of_console_fences_parse() -> None:
    """In indented blocks."""
    lines = [(page, number, line) for page in PAGES for number, line in lenity_lines(page)]
    for page, number, line in lines:
        for words in simple_commands(line.split("  #")[0].replace("…", "x")):
            try:
                check(words)
            except AssertionError as e:
                raise AssertionError(f"{page.relative_to(ROOT)}:{number}: {e}") from e


def test_commands_named_in_the_text_exist() -> None:
    """In spans of code; capitals stand for something of the reader's."""
    groups = {name.split()[0] for name in commands()}
    for page in PAGES:
        for words in re.findall(r"`lenity ([a-z][^`]*)`", page.read_text()):
            first, *rest = words.split()
            assert first in groups, (page.name, words)
            names = [n for n in commands() if n.split()[0] == first]
            if rest and names != [first]:
                assert any(n.split()[1] in re.split(r"\W+", rest[0]) for n in names), (page.name, words)
            flags = set(re.findall(r"--[a-z][a-z-]+", words)) - {"--help", "--install-completion"}
            known = {o for n in names for p in commands()[n].params for o in (*p.opts, *p.secondary_opts)}
            assert flags <= known, (page.name, words)


def test_a_command_with_a_fault_is_noticed() -> None:
    """Negative control, for each kind."""
    for line in ("lenity controller --polcy x", "make demmo", "pip install '.[wroker]'", "docker compose -f nowhere up",
                 "python -m controller.nothing", "lenity polcy validate x", "frobnicate"):  # fmt: skip
        with pytest.raises(AssertionError):
            check(shlex.split(line))


PLAYED = sorted({c.page for c in COMMANDS if c.played} - {ROOT / "docs" / "on-call.md", ROOT / "docs" / "tutorial.md"})


@pytest.mark.parametrize("page", PLAYED, ids=lambda p: p.name)
def test_commands_of_a_page_run_and_print_what_it_says(page: Path, tmp_path: Path) -> None:
    """In one shell, in an empty directory."""
    play([c for c in COMMANDS if c.page == page and c.played], tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.peer("redis-server")
@pytest.mark.peer("curl")
def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    """With a stream server, a controller and a worker of its own, on the bundled pair."""
    play([c for c in COMMANDS if c.page.name == "tutorial.md" and c.played], tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.peer("curl")
def test_the_on_call_page_answers_for_a_pool_whose_budget_is_spent(tmp_path: Path, valkey: EmbeddedServer) -> None:
    """Against a controller that was fed answers which leniency ruined."""
    with spent_pool(tmp_path, valkey.url) as variables:
        play([c for c in COMMANDS if c.page.name == "on-call.md" and c.played], tmp_path, variables)


def test_the_on_call_page_explains_every_reason() -> None:
    """Those that the governor and the operators' orders give, in both tables' words."""
    page = (ROOT / "docs" / "on-call.md").read_text()
    table = {r for row in markdown_rows(page, "| reason | it means") for r in re.findall(r"`(\w+)`", row[0])}
    tree = ast.parse((ROOT / "controller" / "allowance.py").read_text())
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "explain")
    endings = next(n for n in ast.walk(function) if isinstance(n, ast.Dict))
    reasons = {k.value for k in endings.keys if isinstance(k, ast.Constant)}
    assert reasons
    assert table >= reasons | set(ADVICE) | {"fast_burn", "exhausted", "floor", "learning", "disabled"}


def test_a_page_that_is_wrong_fails(tmp_path: Path) -> None:
    """Negative control: another output, and another exit code."""
    page = ROOT / "docs" / "x.md"
    play([Command(page, 1, "echo a b", ("a …",), True), Command(page, 2, "! false", (), True)], tmp_path)
    for wrong in (Command(page, 1, "echo a", ("b",), True), Command(page, 1, "false", (), True)):
        with pytest.raises(AssertionError, match=r"docs/x\.md:1"):
            play([wrong], tmp_path)
