"""A policy on top of what it extends."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.errors import PolicyError
from policies.load import InvalidPolicy, load, load_policy, parse_policy

BASE = """\
version: lenity/v1
objective: {metric: m, max_loss: 1%, window: 28d}
leniency:
  rules: [threshold, token_v3]
evidence: {holdback: 0.2, min_labels: 50}
classes:
  code: {max_loss: 0, block: {max: 4}}
"""
CHILD = """\
extends: base.yaml
pool: chat
objective: {max_loss: 2%}
leniency: {rules: [forgive]}
classes:
  code: {block: {explore: 0}}
  chat: {max_loss: 5%}
"""


@pytest.fixture
def child(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    path = tmp_path / "chat.yaml"
    path.write_text(CHILD)
    return path


def refused(path: Path) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        load(path)
    return caught.value


def test_mappings_are_merged_and_lists_replaced(child: Path) -> None:
    policy = load_policy(child)
    assert (policy.pool, policy.objective.metric, policy.objective.max_loss) == ("chat", "m", 0.02)
    assert policy.leniency.rules == ("forgive",)
    code = policy.for_class("code")
    assert (code.max_loss, code.g_max, code.explore, code.holdback, code.min_labels) == (0.0, 4, 0.0, 0.2, 50)
    assert policy.for_class("chat").max_loss == 0.05


def test_the_text_that_history_keeps_needs_no_other_file(child: Path) -> None:
    loaded = load(child)
    assert parse_policy(loaded.text) == loaded.policy
    assert loaded.text.startswith("# Composed of chat.yaml, base.yaml.\nversion: lenity/v1\npool: chat\nextends: []\n")
    (child.parent / "_defaults.yaml").write_text("block: {max: 2}\n")
    child.write_text(loaded.text)
    assert load_policy(child) == loaded.policy, "complete by itself, whatever the defaults are"
    alone = "version: lenity/v1\npool: p\nobjective: {metric: m, max_loss: 1%, window: 1d}\n"
    child.write_text(alone)
    (child.parent / "_defaults.yaml").unlink()
    assert load(child).text == alone, "what extends nothing is kept as written"


def test_defaults_beside_a_policy_lie_below_everything(child: Path) -> None:
    (child.parent / "_defaults.yaml").write_text("evidence: {holdback: 0.5, fork_warm: 0.5}\nblock: {max: 2}\n")
    loaded = load(child)
    evidence = loaded.policy.evidence
    assert (evidence.holdback, evidence.fork_warm, loaded.policy.block.max) == (0.2, 0.5, 2)
    assert [Path(name).name for name in loaded.sources] == ["chat.yaml", "base.yaml", "_defaults.yaml"]


def test_a_window_takes_the_place_of_an_inherited_calendar_and_the_other_way_round(child: Path) -> None:
    child.write_text(CHILD.replace("{max_loss: 2%}", "{calendar: month}") + "  a: {window: 7d}\n")
    policy = load_policy(child)
    assert [policy.for_class(c).calendar for c in ("x", "a")] == ["month", None]


@pytest.mark.parametrize(
    ("old", "new", "line", "key"),
    [("holdback: 0.2", "holdback: 2", 5, "evidence.holdback"), ("metric: m", "metrik: m", 2, "objective.metrik")],
)
def test_a_fault_in_a_parent_is_placed_there(child: Path, old: str, new: str, line: int, key: str) -> None:
    base = child.with_name("base.yaml")
    base.write_text(BASE.replace(old, new))
    error = refused(child)
    assert (error.path, error.line, error.key) == (str(base), line, key)


def test_faults_of_several_files_come_together(child: Path) -> None:
    child.with_name("base.yaml").write_text(BASE.replace("holdback: 0.2", "holdback: 2"))
    child.write_text(CHILD.replace("5%", "-5%"))
    error = refused(child)
    assert isinstance(error, InvalidPolicy)
    assert [(Path(e.path).name, e.line) for e in (error, *error.others)] == [("chat.yaml", 7), ("base.yaml", 5)]


@pytest.mark.parametrize(
    ("extends", "says"),
    [
        ("none.yaml", "does not exist"),
        (".", "not a regular file"),
        ("chat.yaml", "goes round in a circle: chat.yaml -> chat.yaml"),
        ("./../x/../{here}/chat.yaml", "goes round in a circle"),
        ("loop.yaml", "goes round in a circle: chat.yaml -> loop.yaml -> chat.yaml"),
        ("deep0.yaml", "more than 8 files"),
        ("[base.yaml]", "must be the name of a policy file"),
        ("", "must be the name of a policy file"),
        ("1", "must be the name of a policy file"),
    ],
)
def test_a_parent_that_cannot_be_is_refused_with_its_line(child: Path, extends: str, says: str) -> None:
    child.with_name("loop.yaml").write_text("pool: a\nextends: chat.yaml\n")
    for i in range(9):
        child.with_name(f"deep{i}.yaml").write_text(f"pool: a\nextends: deep{i + 1}.yaml\n")
    child.write_text(CHILD.replace("base.yaml", extends.format(here=child.parent.name)))
    error = refused(child)
    assert says in error.message
    assert (error.line, error.key) == ((1 if Path(error.path).name == "chat.yaml" else 2), "extends")


def test_a_text_without_a_file_extends_nothing() -> None:
    with pytest.raises(InvalidPolicy, match="only a policy file can extend another") as caught:
        parse_policy(CHILD)
    assert caught.value.line == 1


def test_a_misspelt_extends_is_named() -> None:
    with pytest.raises(InvalidPolicy, match="did you mean extends"):
        parse_policy(BASE + "pool: a\nextend: x\n")
