"""Structured spans: no leniency in fences and tool calls however they are cut into tokens; prose stays lenient."""

from __future__ import annotations

import itertools
import random

import pytest

from decoder.spans import SpanTracker


class Texts:
    """Tokens of any text; a token's id is its number in this vocabulary."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def ids(self, tokens: list[str]) -> list[int]:
        self.texts += tokens
        return list(range(len(self.texts) - len(tokens), len(self.texts)))

    def __getitem__(self, token: int) -> str:
        return self.texts[token]


def mask(tokens: list[str], done: int = 0) -> list[bool]:
    """The mask of ``tokens[done:]`` drafted after ``tokens[:done]``."""
    texts = Texts()
    ids = texts.ids(tokens)
    return SpanTracker(texts.__getitem__).lenient_mask(ids[:done], ids[done:])


def lenient_text(text: str) -> str:
    """The characters of ``text`` that are lenient when every character is a token."""
    return "".join(c for c, ok in zip(text, mask(list(text)), strict=True) if ok)


def test_prose_is_lenient_throughout():
    text = "So 3 apples cost\n\n- 6 dollars, and\n1. x > y, 2 * 3;\n> quoted it's"
    assert lenient_text(text) == text


@pytest.mark.parametrize(
    "fence",
    [
        "```\ncode\n```\n",
        "```python\nx = 1\n\n  y\n```  \n",
        "~~~\n```\n~~~\n",
        "````\n```\ncode\n````\n",
        "- ```\n  a\n  ```\n",
        "> ~~~\n> a\n> ~~~\n",
        "    1. ```js\nf()\n    ```\n",
        "```\nnever `closed` ``here``\n ```not\n``\n~~~\nmore",
    ],
)
def test_fenced_code_is_lossless_and_prose_around_is_not(fence):
    assert lenient_text("Before.\n" + fence).removeprefix("Before.\n").strip(" \t\n>-1.") == ""
    if fence.endswith(("`\n", "~\n", "  \n")):
        assert lenient_text("Before.\n" + fence + "After.").endswith("After.")


@pytest.mark.parametrize("text", ["Use `ls -l` now.", "a ```b``` c", "x ~~~ y", "it costs ~5", "``two`` of them"])
def test_inline_code_is_prose(text):
    """Only what begins a line may be a fence, until it has turned out not to be one."""
    assert lenient_text("- Say: " + text) == "- Say: " + text
    assert lenient_text(text).endswith(text[-8:].lstrip("`~"))


def test_three_backticks_closed_on_their_line_are_inline_code():
    assert lenient_text("```code``` and then prose\nand more").endswith(" and then prose\nand more")


@pytest.mark.parametrize(
    ("call", "closed"),
    [
        ('<tool_call>\n{"name": "f"}\n</tool_call>', True),
        ('<function=f>{"a": 1}</function>', True),
        ('[TOOL_CALLS][{"name": "f"}]</tool_call>', False),
        ("<|python_tag|>f(1)", False),
    ],
)
def test_the_arguments_of_tool_calls_are_lossless(call, closed):
    assert lenient_text("I call: " + call) == "I call: "
    assert lenient_text("I call: " + call + " Done.") == ("I call:  Done." if closed else "I call: ")


def test_what_only_looks_like_a_marker_turns_out_to_be_prose():
    assert lenient_text("if a <b or [x], c <tool") == "if a  or ], c "
    assert lenient_text("<tool kit>") == "kit>"


def test_a_fence_split_over_tokens_is_seen_at_its_first_character():
    tokens = ["Code", ":\n", "`", "``", "py", "\n", "x", "\n``", "`", "\n", "Done", "."]
    assert mask(tokens) == [True, True] + [False] * 8 + [True, True]


def test_a_token_that_holds_a_whole_fence_is_lossless():
    assert mask(["a", "\n```\ncode\n```\n", "b", "\n```", "c"]) == [True, False, True, False, False]


@pytest.mark.parametrize("seed", range(20))
def test_how_the_text_is_cut_into_tokens_and_rounds_does_not_matter(seed):
    """A token is lenient exactly if every character of it is, however output and block divide the text."""
    rng = random.Random(seed)
    parts = ["word ", "\n", "```", "`", "~~~", "<tool_call>", "</tool_call>", "- ", "> ", "<", "1. ", "é", "``"]
    text = "word " + "".join(rng.choice(parts) for _ in range(60))
    strict = mask(list(text))
    cuts = sorted(rng.sample(range(1, len(text)), 25))
    tokens = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    texts = Texts()
    ids = texts.ids(tokens)
    tracker, done, got = SpanTracker(texts.__getitem__), 0, []
    while done < len(ids):
        block = ids[done : done + rng.randint(1, 4)]
        found = tracker.lenient_mask(ids[:done], block)
        step = rng.randint(1, len(block))
        got += found[:step]
        done += step
    ends = list(itertools.accumulate(map(len, tokens)))
    assert got == [all(strict[end - len(token) : end]) for token, end in zip(tokens, ends, strict=True)]
    assert any(strict) and not all(strict)


def test_the_other_branch_of_a_fork_is_read_anew():
    texts = Texts()
    fenced, plain = texts.ids(["a\n", "```", "x"]), texts.ids(["a\n", "no", "x"])
    tracker = SpanTracker(texts.__getitem__)
    assert tracker.lenient_mask(fenced[:2], fenced[2:]) == [False]
    assert tracker.lenient_mask(plain[:2], plain[2:]) == [True]
    assert tracker.lenient_mask(fenced[:2], fenced[2:]) == [False]
