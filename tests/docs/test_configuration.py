"""The configuration page says of every option and variable what the code says, and nothing else."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Any

from policies.settings import flag_name
from tests.docs.tables import CONFIGURATION, with_tables
from tests.support_cli import commands, markdown_rows, options, parse

ROOT = Path(__file__).parents[2]
TEXT = CONFIGURATION.read_text()


def test_tables_of_options_are_those_of_the_commands() -> None:
    """Flag, variable, default and meaning; after a change: python -m tests.docs.tables."""
    assert with_tables(TEXT) == TEXT
    rows = markdown_rows(TEXT, "| flag |")
    assert len(rows) == sum(len(options(commands()[c])) for c in ("controller", "worker"))
    assert all(row[3] for row in rows)


def test_every_variable_that_the_code_reads_is_on_the_page_and_the_other_way_round() -> None:
    """Variables are found by their names in the source, and as those of options."""
    known = {
        name
        for package in ("controller", "decoder", "policies", "storage", "tests")
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r"\"(LENITY_[A-Z_]+)\"", path.read_text())
        if package != "tests" or path.name == "conftest.py"
    }
    known -= {"LENITY_CONTROLLER", "LENITY_WORKER"}  # prefixes
    for row in markdown_rows(TEXT, "| flag |"):
        known.add(row[1].strip("`"))
    documented = {n for r in markdown_rows(TEXT, "| flag |") for n in re.findall(r"`(LENITY_\w+)`", r[1])}
    documented |= {n for r in markdown_rows(TEXT, "| variable |") for n in re.findall(r"`(LENITY_\w+)`", r[0])}
    assert documented == known


def test_every_option_takes_its_value_from_its_variable_and_from_a_file(tmp_path: Path) -> None:
    """The documented variable of each option is set to something else than the default, and arrives."""
    for command in ("controller", "worker"):
        base = {"controller": ["--policy", "p"], "worker": ["--redis-url", "r"]}[command]
        for param in options(commands()[command]):
            key = flag_name(param)
            if key == "config":
                continue
            value = _other_value(param)
            words = [] if base[0] == f"--{key}" else base
            rows = markdown_rows(_section(command), "| flag |")
            variable = next(r[1].strip("`") for r in rows if f"`--{key}`" in r[0])
            (tmp_path / "s.yaml").write_text(f"{key}: {value}\n")
            by_flag = parse([command, *words, *_flag(param, key, value)])[1][param.name]
            by_variable = parse([command, *words], {variable: value})[1][param.name]
            by_file = parse([command, *words, "--config", str(tmp_path / "s.yaml")])[1][param.name]
            assert by_flag == by_variable == by_file != param.default, (command, key)


def _section(command: str) -> str:
    return TEXT.partition(f"<!-- options of {command} -->")[2].partition(f"<!-- end of {command} -->")[0]


def _flag(param: Any, key: str, value: str) -> list[str]:
    return [f"--{key}"] if param.is_flag else [f"--{key}", value]


def _other_value(param: Any) -> str:
    """A value that the option takes and that is not its default."""
    kind = param.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(str(c.value) for c in kind if c is not param.default)
    return "1" if param.is_flag else "700"
