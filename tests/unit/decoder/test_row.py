"""Where a request ends: end tokens, caps, and stop strings wherever blocks and tokens happen to be cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.request import Request
from decoder.row import Row
from decoder.sampling import SamplingParams

STOP = 9


def row(limit: int = 100, stop: tuple[str, ...] = (), eos: int = STOP) -> Row:
    """Token i is the i-th letter; 26 is a space, 27 and 28 are words."""
    words = [*"abcdefghijklmnopqrstuvwxyz ", "end of", " text"]
    params = SamplingParams(stop=stop, max_tokens=limit)
    request = Request("r", [0], params, detokenize=lambda ids: "".join(words[i] for i in ids))
    return Row.start(request, limit, frozenset({eos}))


@pytest.mark.parametrize(("accepted", "expected", "reason"), [
    ([10, 11, STOP, 20, 21, 22], [10, 11, STOP], "stop"),  # what follows the end does not count against the cap
    ([10, 11, 12, 13, 14, STOP], [10, 11, 12, 13, 14], "length"),  # an end beyond the cap is not reached
    ([10, 11, 12, 13, STOP, 20], [10, 11, 12, 13, STOP], "stop"),  # the last place that is allowed
])  # fmt: skip
def test_an_accepted_run_ends_at_its_end_token_or_at_the_cap(
    accepted: list[int], expected: list[int], reason: str
) -> None:
    at_work = row(limit=5)
    at_work.emit(accepted)
    assert (at_work.output, at_work.finish_reason) == (expected, reason)


def test_a_stop_string_may_be_split_over_tokens_and_blocks() -> None:
    at_work = row(stop=("of text",))
    at_work.emit([1, 27])
    assert not at_work.finish_reason
    at_work.emit([28, 1, 2])
    assert at_work.output == [1, 27, 28] and at_work.finish_reason == "stop"
    assert (at_work.stop_text, at_work.text_length) == ("of text", 5)  # "bend " comes before it


def test_of_two_stop_strings_the_one_that_is_complete_first_counts() -> None:
    at_work = row(stop=("cde", "bcd"))
    at_work.emit([0, 1, 2, 3, 4, 5])
    assert at_work.output == [0, 1, 2, 3] and (at_work.stop_text, at_work.text_length) == ("bcd", 1)


def test_an_end_token_before_the_stop_string_ends_first_and_a_stop_string_beats_the_cap() -> None:
    ended = row(stop=("kl",))
    ended.emit([STOP, 10, 11])
    assert ended.output == [STOP] and ended.stop_text is None
    full = row(stop=("kl",), limit=2)
    full.emit([10, 11])
    assert full.finish_reason == "stop" and full.stop_text == "kl"


@given(
    text=st.lists(st.integers(0, 2), max_size=30),
    stop=st.text("abc", min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 5), min_size=30, max_size=30),
)
def test_blocks_do_not_change_where_a_text_stops(text: list[int], stop: str, cuts: list[int]) -> None:
    by_token, by_block = row(stop=(stop,)), row(stop=(stop,))
    for token in text:
        if not by_token.finish_reason:
            by_token.emit([token])
    rest = list(text)
    for cut in cuts:
        if not by_block.finish_reason:
            by_block.emit(rest[:cut])
        rest = rest[cut:]
    assert by_block.output == by_token.output and by_block.text_length == by_token.text_length
