"""Telemetry streams over Redis >= 7 or Valkey >= 8.

    worker:      StreamWriter.append -> stream -> StreamReader.read, then .ack      :controller
                 LeaseStore.read     <- lease  <- LeaseStore.write                  (storage.leases)

Delivery is at least once: an append that is tried again can repeat an entry, and entries that were read but not
acknowledged come again after a restart, whatever name the consumer has then (storage.pending).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import redis

from storage.connection import attempt, connect, dead_key, fence_key, lease_key, telemetry_key
from storage.errors import SampleError, StorageError
from storage.leases import LeaseStore
from storage.pending import Pending, RawEntry
from storage.records import Record, to_fields

__all__ = [
    "LeaseStore",
    "StreamReader",
    "StreamWriter",
    "connect",
    "dead_key",
    "fence_key",
    "lease_key",
    "newer_id",
    "telemetry_key",
]

Entry = tuple[str, dict[bytes, bytes]]

MAX_BLOCK_MS = 1000
DEAD_LETTERS = 1000
_TRIM_EVERY_S = 1.0
_MAX_DEAD_VALUE = 32_768
_ID = re.compile(r"(\d+)(?:-(\d+))?\Z")


class StreamWriter:
    """The worker's end of a pool's telemetry stream.

    The stream is capped at about `maxlen` entries and about `max_bytes`, whichever is less, so that a controller that
    is away does not fill the server; the reader counts what was trimmed unread.
    """

    def __init__(self, client: redis.Redis, pool: str, maxlen: int = 100_000, *, max_bytes: int = 512 << 20):
        if maxlen < 1 or max_bytes < 1:
            raise ValueError("maxlen and max_bytes must be positive")
        self._client, self._key = client, telemetry_key(pool)
        self._maxlen, self._max_bytes = maxlen, max_bytes
        self._mean_bytes = 0.0

    def append(self, records: Sequence[Record]) -> int:
        """Append in order in one round trip; returns how many were appended.

        Raises SampleError before anything is sent when a record cannot be written (a number is not finite), and
        StorageError when the server is unreachable or refuses; then some may have been appended, and sending the same
        records again is safe because readers drop repeats.
        """
        try:
            entries = [to_fields(record) for record in records]
        except (ValueError, TypeError, OverflowError) as e:
            raise SampleError(f"a record cannot be written: {e}") from e
        if not entries:
            return 0
        size = sum(len(k) + len(v) for entry in entries for k, v in entry.items()) / len(entries)
        self._mean_bytes = size if self._mean_bytes == 0 else 0.9 * self._mean_bytes + 0.1 * size
        maxlen = max(1, min(self._maxlen, int(self._max_bytes / self._mean_bytes)))

        def send() -> list[Any]:
            with self._client.pipeline(transaction=False) as pipe:
                for entry in entries:
                    pipe.xadd(self._key, cast("dict[Any, Any]", entry), maxlen=maxlen, approximate=True)
                return pipe.execute()

        return len(attempt(send, f"append to {self._key}"))


# -- reading -----------------------------------------------------------------------------------------------------------


class StreamReader:
    """The controller's end: a consumer group that acknowledges what has been saved.

    Entries stay on the stream for `keep_s` seconds, and for as long as a group needs them. `lost` counts entries that
    were trimmed or deleted before this group read them, as well as the server's counters can tell. One reader at a time
    works for a group; what consumers of other names hold is taken over at the start, and later once they have been
    idle for `reclaim_s`. An entry that was delivered `max_deliveries` times and never acknowledged is set aside, and
    why is added to `set_aside`. Not safe for use by several threads at once.
    """

    def __init__(
        self,
        client: redis.Redis,
        pool: str,
        group: str = "controller",
        consumer: str = "controller",
        *,
        keep_s: float = 3600.0,
        reclaim_s: float = 60.0,
        max_deliveries: int = 10,
    ):
        self._keep_s, self._reclaim_s = keep_s, reclaim_s
        self._client, self._pool, self._key = client, pool, telemetry_key(pool)
        self._group, self._consumer = group, consumer
        self._pending = Pending(client, self._key, group, consumer, max_deliveries)
        self.lost = 0
        self.set_aside: list[str] = []
        self.careful = False  # whether what was read last must be saved and acknowledged before more is read
        self._catching_up = True  # there may be entries that an earlier reader was given
        self._next_reclaim = 0.0  # on the monotonic clock; 0 at the start: then nobody else has a right to any
        self._last = "0-0"  # newest id handed out
        self._last_fields: dict[bytes, bytes] | None = None  # and what it said
        self._floor = "0-0"  # ids up to here are in the caller's snapshot
        self._ordinal: int | None = None  # how many entries the stream ever had up to the group's position
        self._next_trim = 0.0

    def resume_from(self, last_id: str) -> None:
        """Entries with id <= `last_id` are acknowledged unseen: they are in the snapshot already.

        A stream that does not continue the one of `last_id` (the server lost that) is read from its start.
        """
        _parse_id(last_id)
        self._last, self._last_fields = "0-0", None
        self._floor = last_id if self._continues(last_id) else "0-0"

    def read(self, max_entries: int = 2000, block_ms: int = 0) -> list[Entry]:
        """The next entries in stream order, at most `max_entries`.

        First come those that were delivered but not acknowledged before (a restart, a lost reply, another consumer's:
        these may be older than what was read last), then new ones; when there are none of either it waits up to
        `block_ms` (at most 1000) for one. With `careful` set, acknowledge before the next read.

        A missing group is made again after the last id seen, so nothing is skipped. Raises StorageError.
        """
        if max_entries < 1:
            raise ValueError("max_entries must be positive")
        wait_ms = min(block_ms, MAX_BLOCK_MS)
        try:
            try:
                return self._read(max_entries, wait_ms)
            except redis.ResponseError as e:
                if not str(e).startswith("NOGROUP") and "no such key" not in str(e):
                    raise
            self._create_group()
            return self._read(max_entries, wait_ms)
        except redis.RedisError as e:
            raise StorageError(f"read {self._key}: {e}") from e

    def ack(self, ids: Iterable[str]) -> None:
        """Acknowledge entries that have been saved, and drop old ones that every group is done with."""
        wanted = list(ids)
        for start in range(0, len(wanted), 1000):
            chunk = wanted[start : start + 1000]
            attempt(partial(self._client.xack, self._key, self._group, *chunk), f"ack on {self._key}")
        self._pending.done(wanted)
        now = time.monotonic()
        if wanted and now >= self._next_trim:
            self._next_trim = now + _TRIM_EVERY_S
            attempt(self._trim, f"trim {self._key}")

    def ack_up_to(self, entry_id: str) -> None:
        """Acknowledge every entry up to this one that was handed out; for when there were too many to remember."""
        attempt(partial(self._pending.ack_up_to, entry_id), f"ack on {self._key}")

    def dead_letter(self, entry_id: str, fields: Mapping[bytes, bytes], reason: str) -> None:
        """Set an entry aside with the reason, on a capped stream, and acknowledge it."""
        kept: dict[Any, Any] = {k[:128]: v[:_MAX_DEAD_VALUE] for k, v in list(fields.items())[:64]}
        kept |= {b"_id": entry_id.encode(), b"_reason": reason[:1000].encode(errors="replace")}

        def move() -> list[Any]:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.xadd(dead_key(self._pool), kept, maxlen=DEAD_LETTERS, approximate=True)
                pipe.xack(self._key, self._group, entry_id)
                return pipe.execute()

        attempt(move, f"set aside an entry of {self._key}")

    def lag(self) -> int:
        """Entries on the stream that this group has not been given yet."""
        try:
            groups = self._client.xinfo_groups(self._key)
            group = next((g for g in groups if g["name"] == self._group.encode()), None)
            if group is not None and group.get("lag") is not None:
                return max(0, int(group["lag"]))
            info = self._client.xinfo_stream(self._key)
        except redis.RedisError as e:
            if isinstance(e, redis.ResponseError) and "no such key" in str(e):
                return 0
            raise StorageError(f"{self._key}: {e}") from e
        # The server cannot tell: the group was made in the middle of the stream and has not come to its end yet.
        return max(0, int(info["entries-added"]) - self._ordinal) if self._ordinal is not None else int(info["length"])

    # -- inside --------------------------------------------------------------------------------------------------------

    def _read(self, max_entries: int, block_ms: int) -> list[Entry]:
        self.careful = False
        if before := self._redelivered(max_entries):
            return before
        while True:
            raw = self._ask(max_entries)
            if not raw and block_ms > 0:
                raw = _entries(
                    self._client.xreadgroup(self._group, self._consumer, {self._key: ">"}, max_entries, block=block_ms)
                )
                self._ordinal = None if self._ordinal is None else self._ordinal + len(raw)
                block_ms = 0
            if not raw:
                return []
            if kept := self._keep(raw):
                return kept

    def _redelivered(self, max_entries: int) -> list[Entry]:
        """What earlier readers were given, this consumer's own first; empty when there is none (any more)."""
        while self._catching_up:
            step = self._pending.own(self._last, max_entries)
            if not step.entries:
                self._catching_up = False
            elif step.condemned and newer_id(self._floor, step.entries[0][0]) != self._floor:
                self._condemn(step.entries[0])
            elif kept := self._keep(step.entries):
                self.careful = step.careful
                return kept
        now = time.monotonic()
        if now >= self._next_reclaim:
            self._pending.take_over(self._reclaim_s if self._next_reclaim else 0.0)
            self._next_reclaim = now + self._reclaim_s
        while self._pending.late_waiting:
            step = self._pending.late(max_entries)
            if step.condemned:
                self._condemn(step.entries[0])
                continue
            gone = [entry_id for entry_id, fields in step.entries if fields is None]
            self.lost += len(gone)
            self._pending.done(gone)
            if kept := [(entry_id, fields) for entry_id, fields in step.entries if fields is not None]:
                self.careful = step.careful
                return kept
            if not gone:
                break
        return []

    def _condemn(self, entry: RawEntry) -> None:
        """Set aside an entry that its readers never came to acknowledge."""
        reason = "delivered again and again and never acknowledged: whoever handled it ended"
        self.dead_letter(entry[0], entry[1] or {}, reason)
        self.set_aside.append(reason)
        self._pending.done([entry[0]])
        if _parse_id(entry[0]) > _parse_id(self._last):
            self._last, self._last_fields = entry

    def _ask(self, max_entries: int) -> list[RawEntry]:
        """Own pending entries that were never handed out, if there are any, else new ones.

        Both are asked for at one instant, every time: a read whose reply was lost may still be carried out later (by a
        server that hung), and what it took is then pending and older than anything new. New entries that are not
        returned because of it are pending from now on and come next.
        """
        with self._client.pipeline(transaction=True) as pipe:
            pipe.xinfo_stream(self._key)
            pipe.xinfo_groups(self._key)
            pipe.xreadgroup(self._group, self._consumer, {self._key: self._last}, max_entries)
            pipe.xreadgroup(self._group, self._consumer, {self._key: ">"}, max_entries)
            replies = pipe.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        info, groups, pending, new = replies
        self._count_lost(info, groups, len(_entries(new)), max_entries)
        return _entries(pending) or _entries(new)

    def _count_lost(
        self, info: Mapping[str, Any], groups: Iterable[Mapping[str, Any]], delivered: int, asked: int
    ) -> None:
        """Entries leave a stream at its old end, so the number ever added minus its length is the ordinal of the newest
        one gone; whatever lies between the group's position and that one was never read."""
        added, gone = int(info["entries-added"]), int(info["entries-added"]) - int(info["length"])
        if self._ordinal is None:
            read = next((g.get("entries-read") for g in groups if g["name"] == self._group.encode()), None)
            self._ordinal = None if read is None else int(read)
        if self._ordinal is not None:
            self.lost += max(0, gone - self._ordinal)
            self._ordinal = max(self._ordinal, gone) + delivered
        if delivered < asked:
            self._ordinal = added

    def _keep(self, raw: Sequence[RawEntry]) -> list[Entry]:
        """Drop and acknowledge what is in the snapshot and what was deleted while it was pending."""
        floor, kept, done = _parse_id(self._floor), list[Entry](), list[str]()
        for entry_id, fields in raw:
            if fields is None:
                self.lost += 1
                done.append(entry_id)
            elif _parse_id(entry_id) <= floor:
                done.append(entry_id)
            else:
                kept.append((entry_id, fields))
        if done:
            self._client.xack(self._key, self._group, *done)
        if raw:
            self._last, self._last_fields = max((self._last, self._last_fields), raw[-1], key=lambda e: _parse_id(e[0]))
        return kept

    def _create_group(self) -> None:
        """Make the group after the last id seen; from the start when the stream is a new one (flushed, failed over)."""
        seen = max(self._last, self._floor, key=_parse_id)
        if not self._continues(seen):
            self._last = self._floor = seen = "0-0"
            self._last_fields = None
        try:
            self._client.xgroup_create(self._key, self._group, id=seen, mkstream=True)
        except redis.ResponseError as e:
            if not str(e).startswith("BUSYGROUP"):
                raise
        self._ordinal = 0 if seen == "0-0" else None
        self._pending.forget()

    def _continues(self, last: str) -> bool:
        """Whether the stream is the one in which `last` was read, or can be treated as such.

        A new stream (flushed, failed over) has not come as far, or has another entry under that id, or has older ones
        but not that one; trimming takes the oldest first.
        """
        info = self._stream_info()
        if info is None or _parse_id(info["last-generated-id"]) < _parse_id(last):
            return False
        there = _entries([(self._key, self._client.xrange(self._key, last, last))])
        if there:
            return last != self._last or self._last_fields is None or there[0][1] == self._last_fields
        return info["first-entry"] is None or _parse_id(info["first-entry"][0]) > _parse_id(last)

    def _trim(self) -> None:
        """Drop what every group has read and acknowledged, once it is older than `keep_s` by the stream's own clock."""
        info = self._stream_info()
        if info is None:
            return
        newest = _parse_id(info["last-generated-id"])
        oldest = [(newest[0] - int(self._keep_s * 1000) + 1, 0), newest]
        for group in self._client.xinfo_groups(self._key):
            oldest.append(_parse_id(group["last-delivered-id"]))
            if group["pending"]:
                pending = self._client.xpending(self._key, group["name"])
                oldest += [_parse_id(pending["min"])] if pending["min"] else []
        if min(oldest) > (0, 0):
            self._client.xtrim(self._key, minid="{}-{}".format(*min(oldest)), approximate=True)

    def _stream_info(self) -> dict[str, Any] | None:
        try:
            return self._client.xinfo_stream(self._key)
        except redis.ResponseError as e:
            if "no such key" in str(e):
                return None
            raise StorageError(f"{self._key}: {e}") from e
        except redis.RedisError as e:
            raise StorageError(f"{self._key}: {e}") from e


def _entries(reply: Any) -> list[RawEntry]:
    """The entries in a reply for one stream; the fields are None where the entry is gone."""
    if not reply:
        return []
    return [(entry_id.decode(), fields or None) for entry_id, fields in reply[0][1]]


def newer_id(a: str | None, b: str) -> str:
    """The later one of two stream ids; None is before all."""
    return b if a is None else max(a, b, key=_parse_id)


def _parse_id(entry_id: str | bytes) -> tuple[int, int]:
    match = _ID.match(entry_id.decode() if isinstance(entry_id, bytes) else entry_id)
    if match is None:
        raise ValueError(f"not a stream id: {entry_id!r:.60}")
    return int(match[1]), int(match[2] or 0)
