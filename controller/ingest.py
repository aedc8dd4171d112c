"""From stream entries to checked records: each once, bad ones set aside.

Telemetry reaches the stream at least once: a retried append can repeat an entry, and after a crash the entries since
the last saved tick come again. Blocks are told apart by (worker, boot, seq): a number above the highest so far is new,
and so is one that was missing, once. The other records are told apart by what they are about.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from storage.errors import SampleError, StorageError
from storage.records import ForkRecord, QualityScore, Record, RequestRecord, TokenBlock, from_fields
from storage.stream import newer_id

_KEPT_KEYS = 20_000
_SAVED_KEYS = 2_000
_KEPT_BOOTS = 4096
_KEPT_GAPS = 32  # stretches of missing numbers remembered of one boot


class Source(Protocol):
    """The reading end of a telemetry stream (`storage.stream.StreamReader`)."""

    careful: bool  # what was read last is to be saved and acknowledged before more is read
    set_aside: list[str]  # why the source itself set entries aside

    def read(self, max_entries: int = ..., block_ms: int = ...) -> list[tuple[str, dict[bytes, bytes]]]: ...
    def dead_letter(self, entry_id: str, fields: Mapping[bytes, bytes], reason: str) -> None: ...


@dataclass
class Batch:
    """What one drain brought: records in stream order with the entries they were, the ids to acknowledge once they are
    saved (duplicates too), counts, and what ended it early."""

    records: list[Record] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    last_id: str | None = None
    duplicates: int = 0
    conflicts: list[QualityScore] = field(default_factory=list)  # repeated with another value; the first one counts
    dead: list[str] = field(default_factory=list)
    gaps: int = 0
    trouble: str | None = None


class Boot:
    """The block numbers seen of one start of one worker: first, highest, and the stretches between that are missing."""

    def __init__(self, first: int, last: int, missing: Iterable[Sequence[int]] = ()):
        self.first, self.last = first, last
        self.missing = [(int(a), int(b)) for a, b in missing]

    def take(self, seq: int) -> int | None:
        """How many more numbers are missing now that `seq` was seen (-1 for one that was missing); None for a repeat.

        What is below the first number seen may still come, and was never counted as missing.
        """
        if seq > self.last:
            skipped = seq - self.last - 1
            if skipped:
                self.missing.append((self.last + 1, seq - 1))
                del self.missing[:-_KEPT_GAPS]
            self.last = seq
            return skipped
        for i, (begin, end) in enumerate(self.missing):
            if begin <= seq <= end:
                rest = [(begin, seq - 1), (seq + 1, end)]
                self.missing[i : i + 1] = [(a, b) for a, b in rest if a <= b]
                return -1 if seq > self.first else 0
        return None


class Deduplicator:
    """Remembers what was already counted, in bounded memory.

    `gaps` is how many block numbers are missing so far: dropped by workers, trimmed, or still to come. What was sent
    before the first block that was seen of a boot does not count as missing.
    """

    def __init__(self) -> None:
        self._boots: OrderedDict[tuple[str, str], Boot] = OrderedDict()
        self._keys: OrderedDict[str, float | None] = OrderedDict()  # with the value of a score
        self.gaps = 0

    def is_new(self, record: Record) -> bool:
        """True the first time a record is seen."""
        if isinstance(record, TokenBlock):
            name = (record.worker, record.boot)
            boot = self._boots.get(name)
            if boot is None:
                earlier = [(0, record.seq - 1)] if record.seq else []
                self._boots[name] = Boot(record.seq, record.seq, earlier)
            else:
                missing = boot.take(record.seq)
                if missing is None:
                    return False
                self.gaps += missing
            self._boots.move_to_end(name)
            while len(self._boots) > _KEPT_BOOTS:
                self._boots.popitem(last=False)
            return True
        key = _key(record)
        if key in self._keys:
            return False
        self._keys[key] = record.score if isinstance(record, QualityScore) else None
        while len(self._keys) > _KEPT_KEYS:
            self._keys.popitem(last=False)
        return True

    def disagrees(self, score: QualityScore) -> bool:
        """Whether a repeated score had another value the first time."""
        return self._keys.get(_key(score)) not in (None, score.score)

    def to_state(self) -> dict[str, Any]:
        """A JSON-able state; the newest keys only, since older ones cannot be repeated by a retry."""
        return {
            "boots": [[*name, boot.first, boot.last, boot.missing] for name, boot in self._boots.items()],
            "keys": list(self._keys)[-_SAVED_KEYS:],
            "values": list(self._keys.values())[-_SAVED_KEYS:],
            "gaps": self.gaps,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Deduplicator:
        """The deduplicator that wrote `state`."""
        self = cls()
        for worker, boot, *numbers in state["boots"]:
            first, last, missing = numbers if len(numbers) == 3 else (numbers[0], numbers[0], ())  # an older state
            self._boots[worker, boot] = Boot(first, last, missing)
        keys = state["keys"]
        self._keys.update(zip(keys, state.get("values", [None] * len(keys)), strict=True))
        self.gaps = int(state.get("gaps", 0))
        return self


def drain(source: Source, seen: Deduplicator, pool: str, *, limit: int = 5000) -> Batch:
    """Read what is waiting (at most `limit` entries), check it, drop duplicates, set bad entries aside.

    A stream that goes away meanwhile ends the batch: what was read before counts, since it will not be given out again.
    Raises StorageError when nothing could be read.
    """
    batch = Batch()
    gaps = seen.gaps
    while len(batch.ids) + len(batch.dead) < limit:
        try:
            entries = source.read(max_entries=min(1000, limit))
        except StorageError as e:
            if not batch.ids and not batch.dead:
                raise
            batch.trouble = str(e)
            break
        batch.dead += source.set_aside
        source.set_aside.clear()
        for entry_id, fields in entries:
            batch.last_id = newer_id(batch.last_id, entry_id)
            try:
                record = from_fields(fields)
                if record.pool != pool:
                    raise SampleError(f"entry of pool {record.pool!r} on the stream of {pool!r}")
            except SampleError as e:
                batch.dead.append(str(e))
                try:
                    source.dead_letter(entry_id, fields, str(e))
                except StorageError as away:
                    batch.trouble = str(away)
                continue
            batch.ids.append(entry_id)
            if seen.is_new(record):
                batch.records.append(record)
                batch.entries.append(entry_id)
            else:
                batch.duplicates += 1
                if isinstance(record, QualityScore) and seen.disagrees(record):
                    batch.conflicts.append(record)
        if not entries or source.careful:
            break
    batch.gaps = seen.gaps - gaps
    return batch


def by_kind(
    records: Iterable[Record],
) -> tuple[list[TokenBlock], list[RequestRecord], list[ForkRecord], list[QualityScore]]:
    """Records sorted into blocks, requests, forks and scores, each in stream order."""
    kinds: dict[type[Record], list[Any]] = {TokenBlock: [], RequestRecord: [], ForkRecord: [], QualityScore: []}
    for record in records:
        kinds[type(record)].append(record)
    return kinds[TokenBlock], kinds[RequestRecord], kinds[ForkRecord], kinds[QualityScore]


def _key(record: RequestRecord | ForkRecord | QualityScore) -> str:
    if isinstance(record, QualityScore):
        return f"score {record.request_id} {record.branch} {record.metric} {record.scorer_version}"
    return f"{record.KIND} {record.request_id}"
