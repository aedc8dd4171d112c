"""The command line as a tree: which commands there are, what options they have, and whether a line of words parses."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import typer
from typer.main import get_command

from controller.cli import app
from decoder.cli import app as decoder_app


@functools.cache
def commands() -> dict[str, Any]:
    """Every command by its words, `policy validate` for one of a group; the decoder's own commands in their places."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield " ".join(words), command
            return
        for name, child in inner.items():
            yield from walk(child, (*words, name))

    return dict(walk(get_command(app), ())) | dict(walk(get_command(decoder_app), ()))


def parse(words: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[str, dict[str, Any]]:
    """The command that `lenity WORDS` would run, and the values of its parameters; nothing is run.

    Raises AssertionError with what the command line would have said if it does not parse, or if it would warn.
    """
    known = commands()
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in known:
            break
    else:
        raise AssertionError(f"there is no command `lenity {' '.join(words[:2])}`")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LENITY_")}
    said = io.StringIO()
    with mock.patch.dict(os.environ, clean | dict(environment or {}), clear=True), contextlib.redirect_stderr(said):
        try:
            context = known[name].make_context(name, list(words[length:]))
        except typer.Exit:
            return name, {}  # --help
        except Exception as e:
            message = e.format_message() if hasattr(e, "format_message") else str(e)
            raise AssertionError(f"lenity {shlex.join(words)}: {message}") from e
    assert not said.getvalue(), f"lenity {shlex.join(words)}: {said.getvalue()}"
    return name, dict(context.params)


def options(command: Any) -> list[Any]:
    """The options of a command but `--help`."""
    return [p for p in command.params if p.param_type_name == "option" and p.name != "help"]


def markdown_rows(text: str, header: str) -> list[list[str]]:
    """The cells of the tables whose header line begins with ``header``."""
    rows: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(header):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not set(line) <= set("|-: "):
            rows.append([c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows
