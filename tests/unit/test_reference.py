"""The reference names everything there is: each endpoint, each command, each role and order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import typer.main

from controller.auth import RANK
from controller.cli import app
from storage.records import Action
from tests.support_api import ApiWorld

DOCS = Path(__file__).parents[2] / "docs"


def test_every_endpoint_is_in_the_reference() -> None:
    """With its method; and nothing stands there that does not exist."""
    text = (DOCS / "api.md").read_text()
    paths = ApiWorld().app.openapi()["paths"]
    there = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods} | {"GET /metrics"}
    named = set(re.findall(r"`((?:GET|POST|PUT|DELETE) /[^`]*)`", text))
    assert named == there


def test_every_role_order_and_field_of_a_label_is_in_the_reference() -> None:
    text = (DOCS / "api.md").read_text()
    label = ApiWorld().app.openapi()["components"]["schemas"]["Label"]["properties"]
    for word in (*RANK, *get_args(Action), *label):
        assert f"`{word}`" in text, word


def test_every_command_is_in_the_reference() -> None:
    """Commands of the root, by their name."""
    text = (DOCS / "cli.md").read_text()
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = {words.split()[1] for words in re.findall(r"`(lenity [a-z][^`]*)`", text)}
    assert commands <= named
