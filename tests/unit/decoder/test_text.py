"""Text as tokens come: nothing is taken back, stop strings are held however they are cut; prompts by template."""

from __future__ import annotations

import random

import pytest

from decoder.chat import Chat
from decoder.text import Text, TextStream
from tests.support_serving import Bytes


def cut(text: str, seed: int) -> list[bytes]:
    """The bytes of ``text`` in pieces of 1 to 4."""
    rng, raw, pieces = random.Random(seed), text.encode(), []
    while raw:
        n = rng.randint(1, 4)
        pieces.append(raw[:n])
        raw = raw[n:]
    return pieces


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_the_parts_together_are_the_text_whatever_the_cuts(seed, strip):
    text = " Größe 🙂 of ünïts — 漢字, END of it"
    pieces = cut(text, seed)
    tokenizer = Bytes(pieces, strip)
    stream, rng = TextStream(Text(tokenizer), ["ENDE", "漢字漢"]), random.Random(seed)
    parts, at = [], 0
    while at < len(pieces):
        n = rng.randint(1, 3)
        parts.append(stream.push(list(range(at, min(at + n, len(pieces))))))
        assert "\ufffd" not in parts[-1]
        at += n
    assert "".join(parts) + stream.finish() == tokenizer.decode(list(range(len(pieces))))


@pytest.mark.parametrize("seed", range(10))
def test_nothing_of_a_stop_string_is_shown(seed):
    text = "one two th three stop"
    at = text.index("three st")
    pieces = cut(text, seed)
    stream, shown = TextStream(Text(Bytes(pieces)), ["three st", "xyz"]), ""
    for i in range(len(pieces)):
        shown += stream.push([i])
        assert text[:at].startswith(shown)
    assert shown + stream.finish(at) == text[:at]


def test_what_looked_like_a_stop_string_comes_out_when_it_is_none():
    stream = TextStream(Text(Bytes([b"a sto", b"ry"])), ["stop"])
    assert [stream.push([0]), stream.push([1])] == ["a ", "story"]


def test_a_model_with_a_template_is_asked_by_it_without_adding_special_tokens_again():
    tokenizer = Bytes(template="yes")
    assert bytes(Chat(Text(tokenizer, bos=1)).prompt([{"role": "user", "content": "hi"}])) == b"user>hi|assistant>"
    assert tokenizer.calls == [("user>hi|assistant>", False)]


def test_messages_that_the_template_refuses_are_the_callers_fault():
    with pytest.raises(ValueError, match="template refuses these messages: no tools"):
        Chat(Text(Bytes(template="yes"))).prompt([{"role": "tool", "content": "4"}])
    with pytest.raises(ValueError, match="must not be empty"):
        Chat(Text(Bytes())).prompt([])


def test_without_a_template_one_message_is_the_prompt_and_several_are_paragraphs():
    chat = Chat(Text(Bytes(), bos=1))
    user = {"role": "user", "content": "Q:"}
    assert chat.prompt([user]) == [1, *b"Q:"]
    asked = chat.prompt([{"role": "system", "content": "Be brief."}, user])
    assert bytes(asked[1:]) == b"system: Be brief.\n\nuser: Q:\n\nassistant:"
