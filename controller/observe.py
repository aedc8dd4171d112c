"""Takes the records of one batch in: blocks together, everything else one by one; one that fails stops no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from controller.ingest import Batch
from controller.merge import merged, sample
from controller.rollup import Rollup
from controller.steer import ClassSteer
from storage.records import ForkRecord, QualityScore, Record, RequestRecord, TokenBlock

log = structlog.get_logger(__name__)


class Observer:
    """Hands records to the classes of a pool. `set_aside` is told of entries that cannot be handled."""

    def __init__(self, pool: str, set_aside: Callable[[str, Record, str], None]):
        self.pool, self._set_aside = pool, set_aside
        self.failures = 0

    def take_in(self, batch: Batch, steer: Callable[[str], ClassSteer], rollup: Rollup, now: float) -> None:
        """Let every record of `batch` count, in the class that `steer` gives for its name."""
        blocks: dict[str, list[TokenBlock]] = {}
        entries: dict[int, str] = {}
        for entry_id, record in zip(batch.entries, batch.records, strict=True):
            if isinstance(record, TokenBlock):
                blocks.setdefault(record.traffic_class, []).append(record)
                entries[id(record)] = entry_id
            else:
                self._attempt(lambda r=record: _other(steer(r.traffic_class), r, now), record, entry_id)
        for score in batch.conflicts:
            steer(score.traffic_class).governor.note("conflicting_score")
        for name, of_class in blocks.items():
            chosen, others = sample(of_class)
            for block in others:
                self._attempt(lambda b=block, n=name: steer(n).count_block(b, now), block, entries[id(block)])
            for several in merged(chosen):
                try:
                    steer(name).observe_block(several, now)
                except Exception:
                    log.exception("blocks cannot be handled together", pool=self.pool)
                    for block in [b for b in chosen if (b.worker, b.boot) == (several.worker, several.boot)]:
                        self._attempt(lambda b=block, n=name: steer(n).observe_block(b, now), block, entries[id(block)])
            for block in of_class:
                rollup.add(block, now, steer(name).policy.traffic_class)

    def _attempt(self, handle: Callable[..., Any], record: Record, entry_id: str) -> None:
        try:
            handle()
        except Exception as e:
            self.failures += 1
            log.exception("an entry cannot be handled", pool=self.pool, entry=entry_id)
            self._set_aside(entry_id, record, f"the handler failed: {type(e).__name__}: {e}")


def _other(steer: ClassSteer, record: RequestRecord | ForkRecord | QualityScore, now: float) -> None:
    if isinstance(record, RequestRecord):
        steer.observe_request(record, now)
    elif isinstance(record, ForkRecord):
        steer.observe_fork(record, now)
    else:
        steer.observe_score(record, now)
