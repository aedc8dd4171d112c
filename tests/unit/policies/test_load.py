"""YAML to policy: one fault at a time, each with its line and key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from policies.errors import PolicyError
from policies.load import MAX_BYTES, InvalidPolicy, load_policy, parse_policy, to_yaml
from policies.model import (
    Alerts,
    Block,
    ClassOverride,
    Evidence,
    Leniency,
    MetricEntry,
    Objective,
    PageEntry,
    Policy,
    PullBack,
)

ROOT = Path(__file__).parents[3]
DEFAULTS = ROOT / "policies" / "defaults"

GOOD = """\
version: lenity/v1
pool: chat-7b
objective:
  metric: answer_correct
  max_loss: 0.01
  window: 28d
leniency:
  rules: [threshold, token_v3]
evidence:
  holdback: 0.1
alerts:
  page:
    - {long: 1h, short: 5m, budget: 2%}
classes:
  code: {max_loss: 0}
"""


def fault(text: str) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, "pool.yaml")
    return caught.value


def test_the_shipped_policies_are_good_and_survive_a_round_trip() -> None:
    paths = sorted(DEFAULTS.glob("*.yaml"))
    assert [p.name for p in paths] == ["default.yaml", "demo.yaml"]
    for path in paths:
        policy = load_policy(path)
        assert parse_policy(to_yaml(policy)) == policy


def test_the_default_policy_writes_out_the_defaults() -> None:
    shipped = load_policy(DEFAULTS / "default.yaml")
    bare = parse_policy("version: lenity/v1\npool: p\nobjective: {metric: m, max_loss: 1%, window: 28d}\n")
    for section in ("leniency", "evidence", "block", "pull_back"):
        assert getattr(shipped, section) == getattr(bare, section)


def test_the_canonical_text_reads_back_and_keeps_generated_alerts_generated() -> None:
    text = GOOD[: GOOD.index("alerts:")]
    policy = parse_policy(text)
    canonical = to_yaml(policy)
    assert parse_policy(canonical) == policy
    assert "alerts" not in canonical
    assert "window: 28d" in canonical


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "says"),
    [
        ("max_loss: 0.01", "max_los: 0.01", 5, "objective.max_los", "did you mean max_loss?"),
        ("holdback: 0.1", "max_theta: 0.1", 10, "evidence.max_theta", "belongs under leniency"),
        ("holdback: 0.1", "zzz: 0.1", 10, "evidence.zzz", "known here: holdback, fork_cold"),
        ("leniency:", "lenency:", 7, "lenency", "did you mean leniency?"),
        ("code: {max_loss: 0}", "code: {max_los: 0}", 15, "classes.code.max_los", "did you mean max_loss?"),
        ("code: {max_loss: 0}", "code: {stop: 0}", 15, "classes.code.stop", "belongs under pull_back"),
        ("code: {max_loss: 0}", "code: {max_loss: }", 15, "classes.code.max_loss", "leave the key out"),
        ("code: {max_loss: 0}", "a/b: {max_loss: 0}", 15, "classes.a/b", "class name"),
        ("short: 5m", "shrt: 5m", 13, "alerts.page.0.shrt", "did you mean short?"),
        ("28d", "28", 6, "objective.window", "write 28s"),
        ("28d", "4 weeks", 6, "objective.window", "such as 28d"),
        ("28d", "5s", 6, "objective.window", "at least 10s"),
        ("max_loss: 0.01", "max_loss: yes", 5, "objective.max_loss", "must be a number"),
        ("max_loss: 0.01", "max_loss: true", 5, "objective.max_loss", "not true"),
        ("max_loss: 0.01", "max_loss: 1", 5, "objective.max_loss", "less than 1"),
        ("max_loss: 0.01", "max_loss: -0.1", 5, "objective.max_loss", "at least 0"),
        ("max_loss: 0.01", "max_loss: .nan", 5, "objective.max_loss", "must be a number"),
        ("max_loss: 0.01", "max_loss: 1e999", 5, "objective.max_loss", "finite"),
        ("max_loss: 0.01", "max_loss:", 5, "objective.max_loss", "not nothing"),
        ("max_loss: 0.01", "max_loss: [0.01]", 5, "objective.max_loss", "not a list"),
        ("  max_loss: 0.01\n", "", 3, "objective.max_loss", "is required"),
        ("pool: chat-7b", "pool: 7", 2, "pool", "must be text"),
        ("pool: chat-7b", "pool: 'chat 7b'", 2, "pool", "must be a name"),
        ("  window: 28d\n", "", 3, "objective", "needs a window, such as 28d, or a calendar"),
        ("window: 28d", "calendar: year", 6, "objective.calendar", "'month', 'week' or 'day'"),
        ("window: 28d", "window: 28d\n  calendar: day", 3, "objective", "write one of them"),
        ("window: 28d", "window: 28d\n  floor: 1", 7, "objective.floor", "less than 1"),
        ("window: 28d", "window: 28d\n  floor:", 7, "objective.floor", "no value"),
        (
            "window: 28d",
            "window: 28d\n  also: [{metric: a, max_loss: 0}]",
            7,
            "objective.also.0.max_loss",
            "more than 0",
        ),
        ("window: 28d", "window: 28d\n  also: [{metric: a, max_los: 1%}]", 7, "objective.also.0.max_los", "max_loss?"),
        (
            "window: 28d",
            "window: 28d\n  also: [{metric: answer_correct, max_loss: 1%}]",
            7,
            "objective.also",
            "names a metric twice",
        ),
        ("holdback: 0.1", "fork_passes_max: -1%", 10, "evidence.fork_passes_max", "at least 0"),
        ("code: {max_loss: 0}", "code: {window: 3d, calendar: day}", 15, "classes.code", "write one of them"),
        ("version: lenity/v1", "version: lenity/v2", 1, "version", "must be 'lenity/v1'"),
        ("[threshold, token_v3]", "[threshold, tokenv3]", 8, "leniency.rules.1", "unknown accept rule 'tokenv3'"),
        ("[threshold, token_v3]", "threshold", 8, "leniency.rules", "must be a list"),
        ("[threshold, token_v3]", "[]", 8, "leniency.rules", "must not be empty"),
        ("evidence:\n  holdback: 0.1", "evidence:", 9, "evidence", "must be a section"),
        ("evidence:", "evidence: {}\nevidence:", 10, "evidence", "given twice, first on line 9"),
        ("holdback: 0.1", "holdback: 0.1\n  holdback: 0.9", 11, "evidence.holdback", "given twice, first on line 10"),
        ("holdback: 0.1", "min_labels: 1.5", 10, "evidence.min_labels", "whole number"),
        ("holdback: 0.1", "label_deadline: 40d", 10, "evidence.label_deadline", "shorter than the window"),
        ("budget: 2%", "budget: 90%", 11, "alerts.page", "never page"),
    ],
)
def test_a_fault_names_file_line_and_key(old: str, new: str, line: int, key: str, says: str) -> None:
    assert GOOD.count(old) == 1 or old in ("evidence:", "max_loss: 0.01")
    error = fault(GOOD.replace(old, new, 1))
    assert (error.path, error.line, error.key) == ("pool.yaml", line if key != "alerts.page" else 12, key)
    assert says in error.message
    assert str(error).startswith(f"pool.yaml:{error.line}: {key}: ")


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "empty"),
        ("# nothing\n", 1, "empty"),
        ("- a\n", 1, "mapping of keys"),
        ("version: lenity/v1\npool: [a\n", 3, "not valid YAML"),
        ("version: lenity/v1\n\tpool: a\n", 2, "not valid YAML"),
        ("version: lenity/v1\npool: a\0\n", 2, "character"),
        (GOOD + "---\nversion: lenity/v1\n", 16, "more than one document"),
        ("a: 1\nb: !!python/name:os.system x\n", 2, "tags"),
        ("a: 1\nb: !thing x\n", 2, "tags"),
        ('a: 1\nb: "\\UFFFFFFFF"\n', 2, "not valid YAML"),
        ("a: 1\n? [x]\n: 1\n", 2, "plain word"),
        ("a: 1\nb: *nowhere\n", 2, "undefined alias"),
        ("a: 1\nb: &b [*b]\n", 2, "part of"),
        ("a: 1\nb: &b {<<: *b}\n", 2, "part of"),
        ("a: 1\nb: " + "[" * 5000, 2, "nested"),
        ("x: 0\n" * 10 + "#" * MAX_BYTES, 1, "larger than"),
    ],
)
def test_what_is_not_a_small_plain_document_is_refused(text: str, line: int, says: str) -> None:
    error = fault(text)
    assert error.line == line
    assert says in error.message


def test_an_alias_bomb_is_refused_before_it_expands() -> None:
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 12)]
    error = fault("l0: &l0 [x, x]\n" + "\n".join(levels))
    assert "aliases expand" in error.message


def test_anchors_and_merge_keys_share_values_and_own_keys_win() -> None:
    text = GOOD + "  chat: &c {max_loss: 2%, min_labels: 50}\n  help: {<<: *c, max_loss: 3%}\n  talk: *c\n"
    policy = parse_policy(text)
    assert [policy.for_class(c).max_loss for c in ("chat", "help", "talk")] == [0.02, 0.03, 0.02]
    assert policy.for_class("help").min_labels == 50


def test_words_that_yaml_takes_for_booleans_stay_words() -> None:
    policy = parse_policy(GOOD.replace("answer_correct", "on") + "  yes: {max_loss: 2%}\n  1: {max_loss: 3%}\n")
    assert policy.objective.metric == "on"
    assert policy.for_class("yes").max_loss == 0.02
    assert policy.for_class("1").max_loss == 0.03


@pytest.mark.parametrize("written", ["1e-2", "1.0e-2", "'0.01'", '"1E-2"', "1%", "0.010"])
def test_numbers_may_be_written_as_people_write_them(written: str) -> None:
    assert parse_policy(GOOD.replace("max_loss: 0.01", f"max_loss: {written}")).objective.max_loss == 0.01


def test_all_faults_come_at_once_and_a_misspelling_before_the_key_it_leaves_missing() -> None:
    error = fault(GOOD.replace("max_loss: 0.01", "max_los: 0.01").replace("28d", "28"))
    assert isinstance(error, InvalidPolicy)
    assert [e.key for e in (error, *error.others)] == ["objective.max_los", "objective.window", "objective.max_loss"]


def test_windows_line_ends_and_a_byte_order_mark_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_policy(path) == parse_policy(GOOD)


def test_an_unreadable_file_is_a_policy_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="does not exist"):
        load_policy(tmp_path / "none.yaml")
    with pytest.raises(PolicyError, match="not a regular file"):
        load_policy(tmp_path)
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"version: lenity/v1\npool: \xe9\n")
    with pytest.raises(PolicyError, match=r"latin\.yaml:2: not UTF-8"):
        load_policy(path)


def test_every_key_is_in_the_reference() -> None:
    """docs/policy.md has a table row `| `section.key` |` for each key, and none for a key that does not exist."""
    text = (ROOT / "docs" / "policy.md").read_text()
    documented = re.findall(r"^\| `([a-z_.]+)` \|", text, re.MULTILINE)
    sections: dict[str, type[BaseModel]] = {
        "objective": Objective,
        "leniency": Leniency,
        "evidence": Evidence,
        "block": Block,
        "pull_back": PullBack,
        "alerts": Alerts,
    }
    assert set(Policy.model_fields) == {"version", "pool", "classes", *sections}
    expected = {"version", "pool", "classes", "extends"}
    expected |= {f"{name}.{field}" for name, model in sections.items() for field in model.model_fields}
    expected |= {f"alerts.page.{field}" for field in PageEntry.model_fields}
    expected |= {f"objective.also.{field}" for field in MetricEntry.model_fields}
    assert sorted(documented) == sorted(expected)


def test_every_key_of_a_class_override_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "policy.md").read_text()
    listed = text[text.index("## Overrides per class") :].split("\n## ")[0]
    for field in ClassOverride.model_fields:
        assert f"`{field}`" in listed, field
