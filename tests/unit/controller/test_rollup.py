"""Minutes of telemetry against counting one by one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from controller.rollup import Rollup
from storage.records import ACCEPTED, EXAMINED, PINNED, TOUCH, TokenBlock
from storage.rows import RoundRow, TokenRow
from tests.support_storage import a_block

MINUTE = 1_800_000_000.0


def a_mixed_block(seq: int, **changes: Any) -> TokenBlock:
    """Rounds of one to forty rows with random flags; every eighth position is deeper than any block should be."""
    rng = np.random.default_rng(seq)
    positions = 96
    values = {
        "round_rows": rng.integers(1, 41, 12).astype(np.uint16),
        "round_prefill": rng.integers(0, 5, 12).astype(np.uint32),
        "flags": rng.integers(0, 16, positions).astype(np.uint8),
        "theta": rng.random(positions, np.float32),
        "position": np.where(np.arange(positions) % 8 == 7, 200, np.arange(positions) % 8 + 1).astype(np.uint8),
    }
    return a_block(seq=seq, positions=positions, **(values | changes))


def by_hand(blocks: list[TokenBlock]) -> tuple[dict[tuple[int, int], list[float]], dict[int, list[float]]]:
    """The same sums, one position and one round at a time."""
    tokens: dict[tuple[int, int], list[float]] = {}
    rounds: dict[int, list[float]] = {}
    for block in blocks:
        buckets = [next((b for b in (1, 2, 4, 8, 16, 32) if rows <= b), 32) for rows in block.round_rows]
        for r, bucket in enumerate(buckets):
            drafted = int((block.round == r).sum())
            counts = [1, block.round_rows[r], drafted, block.round_emitted[r], block.round_prefill[r]]
            times = [block.round_draft_s[r], block.round_verify_s[r], block.round_overhead_s[r]]
            old = rounds.get(bucket, [0.0] * 8)
            rounds[bucket] = [a + float(b) for a, b in zip(old, [*counts, *times], strict=True)]
        for i in range(block.position.size):
            key = (buckets[block.round[i]], min(int(block.position[i]), 64))
            counts = [1, *(bool(block.flags[i] & bit) for bit in (EXAMINED, ACCEPTED, TOUCH, PINNED))]
            old = tokens.get(key, [0.0] * 7)
            added = [*counts, block.theta[i], block.tv[i]]
            tokens[key] = [a + float(b) for a, b in zip(old, added, strict=True)]
    return tokens, rounds


def test_sums_are_those_of_counting_one_by_one() -> None:
    """Per bucket and position, and per bucket; more blocks than are summed at once."""
    rollup, blocks = Rollup("chat"), [a_mixed_block(n) for n in range(70)]
    for n, block in enumerate(blocks):
        rollup.add(block, MINUTE + n / 2)
    rows = rollup.take(MINUTE + 60)
    tokens, rounds = by_hand(blocks)
    found_tokens = {(r.bucket, r.position): list(vars(r).values())[5:] for r in rows if isinstance(r, TokenRow)}
    found_rounds = {r.bucket: list(vars(r).values())[4:] for r in rows if isinstance(r, RoundRow)}
    assert set(found_tokens) == set(tokens)
    assert {position for _, position in tokens} == {1, 2, 3, 4, 5, 6, 7, 64}
    for key, values in tokens.items():
        assert found_tokens[key] == pytest.approx(values, rel=1e-9)
    assert set(found_rounds) == set(rounds)
    for bucket, values in rounds.items():
        assert found_rounds[bucket] == pytest.approx(values, rel=1e-6)
    assert all(
        type(r.drafted) is int and (r.pool, r.traffic_class, r.time) == ("chat", "default", MINUTE) for r in rows
    )


def test_a_minute_is_given_out_once_when_it_is_over() -> None:
    """The current one waits."""
    rollup = Rollup("chat")
    rollup.add(a_block(seq=1), MINUTE + 59.9)
    assert rollup.take(MINUTE + 59.99) == []
    rollup.add(a_block(seq=2), MINUTE + 60)
    first = rollup.take(MINUTE + 60)
    assert {row.time for row in first} == {MINUTE}
    assert rollup.take(MINUTE + 60) == []
    second = rollup.take(MINUTE + 200)
    assert {row.time for row in second} == {MINUTE + 60}
    assert sum(r.drafted for r in (*first, *second) if isinstance(r, TokenRow)) == 16


def test_classes_are_kept_apart_and_can_be_counted_for_another() -> None:
    """Beyond the bound on classes traffic counts under `default`."""
    rollup = Rollup("chat")
    rollup.add(a_block(traffic_class="code"), MINUTE)
    rollup.add(a_block(traffic_class="one-too-many"), MINUTE, "default")
    assert {r.traffic_class for r in rollup.take(MINUTE + 60)} == {"code", "default"}


def test_a_successor_goes_on_with_the_same_minute() -> None:
    """Through JSON, at any block: the rows are the same as without a restart."""
    whole, blocks = Rollup("chat"), [a_mixed_block(n) for n in range(4)]
    for block in blocks:
        whole.add(block, MINUTE)
    first = Rollup("chat")
    for block in blocks[:2]:
        first.add(block, MINUTE)
    second = Rollup.from_state("chat", json.loads(json.dumps(first.to_state())))
    for block in blocks[2:]:
        second.add(block, MINUTE + 1)
    for a, b in zip(whole.take(MINUTE + 60), second.take(MINUTE + 60), strict=True):
        assert list(vars(a).values())[:5] == list(vars(b).values())[:5]
        assert list(vars(a).values())[5:] == pytest.approx(list(vars(b).values())[5:], rel=1e-12)
    assert Rollup.from_state("chat", {}).take(MINUTE + 60) == []


def test_plain_rounds_draft_nothing() -> None:
    """A block without positions still counts its rounds."""
    rollup = Rollup("chat")
    empty = {name: np.zeros(0, dtype) for name, dtype in TokenBlock.POSITION_COLUMNS.items()}
    rollup.add(a_block(positions=8, **empty), MINUTE)
    [row] = rollup.take(MINUTE + 60)
    assert isinstance(row, RoundRow)
    assert (row.rounds, row.drafted, row.emitted) == (1, 0, 5)
