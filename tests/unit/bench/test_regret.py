"""The regret benchmark replays texts exactly, lets policies see only what they drafted, and can tell good from bad."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.regret import by_length, decode, figures, play
from bench.regret_lenity import Lenity
from bench.regret_rivals import Ema, EmaFormula, Fixed, Greedy, Heuristic, Round
from bench.regret_traces import (
    DATA,
    HELD_OUT,
    RECORDED,
    SYNTHETIC,
    G,
    Seconds,
    Segment,
    Text,
    Trace,
    drawn,
    machine,
    recording,
    runs,
    stretches,
    traces,
)
from storage.records import TokenBlock

UNIT = Seconds(np.linspace(0.0, 0.1 * G, G + 1), np.ones(G + 1), np.zeros(G + 1))  # a pass 1 s, a draft step 0.1 s


def text_of(taken: str) -> Text:
    """A text of which the positions with an ``x`` have an accepted draft."""
    flags = np.array([c == "x" for c in taken])
    accept = flags.astype(np.float64)
    return Text(runs(flags), np.full(len(flags), G), accept, accept)


def played(drafted: int, accepted: int, seconds: float = 0.02) -> Round:
    """A round of one row."""
    at, text = np.zeros(1, dtype=np.int64), text_of("x" * 8)
    return Round(1, drafted, np.array([drafted]), np.array([accepted]), 0.001 * drafted, seconds, 0.0, at, text)


def test_runs_of_accepted_drafts_by_hand() -> None:
    """x x . x: two, one, none, and one that goes round the end to the first two."""
    assert runs(np.array([True, True, False, True])).tolist() == [2, 1, 0, 3]


def test_a_text_is_decoded_as_a_worker_would() -> None:
    """xx.xx.: two rounds of three tokens at g=2, four of 2, 1, 2 and 1 at g=1, six plain ones."""
    segment = Segment("", text_of("xx.xx."), UNIT)
    seconds = by_length(segment)
    assert seconds[:3] == pytest.approx([6.0, 4 * 1.1, 2 * 1.2])
    for g in (0, 1, 2):
        took = decode(Trace("", (segment,), noise=0.0), Fixed(g), np.random.default_rng(0))
        assert took == pytest.approx([seconds[g]])


def test_a_fixed_length_emits_what_its_acceptance_promises() -> None:
    """Tokens a round at a=.7, g=5 within 5 standard errors of (1 - a^6)/(1 - a): fails by chance once in a million."""
    segment = Segment("", drawn(np.full(40_000, 0.7), np.random.default_rng(1)), UNIT)
    rounds = by_length(segment)[5] / 1.5
    assert 40_000 / rounds == pytest.approx((1 - 0.7**6) / 0.3, rel=5 * 0.6 / np.sqrt(rounds))


def test_batches_are_timed_by_their_widest_row() -> None:
    """Two rows of one text: everybody waits for the longer draft, and both emit."""
    segment = Segment("", Text(np.array([0, 0, 0, 0]), np.array([0, 0, 3, 3])), UNIT, rows=2)
    assert decode(Trace("", (segment,), noise=0.0), Fixed(3), np.random.default_rng(0)) == pytest.approx([2 * 1.3])


def test_every_kind_of_trace_is_there_and_repeats() -> None:
    """Same seed, same traces; at least 12 of them, synthetic and recorded."""
    first, second = traces(1600, 3), traces(1600, 3)
    assert [t.name for t in first] == [*SYNTHETIC, *HELD_OUT, *RECORDED]
    assert len(first) >= 12
    for a, b in zip(first, second, strict=True):
        for s, t in zip(a.segments, b.segments, strict=True):
            assert s.rows == t.rows
            np.testing.assert_array_equal(s.text.length, t.text.length)
            assert np.all(s.text.length <= s.text.width)


def test_stretches_mix_in_proportion_to_their_lengths() -> None:
    """Three in four positions are easy; 4,000 stretches, so within .05 (over 5 standard errors)."""
    a = stretches(160_000, 0.95, 0.35, (60, 20), np.random.default_rng(0))
    assert np.mean(a == 0.95) == pytest.approx(0.75, abs=0.05)


def test_recordings_hold_numbers_only_and_are_small() -> None:
    """No column can hold a token id or a text; all files together are below 3 MB."""
    assert sum(file.stat().st_size for file in Path(DATA).glob("*.npz")) < 3e6
    for name in ("bundled", "smollm2"):
        for column, values in recording(name).items():
            assert np.all((values >= 0) & (values <= G)), column
            assert column.rpartition("_")[2] in {"length", "width", "accept", "first", "s"}


def test_recorded_coins_agree_with_recorded_probabilities() -> None:
    """Accepted drafts of the bundled pair against the sum of their probabilities: within 5 standard errors."""
    for kind in ("easy", "hard"):
        accept = recording("bundled")[f"{kind}_accept"]
        taken = recording("bundled")[f"{kind}_length"] > 0
        inside = recording("bundled")[f"{kind}_width"] > 0
        error = np.sqrt((accept * (1 - accept))[inside].sum())
        assert abs(taken[inside].sum() - accept[inside].sum()) < 5 * error


def test_the_heuristic_adds_two_or_takes_one() -> None:
    """5 -> 7 after a full round, -> 6 after a partial one, never below 1."""
    policy = Heuristic()
    policy.after(played(5, 5), 0.0)
    assert policy.lengths(1, 0.0) == 7
    policy.after(played(7, 3), 0.0)
    assert policy.lengths(1, 0.0) == 6
    for _ in range(9):
        policy.after(played(6, 0), 0.0)
    assert policy.lengths(1, 0.0) == 1


def test_averages_settle_where_they_should() -> None:
    """Everything accepted: the longest step; nothing: the shortest one, or none where costs are known."""
    for accepted, step, formula in ((1.0, 7, G), (0.0, 1, 0)):
        ema, eq3 = Ema(), EmaFormula()
        for _ in range(600):
            for policy in (ema, eq3):
                g = policy.lengths(1, 0.0)
                policy.after(played(g, round(accepted * g)), 0.0)
        assert ema.lengths(1, 0.0) == step
        assert eq3.g[1] == formula


def test_epsilon_greedy_tries_every_arm_first() -> None:
    """Nine intervals, nine arms."""
    policy, seen = Greedy(np.random.default_rng(0)), set()
    for _ in range(len(Greedy.ARMS) * Greedy.ROUNDS):
        g = policy.lengths(1, 0.0)
        seen.add(g)
        policy.after(played(g, 0), 0.0)
    assert seen == set(Greedy.ARMS)


def test_the_controller_is_told_only_what_was_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has one entry per drafted position, accepted ones from the left, the first rejected one examined last."""
    policy = Lenity(np.random.default_rng(0))
    text = text_of("xx." * 40)
    blocks: list[TokenBlock] = []
    observe = policy.steer.observe_block

    def note(block: TokenBlock, now: float) -> None:
        blocks.append(block)
        observe(block, now)

    monkeypatch.setattr(policy.steer, "observe_block", note)
    decode(Trace("", (Segment("", text, UNIT),), noise=0.0), policy, np.random.default_rng(0))
    widths = np.concatenate([block.round_width for block in blocks])
    flags = np.concatenate([block.flags for block in blocks])
    assert len(flags) == widths.sum()
    assert {
        (int(p), int(f)) for block in blocks for p, f in zip(block.position, block.flags, strict=True) if p <= 4
    } == {
        (1, 3),
        (2, 3),
        (3, 1),
        (4, 0),
    }


def test_the_controller_beats_plain_decoding_and_is_beaten_by_the_clairvoyant() -> None:
    """Acceptance .8 and cheap drafts, 4,000 tokens: over .85 of what is possible after a cold start."""
    text = drawn(np.full(4000, 0.8), np.random.default_rng(2))
    segment = Segment("", text, machine())
    seconds = by_length(segment)
    took = decode(Trace("", (segment,)), Lenity(np.random.default_rng(3)), np.random.default_rng(4))[0]
    assert min(seconds) / 0.85 > took > min(seconds)
    assert took < seconds[0] / 2


def test_figures_say_who_wins_where() -> None:
    """On a useless draft Lenity beats the schedule that always drafts; a clairvoyant is never beaten."""
    found = figures(play(1500, 1, ["useless draft", "step"]))
    assert found["traces"] == 2
    assert "useless draft" not in found["losses"]["heuristic"]
    assert found["wins"]["heuristic"] >= 1
    assert found["worst_segment"] <= found["mean_fraction_of_clairvoyant"] <= 1
    assert found["never_slower_than_plain"] <= 1.05
    assert found["means"]["plain"] < found["means"]["lenity"]
