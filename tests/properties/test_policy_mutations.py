"""10,000 mutated policies: each is a policy or a PolicyError with a line inside the text; nothing else ever escapes."""

from __future__ import annotations

import random
import re

import pytest

from policies.errors import PolicyError
from policies.load import parse_policy

SEEDS = (
    "version: lenity/v1\npool: a\nobjective: {metric: m, max_loss: 1%, window: 28d}\n",
    "version: lenity/v1\npool: a\nobjective:\n  metric: m\n  max_loss: 1e-3\n  calendar: month\n  floor: 0.5\n"
    "  also: [{metric: n, max_loss: 2%}]\n",
    "version: lenity/v1\npool: a\nobjective: {metric: m, max_loss: 0.1, window: 1h30m}\n"
    "alerts: {page: [{long: 5m, short: 30s, budget: 30%}]}\npull_back: {start: .2, stop: 5%, cooldown: 1m}\n",
    "version: lenity/v1\npool: a\nobjective: {metric: m, max_loss: 0.02, window: 7d}\nleniency: {rules: [forgive]}\n"
    "classes: {b: &b {max_loss: 0, block: {max: 4}}, c: {<<: *b, min_labels: 5}}\n",
    "version: lenity/v1\npool: a\nobjective: {metric: m, max_loss: 0.02, window: 7d}\n"
    "evidence: {holdback: 1.0e-1, min_labels: '200', label_deadline: 15m, fork_passes_max: 50%}\nextends: []\n",
)
TOKENS = (
    *(
        "max_loss",
        "window",
        "calendar",
        "metric",
        "pool",
        "classes",
        "page",
        "long",
        "stop",
        "extends",
        "version",
        "<<",
    ),
    *("0", "1", "-1", "2%", "150%", "1e-3", "1.0e-3", "1E5", '"0.1"', "1e999", ".nan", ".inf", "0x1f", "1:30", "010"),
    *("28d", "0s", "5", "4 weeks", "null", "~", "true", "yes", "on", "month", "lenity/v1", "forgive", "tokenv3"),
    *(
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        "- ",
        "#",
        "&b",
        "*b",
        "!!str",
        "|",
        ">",
        "'",
        '"',
        "\\",
        "%",
        "@",
        "---\n",
        "...\n",
    ),
    *(" ", "\n", "\n  ", "\t", "\0", "\x7f", "\x85", "\ufeff", "\ud800", "\u2028", "é", "😀", "9" * 300, "a" * 200),
)


VALUES = (
    "0.5",
    "1%",
    "0.02",
    "3d",
    "90s",
    "1h",
    "2",
    "0",
    "1e-3",
    "1.0e-3",
    "1E5",
    '"0.1"',
    "-1",
    "month",
    "1e999",
    "x",
)


def mutated(rng: random.Random) -> str:
    """A policy with one to three edits: of words, of stretches, of lines, or with a piece of another policy."""
    text = rng.choice(SEEDS)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        a = rng.randrange(len(text) + 1)
        b = min(len(text), a + rng.choice((0, 1, 1, 2, 5, 12)))
        kind = rng.randrange(10)
        words = list(re.finditer(r"[\w./%-]+", text))
        if kind <= 4 and words:
            word = rng.choice(words)
            token = rng.choice(VALUES if word[0][0].isdigit() else TOKENS)
            text = text[: word.start()] + token + text[word.end() :]
        elif kind <= 6:
            text = text[:a] + rng.choice(TOKENS) + text[b:]
        elif kind == 7:
            text = text[:a] + text[b:]
        elif kind == 8:
            lines = text.splitlines(keepends=True) or [""]
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
            text = "".join(lines)
        else:
            other = rng.choice(SEEDS)
            c = rng.randrange(len(other))
            text = text[:a] + other[c : c + 20] + text[a:]
    return text


@pytest.mark.parametrize("part", range(4))
def test_a_mutated_policy_is_a_policy_or_an_error_with_a_line(part: int) -> None:
    rng = random.Random(part)
    good = 0
    for _ in range(2_500):
        text = mutated(rng)
        try:
            parse_policy(text)
            good += 1
        except PolicyError as e:
            assert e.line is not None, text
            assert 1 <= e.line <= len(text.splitlines()) + 1, text
            assert "\n" not in str(e), text
    assert 100 < good < 1_500, "some edits must leave a policy good, and most must not"
