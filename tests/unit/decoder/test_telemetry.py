"""Telemetry: what blocks hold, that decoding never waits, and that what is lost is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from decoder.generate import Knobs, RoundTrace
from decoder.telemetry import Round, TelemetrySender, pack
from storage.errors import SampleError, StorageError
from storage.records import EXAMINED, Record, RequestRecord, TokenBlock, from_fields, to_fields
from tests.support import wait_until


def knobs(seq: int = 1, theta: float = 0.5, rho: float = 1.0) -> Knobs:
    return Knobs(
        g=3, rule="threshold", theta=theta, rho=rho, holdback=0.1, fork=1.0, label=0.0, explore=0.0, epoch=2,
        lease_seq=seq,
    )  # fmt: skip


def trace(request_id: str = "r1", width: int = 3, held: Knobs | None = None, cls: str = "default") -> RoundTrace:
    column = np.linspace(0.1, 0.9, width).astype(np.float32)
    return RoundTrace(
        request_id=request_id,
        traffic_class=cls,
        knobs=held or knobs(),
        rows=1,
        width=width,
        emitted=width + 1,
        prefill=0,
        draft_s=0.001,
        verify_s=0.002,
        overhead_s=0.0005,
        target_prob=column,
        draft_prob=column,
        target_prob_raw=column,
        draft_prob_raw=column,
        target_max_raw=column,
        draft_max_raw=column,
        tv=column,
        theta=np.full(width, 0.5, dtype=np.float32),
        flags=np.full(width, EXAMINED, dtype=np.uint8),
    )


def request(request_id: str = "r1") -> RequestRecord:
    return RequestRecord(
        request_id=request_id, pool="p", traffic_class="default", worker="w", boot="b", epoch=2, lease_seq=1,
        rule="threshold", theta=0.5, rho=1.0, arm="untouched", holdback_prob=0.1, fork_prob=1.0, label_prob=0.0,
        fork_drawn=False, label_drawn=False, touches=0, first_touch_at=None, started=1.0, prompt_tokens=3, tokens=4,
        target_passes=1, first_token_s=0.01, total_s=0.1, finish_reason="stop",
    )  # fmt: skip


class Stream:
    """A writer that keeps what it gets, can be away, and can be made to hang."""

    def __init__(self, away: bool = False):
        self.entries: list[Record] = []
        self.away = away
        self.gate = threading.Event()
        self.gate.set()

    def append(self, records: Sequence[Record]) -> int:
        self.gate.wait(10)
        if self.away:
            raise StorageError("away")
        self.entries += [from_fields(to_fields(record)) for record in records]
        return len(records)

    def blocks(self) -> list[TokenBlock]:
        return [e for e in self.entries if isinstance(e, TokenBlock)]


def packed(rounds: list[RoundTrace], block_size: int = 512) -> list[TokenBlock]:
    blocks = pack(
        [Round(t.traffic_class, t) for t in rounds], pool="p", worker="w", boot="b", first_seq=7, block_size=block_size
    )
    for block in blocks:
        assert isinstance(from_fields(to_fields(block)), TokenBlock)
    return blocks


def test_rounds_under_one_lease_share_a_block_with_numbered_requests_and_rounds():
    [block] = packed([trace("a", 2), trace("a", 0), trace("b", 3)])
    assert block.seq == 7 and (block.epoch, block.lease_seq, block.rule, block.rho) == (2, 1, "threshold", 1.0)
    assert block.request.tolist() == [0, 0, 1, 1, 1]
    assert block.round.tolist() == [0, 0, 2, 2, 2]
    assert block.position.tolist() == [1, 2, 1, 2, 3]
    assert block.round_width.tolist() == [2, 0, 3] and block.round_emitted.tolist() == [3, 1, 4]
    assert np.allclose(block.tv, [0.1, 0.9, 0.1, 0.5, 0.9])


def test_another_class_lease_or_mixing_weight_opens_another_block():
    blocks = packed([trace(), trace(cls="code"), trace(held=knobs(seq=2)), trace(held=knobs(rho=0.5)), trace()])
    assert [b.seq for b in blocks] == [7, 8, 9, 10]
    assert [(b.traffic_class, b.lease_seq, b.rho) for b in blocks] == [
        ("default", 1, 1.0), ("code", 1, 1.0), ("default", 2, 1.0), ("default", 1, 0.5),
    ]  # fmt: skip
    assert [b.round_rows.size for b in blocks] == [2, 1, 1, 1]


def test_a_full_block_is_followed_by_another_and_rounds_without_positions_count_too():
    blocks = packed([trace(width=3)] * 5, block_size=7)
    assert [b.theta.size for b in blocks] == [6, 6, 3]
    assert [b.round_rows.size for b in packed([trace(width=0)] * 5, block_size=2)] == [2, 2, 1]


def test_a_probability_that_rounding_carried_past_one_is_brought_back():
    over = trace()
    object.__setattr__(over, "target_prob", np.full(3, 1.0 + 1e-5))
    [block] = packed([over])
    assert block.target_prob.max() == 1.0


def test_a_request_is_appended_after_the_blocks_of_its_rounds():
    stream = Stream()
    sender = TelemetrySender(stream, "p", "w", "b", flush_s=60)
    sender.on_round(trace("r1"))
    sender.send(request("r1"))
    sender.on_round(trace("r2"))
    sender.send(request("r2"))
    assert sender.close()
    kinds = [type(e).__name__ for e in stream.entries]
    assert kinds == ["TokenBlock", "RequestRecord", "RequestRecord"]
    assert sender.sent_blocks == 1 and sender.sent_records == 2
    assert sender.dropped_positions == sender.dropped_records == 0


def test_blocks_are_numbered_on_from_one_flush_to_the_next():
    stream = Stream()
    sender = TelemetrySender(stream, "p", "w", "b", start=False)
    for _ in range(3):
        sender.on_round(trace())
        assert sender.flush_once()
    assert [b.seq for b in stream.blocks()] == [0, 1, 2]


def test_enough_positions_are_sent_without_waiting_for_the_interval():
    stream = Stream()
    sender = TelemetrySender(stream, "p", "w", "b", flush_s=60, block_size=6)
    sender.on_round(trace(width=3))
    sender.on_round(trace(width=3))
    wait_until(stream.blocks)
    assert sender.close()


def test_decoding_does_not_wait_for_a_stream_that_hangs():
    stream = Stream()
    stream.gate.clear()
    sender = TelemetrySender(stream, "p", "w", "b", flush_s=0.001, block_size=3)
    started = time.perf_counter()
    for _ in range(1000):
        sender.on_round(trace())
        sender.send(request())
    assert time.perf_counter() - started < 5  # the stream holds its caller for 10 s
    stream.gate.set()
    assert sender.close()
    assert sum(b.theta.size for b in stream.blocks()) == 3000


def test_while_the_stream_is_away_everything_that_fits_is_kept_and_sent_later():
    stream = Stream(away=True)
    sender = TelemetrySender(stream, "p", "w", "b", flush_s=0.001, block_size=3, backoff_s=(0.001, 0.002))
    for i in range(20):
        sender.on_round(trace(f"r{i}"))
        sender.send(request(f"r{i}"))
    wait_until(lambda: sender.failed_appends > 2)
    stream.away = False
    assert sender.close()
    assert [b.seq for b in stream.blocks()] == list(range(20))
    assert len(stream.entries) == 40 and sender.dropped_positions == 0


def test_what_does_not_fit_is_dropped_oldest_first_and_counted():
    stream = Stream()
    sender = TelemetrySender(stream, "p", "w", "b", block_size=3, max_positions=6, max_records=2, start=False)
    for i in range(5):
        sender.on_round(trace(f"r{i}", held=knobs(seq=i)))
        sender.send(request(f"r{i}"))
    assert sender.flush_once()
    assert [b.lease_seq for b in stream.blocks()] == [3, 4]
    assert [e.request_id for e in stream.entries if isinstance(e, RequestRecord)] == ["r3", "r4"]
    assert sender.dropped_positions == 9 and sender.dropped_records == 3


def test_closing_while_the_stream_is_away_ends_in_time_and_counts_what_is_lost():
    sender = TelemetrySender(Stream(away=True), "p", "w", "b", flush_s=0.001)
    sender.on_round(trace(width=3))
    sender.send(request())
    assert not sender.close(timeout=0.1)
    assert sender.dropped_positions == 3 and sender.dropped_records == 1


def test_a_record_that_cannot_be_written_does_not_hold_up_the_others():
    class Picky(Stream):
        def append(self, records: Sequence[Record]) -> int:
            if any(isinstance(r, RequestRecord) and r.request_id == "bad" for r in records):
                raise SampleError("a record cannot be written")
            return super().append(records)

    stream = Picky()
    sender = TelemetrySender(stream, "p", "w", "b", start=False)
    for name in ("a", "bad", "c"):
        sender.send(request(name))
    assert sender.flush_once()
    assert [e.request_id for e in stream.entries if isinstance(e, RequestRecord)] == ["a", "c"]
    assert sender.dropped_records == 1 and sender.sent_records == 2


def test_a_round_that_cannot_be_packed_loses_only_blocks_not_requests():
    stream = Stream()
    sender = TelemetrySender(stream, "p", "w", "b", start=False)
    bad = trace()
    object.__setattr__(bad, "tv", None)
    sender.on_round(bad)
    sender.send(request())
    sender.flush_once()
    assert [type(e) for e in stream.entries] == [RequestRecord] and sender.dropped_positions == 3


def test_a_buffer_smaller_than_a_block_is_refused():
    with pytest.raises(ValueError, match="max_positions"):
        TelemetrySender(Stream(), "p", "w", "b", block_size=10, max_positions=5, start=False)
