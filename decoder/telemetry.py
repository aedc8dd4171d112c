"""Sends what decoding saw to the stream, and never makes decoding wait for it.

`TelemetrySender.on_round` and `TelemetrySender.send` only append to a bounded buffer under a short lock. A daemon
thread packs rounds into `TokenBlock`s and appends them through a `StreamWriter`. While the stream is away it keeps what
it holds and tries again; what no longer fits is dropped, the oldest first, and counted.

Order: a record is appended after the blocks of the rounds that were observed before it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from storage.errors import SampleError, StorageError
from storage.records import Flat, Record, TokenBlock

if TYPE_CHECKING:
    from decoder.generate import RoundTrace

log = structlog.get_logger(__name__)

APPEND_AT_ONCE = 32  # stream entries in one call of the writer
BACKOFF_S = (0.1, 5.0)  # first and longest pause after a failed append
_PROBABILITIES = ("target_prob", "draft_prob", "target_prob_raw", "draft_prob_raw", "target_max_raw", "draft_max_raw")
_LONGEST_S = 3600.0  # what a block may say about one round; see TokenBlock.from_fields


class Writer(Protocol):
    """What the sender needs of `storage.stream.StreamWriter`."""

    def append(self, records: Sequence[Record], /) -> int:
        """Append in order; raises StorageError."""
        ...


class Round(NamedTuple):
    """One observed round and the traffic class of its request."""

    traffic_class: str
    trace: RoundTrace

    @property
    def size(self) -> int:
        """Room it takes in a block: its drafted positions, at least 1."""
        return max(1, len(self.trace.theta))


def pack(
    rounds: Iterable[Round], *, pool: str, worker: str, boot: str, first_seq: int, block_size: int = 512
) -> list[TokenBlock]:
    """Blocks of ``rounds``, in the order in which their first rounds came, numbered from ``first_seq``.

    One block holds rounds of one (class, epoch, lease seq, rule, rho), at most ``block_size`` positions (a single round
    is never split). Inside a block every request has one row number, counted from 0, and every trace one round index:
    the rows of a batch have a round each. Rows and seconds of the batch's round are those of the trace that speaks for
    it (`RoundTrace.timed`); the others have 0 rows and 0 seconds, so sums are right and costs leave them out.
    """
    full: list[list[Round]] = []
    open_groups: dict[tuple[Any, ...], tuple[list[Round], int]] = {}
    for item in rounds:
        k = item.trace.knobs
        key = (item.traffic_class, k.epoch, k.lease_seq, k.rule, k.rho)
        group, size = open_groups.get(key, ([], 0))
        if not group or size + item.size > block_size:
            group, size = [], 0
            full.append(group)
        group.append(item)
        open_groups[key] = (group, size + item.size)
    return [_block(group, pool, worker, boot, first_seq + i) for i, group in enumerate(full)]


def _block(group: list[Round], pool: str, worker: str, boot: str, seq: int) -> TokenBlock:
    traces = [item.trace for item in group]
    knobs = traces[0].knobs
    rows: dict[str, int] = {}
    request_row = [rows.setdefault(t.request_id, len(rows)) for t in traces]
    widths = [len(t.theta) for t in traces]

    def per_round(values: Sequence[float], dtype: str) -> npt.NDArray[Any]:
        return np.asarray(values, dtype=dtype)

    def seconds(values: Sequence[float]) -> npt.NDArray[Any]:
        return np.clip(np.asarray(values, dtype="<f4"), 0.0, _LONGEST_S)

    def column(name: str) -> npt.NDArray[Any]:
        # Rounding may carry a probability past 1; what is not a number stays one and is refused by the reader.
        return np.clip(np.concatenate([getattr(t, name) for t in traces]).astype("<f4"), 0.0, 1.0)

    return TokenBlock(
        pool=pool,
        traffic_class=group[0].traffic_class,
        worker=worker,
        boot=boot,
        seq=seq,
        epoch=knobs.epoch,
        lease_seq=knobs.lease_seq,
        rule=knobs.rule,
        rho=knobs.rho,
        round_rows=per_round([t.rows if t.timed else 0 for t in traces], "<u2"),
        round_width=per_round([t.width if t.widest is None else t.widest for t in traces], "<u2"),
        round_emitted=per_round([t.emitted for t in traces], "<u4"),
        round_prefill=per_round([t.prefill for t in traces], "<u4"),
        round_draft_s=seconds([t.draft_s for t in traces]),
        round_verify_s=seconds([t.verify_s for t in traces]),
        round_overhead_s=seconds([t.overhead_s for t in traces]),
        request=np.repeat(np.asarray(request_row, dtype="<u2"), widths),
        round=np.repeat(np.arange(len(traces), dtype="<u4"), widths),
        position=np.concatenate([np.arange(1, w + 1, dtype=np.uint8) for w in widths]),
        flags=np.concatenate([t.flags for t in traces]).astype(np.uint8),
        tv=column("tv"),
        theta=column("theta"),
        **{name: column(name) for name in _PROBABILITIES},
    )


class TelemetrySender:
    """A buffer in front of the stream, and the thread that empties it.

    ``max_positions`` and ``max_records`` bound the buffer; as much again may be packed and waiting for the stream.
    Blocks are numbered from 0 for each ``boot``. Counters: ``sent_blocks``, ``sent_records``, ``dropped_positions``
    (a round without drafted positions counts 1), ``dropped_records``, ``failed_appends``.
    """

    def __init__(
        self,
        writer: Writer,
        pool: str,
        worker: str,
        boot: str,
        *,
        flush_s: float = 0.25,
        block_size: int = 512,
        max_positions: int = 1 << 16,
        max_records: int = 1 << 13,
        backoff_s: tuple[float, float] = BACKOFF_S,
        start: bool = True,
    ):
        if block_size < 1 or max_positions < block_size or max_records < 1:
            raise ValueError("block_size and max_records must be at least 1, and max_positions at least block_size")
        self.pool, self.worker, self.boot = pool, worker, boot
        self._writer = writer
        self._flush_s, self._block_size, self._backoff_s = flush_s, block_size, backoff_s
        self._max_positions, self._max_records = max_positions, max_records
        self._wake = threading.Condition(threading.Lock())
        self._rounds: deque[Round] = deque()
        self._records: deque[Flat] = deque()
        self._positions = 0
        self._outbox: list[Record] = []  # only the thread that flushes touches it
        self._at_once = APPEND_AT_ONCE
        self._seq = 0
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._away = False
        self.sent_blocks = self.sent_records = 0
        self.dropped_positions = self.dropped_records = self.failed_appends = 0
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        if start:
            self._thread.start()

    def on_round(self, trace: RoundTrace) -> None:
        """Take one round; never waits for the stream."""
        item = Round(trace.traffic_class, trace)
        with self._wake:
            self._rounds.append(item)
            self._positions += item.size
            while self._positions > self._max_positions:
                size = self._rounds.popleft().size
                self._positions -= size
                self.dropped_positions += size
            if self._positions >= self._block_size:
                self._wake.notify()

    def send(self, record: Flat) -> None:
        """Take a request, fork or score record; never waits for the stream."""
        with self._wake:
            self._records.append(record)
            if len(self._records) > self._max_records:
                self._records.popleft()
                self.dropped_records += 1

    def flush_once(self) -> bool:
        """Pack what is buffered and append it; True when nothing is left to send. For the sender's own thread.

        Nothing new is packed while older entries wait. Raises StorageError and keeps the entries; entries that had
        already arrived are sent again, and readers ignore duplicates.
        """
        if not self._outbox:
            self._outbox = self._take()
        while self._outbox:
            chunk = self._outbox[: self._at_once]
            try:
                self._writer.append(chunk)
            except SampleError:
                if len(chunk) > 1:  # find the record that cannot be written; the others must arrive
                    self._at_once = 1
                    continue
                self._lost(chunk)
                log.exception("telemetry: a record that cannot be written was dropped", pool=self.pool)
            else:
                blocks = sum(isinstance(record, TokenBlock) for record in chunk)
                self.sent_blocks += blocks
                self.sent_records += len(chunk) - blocks
            del self._outbox[: len(chunk)]
        self._at_once = APPEND_AT_ONCE
        with self._wake:
            return not self._rounds and not self._records

    def close(self, timeout: float = 5.0) -> bool:
        """Send what is left, for at most ``timeout`` seconds; True when everything went. The rest counts as dropped."""
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        with self._wake:
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout + 0.5)
        if self._thread.is_alive():  # the writer hangs; its thread is a daemon, and what it holds is lost
            log.error("telemetry: the stream did not answer while closing", pool=self.pool)
        with self._wake:
            left_rounds, left_records = list(self._rounds), list(self._records)
            self._rounds.clear()
            self._records.clear()
            self._positions = 0
        outbox, self._outbox = self._outbox, []
        self.dropped_positions += sum(item.size for item in left_rounds)
        self._lost([*outbox, *left_records])
        return not (outbox or left_rounds or left_records)

    def _lost(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, TokenBlock):
                self.dropped_positions += max(len(record.theta), len(record.round_rows))
            else:
                self.dropped_records += 1

    def _take(self) -> list[Record]:
        with self._wake:
            rounds, records = list(self._rounds), list(self._records)
            self._rounds.clear()
            self._records.clear()
            self._positions = 0
        try:
            blocks = pack(
                rounds,
                pool=self.pool,
                worker=self.worker,
                boot=self.boot,
                first_seq=self._seq,
                block_size=self._block_size,
            )
        except Exception:
            # A round that cannot be packed is a fault of ours; the requests must still be accounted for.
            self.dropped_positions += sum(item.size for item in rounds)
            log.exception("telemetry: rounds that cannot be packed were dropped", rounds=len(rounds))
            blocks = []
        self._seq += len(blocks)
        return [*blocks, *records]

    def _run(self) -> None:
        pause = self._backoff_s[0]
        while True:
            with self._wake:
                self._wake.wait_for(
                    lambda: self._closing.is_set() or self._positions >= self._block_size, timeout=self._flush_s
                )
            try:
                empty = self.flush_once()
            except Exception as e:  # anything a writer may throw; telemetry must outlive it
                self._failed(e)
                if self._closing.is_set():
                    left = self._deadline - time.monotonic()
                    if left <= 0:
                        return
                    time.sleep(min(self._backoff_s[0], left))
                else:
                    self._closing.wait(pause)
                    pause = min(2 * pause, self._backoff_s[1])
                continue
            pause = self._backoff_s[0]
            if self._away:
                self._away = False
                log.info("telemetry: the stream is back", pool=self.pool)
            if self._closing.is_set() and (empty or time.monotonic() >= self._deadline):
                return

    def _failed(self, error: Exception) -> None:
        self.failed_appends += 1
        if not self._away:
            self._away = True
            if isinstance(error, StorageError):
                log.warning("telemetry: the stream is away; keeping what fits", pool=self.pool, error=str(error))
            else:
                log.exception("telemetry: the writer fails; keeping what fits", pool=self.pool)
