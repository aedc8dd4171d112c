"""Entries that a consumer group was given and never acknowledged: taken over from consumers that are gone, and handed
out with care, since one of them may be what ended the last reader.

An entry that ends its reader is delivered again after each restart. So what was delivered before comes in batches that
shrink with the number of deliveries (1000, 100, 10, 1), each to be saved and acknowledged before the next one. An entry
that was delivered too often is set aside, and the good ones around it flow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

import redis

RawEntry = tuple[str, dict[bytes, bytes] | None]  # no fields: deleted while it was pending

_BATCH = {1: 1000, 2: 100, 3: 10}  # entries at a time by how often they were delivered before; else one
_LATE_BATCH = 500  # entries of other consumers at a time: fewer than a snapshot remembers one by one
_ASKED = 1000


@dataclass(frozen=True)
class Step:
    """Entries to hand out now. `careful`: before any other; `condemned`: the only one was delivered too often."""

    entries: list[RawEntry]
    careful: bool = False
    condemned: bool = False


class Pending:
    """The unacknowledged entries of one group, as the group's consumer `consumer` sees them."""

    def __init__(self, client: redis.Redis, key: str, group: str, consumer: str, max_deliveries: int):
        self._client, self._key, self._group, self._consumer = client, key, group, consumer
        self._max = max_deliveries
        # What was another consumer's waits under a name of its own: the reader's position says nothing about it.
        self._late = f"{consumer}.late"
        self._given: set[str] = set()  # of these, handed out and not acknowledged yet
        self.late_waiting = True

    def take_over(self, idle_s: float) -> None:
        """Claim what other consumers hold that have been idle for `idle_s` seconds; forget those that hold nothing."""
        least = int(idle_s * 1000)
        for found in self._client.xinfo_consumers(self._key, self._group):
            name = found["name"].decode()
            if name in (self._consumer, self._late) or found["idle"] < least:
                continue
            while held := self._range("-", name, _ASKED):
                ids: Any = [entry_id for entry_id, _ in held]
                if not self._client.xclaim(self._key, self._group, self._late, least, ids, justid=True):
                    break
                self.late_waiting = True
            else:
                self._client.xgroup_delconsumer(self._key, self._group, name)

    def own(self, after: str, limit: int) -> Step:
        """The consumer's own entries after the id `after`, oldest first."""
        return self._step(self._consumer, self._range(f"({after}", self._consumer, min(limit, _ASKED)))

    def late(self, limit: int) -> Step:
        """Entries that were other consumers', oldest first, each once until it is acknowledged."""
        held = self._range("-", self._late, _ASKED)
        fresh = [found for found in held if found[0] not in self._given]
        step = self._step(self._late, fresh[: min(limit, _LATE_BATCH)])
        self._given.update(entry_id for entry_id, _ in step.entries)
        self.late_waiting = bool(held)
        return step

    def done(self, ids: Iterable[str]) -> None:
        """These were acknowledged."""
        if self._given:
            self._given.difference_update(ids)

    def ack_up_to(self, last: str) -> None:
        """Acknowledge the consumer's own entries up to the id `last`."""
        while held := self._range("-", self._consumer, _ASKED, last):
            ids = [entry_id for entry_id, _ in held]
            self._client.xack(self._key, self._group, *ids)

    def forget(self) -> None:
        """The group is a new one, with nothing pending."""
        self._given.clear()

    def _range(self, start: str, consumer: str, count: int, end: str = "+") -> list[tuple[str, int]]:
        """(id, deliveries) of a consumer's pending entries from `start` to `end`."""
        found = self._client.xpending_range(self._key, self._group, start, end, count, consumername=consumer)
        return [(p["message_id"].decode(), int(p["times_delivered"])) for p in cast("list[dict[str, Any]]", found)]

    def _step(self, consumer: str, held: list[tuple[str, int]]) -> Step:
        if not held:
            return Step([])
        deliveries = held[0][1]
        condemned = deliveries >= self._max
        at_once = 1 if condemned else _BATCH.get(max(1, deliveries), 1)
        # Up to the first one that was delivered more often: none is passed over.
        ids: Any = [entry_id for entry_id, n in takewhile(lambda h: h[1] <= deliveries, held[:at_once])]
        reply = self._client.xclaim(self._key, self._group, consumer, 0, ids)
        fields = {entry_id.decode(): values for entry_id, values in cast("Any", reply) if entry_id is not None}
        return Step([(i, fields.get(i) or None) for i in ids], careful=deliveries > 1, condemned=condemned)
