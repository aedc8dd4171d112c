"""From stream entries to checked records: each once, bad ones set aside.

Telemetry reaches the stream at least once: a retried append can repeat an entry, and after a crash the entries since
the last saved tick come again. Blocks are told apart by (worker, boot, seq), which only grows; the other records by
what they are about.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from storage.errors import SampleError
from storage.records import ForkRecord, QualityScore, Record, RequestRecord, TokenBlock, from_fields

_KEPT_KEYS = 20_000
_SAVED_KEYS = 2_000
_KEPT_BOOTS = 256


class Source(Protocol):
    """The reading end of a telemetry stream (`storage.stream.StreamReader`)."""

    def read(self, max_entries: int = ..., block_ms: int = ...) -> list[tuple[str, dict[bytes, bytes]]]: ...
    def dead_letter(self, entry_id: str, fields: Mapping[bytes, bytes], reason: str) -> None: ...


@dataclass
class Batch:
    """What one drain brought: records in stream order, the ids to acknowledge once they are saved, and counts."""

    records: list[Record] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    last_id: str | None = None
    duplicates: int = 0
    dead: list[str] = field(default_factory=list)
    gaps: int = 0


class Deduplicator:
    """Remembers what was already counted, in bounded memory."""

    def __init__(self) -> None:
        self._last_seq: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._keys: OrderedDict[str, None] = OrderedDict()
        self.gaps = 0

    def is_new(self, record: Record) -> bool:
        """True the first time a record is seen. A gap in a worker's block numbers is counted in `gaps`."""
        if isinstance(record, TokenBlock):
            boot = (record.worker, record.boot)
            last = self._last_seq.get(boot, -1)
            if record.seq <= last:
                return False
            self.gaps += record.seq - last - 1 if last >= 0 else 0
            self._last_seq[boot] = record.seq
            self._last_seq.move_to_end(boot)
            while len(self._last_seq) > _KEPT_BOOTS:
                self._last_seq.popitem(last=False)
            return True
        key = _key(record)
        if key in self._keys:
            return False
        self._keys[key] = None
        while len(self._keys) > _KEPT_KEYS:
            self._keys.popitem(last=False)
        return True

    def to_state(self) -> dict[str, Any]:
        """A JSON-able state; the newest keys only, since older ones cannot be repeated by a retry."""
        return {
            "boots": [[worker, boot, seq] for (worker, boot), seq in self._last_seq.items()],
            "keys": list(self._keys)[-_SAVED_KEYS:],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Deduplicator:
        """The deduplicator that wrote `state`."""
        self = cls()
        self._last_seq.update({(worker, boot): seq for worker, boot, seq in state["boots"]})
        self._keys.update(dict.fromkeys(state["keys"]))
        return self


def drain(source: Source, seen: Deduplicator, pool: str, *, limit: int = 5000) -> Batch:
    """Read what is waiting (at most `limit` entries), check it, drop duplicates, set bad entries aside.

    Raises StorageError when the stream cannot be read; nothing is lost then, the entries stay pending.
    """
    batch = Batch()
    gaps = seen.gaps
    while len(batch.ids) + len(batch.dead) < limit:
        entries = source.read(max_entries=min(1000, limit))
        if not entries:
            break
        for entry_id, fields in entries:
            batch.last_id = entry_id
            try:
                record = from_fields(fields)
                if record.pool != pool:
                    raise SampleError(f"entry of pool {record.pool!r} on the stream of {pool!r}")
            except SampleError as e:
                source.dead_letter(entry_id, fields, str(e))
                batch.dead.append(str(e))
                continue
            batch.ids.append(entry_id)
            if seen.is_new(record):
                batch.records.append(record)
            else:
                batch.duplicates += 1
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
