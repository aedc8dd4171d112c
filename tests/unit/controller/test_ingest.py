"""From stream entries to records: each once, bad ones set aside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from controller.ingest import Deduplicator, by_kind, drain
from storage.errors import StorageError
from storage.records import QualityScore, RequestRecord, TokenBlock, to_fields


class ListSource:
    """Hands out prepared entries in batches and remembers what was set aside."""

    def __init__(self, *batches: list[tuple[str, dict[bytes, bytes]]]):
        self.batches = list(batches)
        self.dead: list[tuple[str, str]] = []
        self.careful, self.set_aside = False, list[str]()

    def read(self, max_entries: int = 100, block_ms: int = 0) -> list[tuple[str, dict[bytes, bytes]]]:
        return self.batches.pop(0) if self.batches else []

    def dead_letter(self, entry_id: str, fields: Mapping[bytes, bytes], reason: str) -> None:
        self.dead.append((entry_id, reason))


def block(seq: int, boot: str = "b1") -> TokenBlock:
    rounds = {name: np.ones(1, dtype) for name, dtype in TokenBlock.ROUND_COLUMNS.items()}
    positions = {name: np.zeros(2, dtype) for name, dtype in TokenBlock.POSITION_COLUMNS.items()}
    positions["position"] = np.array([1, 2], np.uint8)
    return TokenBlock("p", "default", "w1", boot, seq, 1, 1, "threshold", 1.0, **(rounds | positions))


def score(request_id: str = "r1", branch: str = "served") -> QualityScore:
    return QualityScore(request_id, "p", "default", branch, "m", 1.0, "s", "1", 5.0)  # type: ignore[arg-type]


def test_a_repeated_block_is_counted_once_and_a_new_boot_starts_afresh() -> None:
    """Duplicates share (worker, boot, seq); a restarted worker numbers its blocks from zero again."""
    source = ListSource(
        [(f"{i}-0", to_fields(b)) for i, b in enumerate([block(0), block(1), block(1), block(0, "b2")])]
    )
    batch = drain(source, Deduplicator(), "p")
    assert [(r.boot, r.seq) for r in by_kind(batch.records)[0]] == [("b1", 0), ("b1", 1), ("b2", 0)]
    assert batch.duplicates == 1
    assert batch.ids == ["0-0", "1-0", "2-0", "3-0"], "a duplicate is acknowledged too"


def test_missing_block_numbers_are_counted() -> None:
    """What a worker had to drop shows as a gap."""
    source = ListSource([("1-0", to_fields(block(3))), ("2-0", to_fields(block(7)))])
    assert drain(source, Deduplicator(), "p").gaps == 3


def test_a_block_that_was_missing_counts_once_when_it_comes_late() -> None:
    """Entries of a reader that is gone are taken over late and out of order; a repeat of them is still a repeat."""
    order = [2, 7, 4, 4, 0, 7, 3, 1, 0]
    source = ListSource([(f"{i}-0", to_fields(block(seq))) for i, seq in enumerate(order)])
    seen = Deduplicator()
    batch = drain(source, seen, "p")
    assert [r.seq for r in by_kind(batch.records)[0]] == [2, 7, 4, 0, 3, 1]
    assert batch.duplicates == 3
    assert seen.gaps == 2, "5 and 6 are missing; what came before the first one seen never counted as missing"
    assert not Deduplicator.from_state(json.loads(json.dumps(seen.to_state()))).is_new(block(4))
    assert Deduplicator.from_state(json.loads(json.dumps(seen.to_state()))).is_new(block(5))


def test_the_newest_position_is_kept_when_older_entries_come_late() -> None:
    """The position saved with the state never goes back."""
    source = ListSource(
        [("9-0", to_fields(block(9)))], [("10-1", to_fields(block(10)))], [("3-0", to_fields(block(3)))]
    )
    assert drain(source, Deduplicator(), "p").last_id == "10-1"


def test_entries_to_be_careful_with_are_alone_in_a_drain() -> None:
    """They are saved and acknowledged before anything else is read."""
    source = ListSource([("1-0", to_fields(block(1)))], [("2-0", to_fields(block(2)))])
    source.careful, source.set_aside = True, ["it killed the reader"]
    batch = drain(source, Deduplicator(), "p")
    assert batch.ids == ["1-0"]
    assert batch.dead == ["it killed the reader"]


def test_what_was_read_before_the_stream_went_away_counts() -> None:
    """It is marked as seen and will not be given out again; only a drain that read nothing fails."""
    away = StorageError("connection reset")

    class Dying(ListSource):
        def read(self, max_entries: int = 100, block_ms: int = 0) -> list[tuple[str, dict[bytes, bytes]]]:
            if not self.batches:
                raise away
            return self.batches.pop(0)

        def dead_letter(self, entry_id: str, fields: Mapping[bytes, bytes], reason: str) -> None:
            raise away

    batch = drain(
        Dying([("1-0", to_fields(block(1))), ("2-0", {b"x": b"y"}), ("3-0", to_fields(block(2)))]), Deduplicator(), "p"
    )
    assert [r.seq for r in by_kind(batch.records)[0]] == [1, 2]
    assert (batch.ids, batch.last_id, batch.trouble) == (["1-0", "3-0"], "3-0", "connection reset")
    with pytest.raises(StorageError):
        drain(Dying(), Deduplicator(), "p")


def test_bad_entries_are_set_aside_and_good_ones_flow() -> None:
    """Garbage, a score of 1.2 and another pool's entry do not stop the loop."""
    bad_score = to_fields(score("r2"))
    bad_score[b"head"] = json.dumps(json.loads(bad_score[b"head"]) | {"score": 1.2}).encode()
    other_pool = to_fields(replace(score("r3"), pool="q"))
    source = ListSource([("1-0", {b"x": b"y"}), ("2-0", bad_score), ("3-0", other_pool), ("4-0", to_fields(score()))])
    batch = drain(source, Deduplicator(), "p")
    assert [r.request_id for r in by_kind(batch.records)[3]] == ["r1"]
    assert [entry_id for entry_id, _ in source.dead] == ["1-0", "2-0", "3-0"]
    assert "[0, 1]" in source.dead[1][1]
    assert batch.last_id == "4-0"


