"""Blocks put together, and an even choice of them."""

from __future__ import annotations

import numpy as np
import pytest

from controller.estimate import CurveEstimator
from controller.merge import joined, merged, sample
from storage.records import TokenBlock
from tests.support_storage import a_block


def blocks(count: int, positions: int = 32) -> list[TokenBlock]:
    return [a_block(seq=n, positions=positions, worker=f"w{n % 3}") for n in range(count)]


def test_merged_blocks_hold_the_same_rounds_in_order() -> None:
    """One for each worker; nothing else of a block is lost."""
    given = blocks(7)
    made = merged(given)
    assert [b.worker for b in made] == ["w0", "w1", "w2"]
    for worker in made:
        own = [b for b in given if b.worker == worker.worker]
        for name in (*TokenBlock.ROUND_COLUMNS, *TokenBlock.POSITION_COLUMNS):
            if name != "round":
                assert np.array_equal(getattr(worker, name), np.concatenate([getattr(b, name) for b in own]))
        assert np.array_equal(worker.round, np.arange(len(worker.theta)) // 8)
        TokenBlock.from_fields(worker.to_fields())


@pytest.mark.parametrize(
    "change", [{"epoch": 2}, {"lease_seq": 2}, {"rule": "threshold"}, {"rho": 0.5}, {"boot": "b2"}]
)
def test_what_was_decoded_under_other_terms_stays_apart(change: dict[str, object]) -> None:
    """A merged block has one head."""
    assert len(merged([a_block(seq=1), a_block(seq=2, **change), a_block(seq=3)])) == 2


def test_a_merged_block_gives_the_curve_of_its_parts() -> None:
    """Within the weight that age takes inside a block."""
    given = [a_block(seq=n, positions=256) for n in range(16)]
    apart, together = (CurveEstimator("token_v3", 8, half_life_rounds=1e9) for _ in range(2))
    for block in given:
        apart.add(block)
    together.add(joined(given))
    assert apart.rounds_effective == pytest.approx(together.rounds_effective)
    assert np.allclose(apart.curve().reach, together.curve().reach, atol=1e-6)


def test_few_blocks_all_count() -> None:
    """Nothing is left out at ordinary rates."""
    given = blocks(10)
    assert sample(given, most_rounds=40) == (given, [])


def test_of_many_blocks_an_even_share_is_chosen() -> None:
    """About as many rounds as asked for, from everywhere, and as often from each worker."""
    given = blocks(3000)
    chosen, others = sample(given, most_rounds=1200)
    assert len(chosen) == 300
    assert sorted(b.seq for b in [*chosen, *others]) == list(range(3000))
    seqs = np.array([b.seq for b in chosen])
    assert np.all(np.bincount(seqs // 300, minlength=10) == 30)
    assert np.all(np.abs(np.bincount(seqs % 3) - 100) <= 15), "no worker is favoured by a period"
