"""The JSON Schema for editors says what the loader says, as far as it can."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from policies.errors import PolicyError
from policies.load import parse_policy, to_yaml
from policies.schema import MEANINGS, policy_schema

ROOT = Path(__file__).parents[3]
SCHEMA = policy_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
GOOD = """\
version: lenity/v1
pool: chat-7b
objective: {metric: m, max_loss: 0.01, window: 28d}
leniency: {rules: [threshold], max_theta: 90%}
evidence: {min_labels: '200', label_deadline: 1h30m}
pull_back: {start: .2}
alerts: {page: [{long: 1h, short: 5m, budget: 2%}]}
classes: {code: {max_loss: 0, block: {max: 4}}}
"""


def good(text: str) -> bool:
    return not list(VALIDATOR.iter_errors(yaml.safe_load(text)))


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", sorted((ROOT / "policies" / "defaults").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_policies_satisfy_it_as_written_and_in_canonical_form(path: Path) -> None:
    text = path.read_text()
    assert good(text)
    assert good(to_yaml(parse_policy(text)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0.01", "1e-3"),  # text to a YAML 1.1 reader
        ("0.01", "1.0e-3"),
        ("0.01", "'0.1'"),
        ("0.01", "1%"),
        ("28d", "1w2d"),
        ("window: 28d", "calendar: month"),
        ("window: 28d", "window: 28d, floor: 0.5, also: [{metric: a, max_loss: 2%}]"),
        ("version: lenity/v1\n", "version: lenity/v1\nextends: []\n"),
        (GOOD, "extends: base.yaml\nobjective: {max_loss: 2%}\n"),
    ],
)
def test_what_the_loader_takes_satisfies_it(old: str, new: str) -> None:
    assert good(GOOD.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max_loss: 0.01", "max_los: 0.01"),
        ("0.01", "1"),
        ("0.01", "abc"),
        ("0.01", "true"),
        ("28d", "28"),
        ("28d", "4 weeks"),
        ("28d", "''"),
        (", window: 28d", ""),
        ("window: 28d", "window: 28d, calendar: day"),
        ("[threshold]", "[tokenv3]"),
        ("[threshold]", "threshold"),
        ("[threshold]", "[]"),
        ("[threshold]", "[threshold, threshold]"),
        ("'200'", "1.5"),
        ("max: 4", "mx: 4"),
        ("{max_loss: 0,", "{max_loss: ,"),
        ("code:", "a/b:"),
        ("lenity/v1", "lenity/v2"),
        ("chat-7b", "'chat 7b'"),
        ("pool: chat-7b\n", ""),
        ("short: 5m, ", ""),
    ],
)
def test_what_it_refuses_the_loader_refuses_too(old: str, new: str) -> None:
    text = GOOD.replace(old, new, 1)
    assert not good(text)
    with pytest.raises(PolicyError):
        parse_policy(text)


def test_every_key_is_described_as_in_the_reference() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.*?) \| ", (ROOT / "docs" / "policy.md").read_text(), re.MULTILINE)
    assert dict(rows) == MEANINGS

    def undescribed(schema: dict[str, Any], where: str) -> list[str]:
        keys = schema.get("properties", {})
        missing = [
            f"{where}.{key}" for key, value in keys.items() if not value.get("description") and "$ref" not in value
        ]
        return missing + [m for key, value in schema.get("$defs", {}).items() for m in undescribed(value, key)]

    assert undescribed(SCHEMA, "") == []


def test_defaults_are_written_as_people_write_them() -> None:
    defaults = {key: value.get("default") for key, value in SCHEMA["$defs"]["Evidence"]["properties"].items()}
    assert defaults["label_deadline"] == "15m"
    assert defaults["min_labels"] == 200
    assert defaults == {key: value for key, value in defaults.items() if value is not None}