def test_both_branches_of_a_request_are_different_labels() -> None:
    """A label is told apart by request, branch, metric and scorer version."""
    source = ListSource(
        [("1-0", to_fields(score())), ("2-0", to_fields(score(branch="fork"))), ("3-0", to_fields(score()))]
    )
    assert len(drain(source, Deduplicator(), "p").records) == 2


def test_a_repeat_with_another_value_is_told_apart() -> None:
    """The first value counts; the second is a duplicate that disagrees, also after a restart."""
    other = replace(score(), score=1 - score().score)
    seen = Deduplicator()
    batch = drain(ListSource([("1-0", to_fields(score())), ("2-0", to_fields(other))]), seen, "p")
    assert batch.records == [score()] and batch.conflicts == [other] and batch.duplicates == 1
    restored = Deduplicator.from_state(json.loads(json.dumps(seen.to_state())))
    assert restored.disagrees(other) and not restored.disagrees(score())


def test_what_was_seen_survives_a_restart() -> None:
    """A saved and restored deduplicator still refuses what it had counted."""
    seen = Deduplicator()
    assert seen.is_new(block(4))
    assert seen.is_new(score())
    restored = Deduplicator.from_state(json.loads(json.dumps(seen.to_state())))
    assert not restored.is_new(block(4))
    assert not restored.is_new(score())
    assert restored.is_new(block(5))


def test_a_drain_is_bounded() -> None:
    """One tick does not read for ever."""
    request = RequestRecord(
        "r", "p", "default", "w", "b", 1, 1, "threshold", 0.0, 0.0, "untouched", 0.0, 0.0, 0.0, False, False, 0, None,
        1.0, 3, 3, 3, 0.1, 0.2, "stop",
    )  # fmt: skip
    batches = [
        [(f"{n}-{i}", to_fields(replace(request, request_id=f"r{n}-{i}"))) for i in range(50)] for n in range(10)
    ]
    assert len(drain(ListSource(*batches), Deduplicator(), "p", limit=100).records) == 100
