"""Rows of the rollups: sums over a stretch of time, so that ratios can be taken over any longer one.

`time` is the stretch's start in Unix seconds, a multiple of its step. `bucket` is the number of rows in the batch,
rounded up to a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

MINUTE, HOUR, DAY = 60, 3600, 86400


@dataclass(frozen=True)
class TokenRow:
    """Drafted tokens at one position of a block, counted from 1: how many were drafted, examined, accepted, were
    touches, were pinned to lossless, and the sums of the knob applied there and of the total variation TV(p, q)."""

    pool: str
    traffic_class: str
    time: float
    bucket: int
    position: int
    drafted: int
    examined: int
    accepted: int
    touches: int
    pinned: int
    theta_sum: float
    tv_sum: float


@dataclass(frozen=True)
class RoundRow:
    """Rounds: their number, the sum of their batches' rows (`request_rounds`), tokens drafted and emitted over all
    rows, prompt tokens that first rounds read, and the seconds spent drafting, verifying and in between."""

    pool: str
    traffic_class: str
    time: float
    bucket: int
    rounds: int
    request_rounds: int
    drafted: int
    emitted: int
    prefill_tokens: int
    draft_s: float
    verify_s: float
    overhead_s: float


RollupRow = TokenRow | RoundRow
