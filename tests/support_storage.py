"""Builders of records, leases and decisions for storage tests; keyword arguments replace single fields."""

from __future__ import annotations

from typing import Any

import numpy as np

from storage.records import (
    ACCEPTED,
    EXAMINED,
    CapRow,
    Decision,
    ForkRecord,
    KnobRow,
    Lease,
    QualityScore,
    RequestRecord,
    TokenBlock,
)
from storage.rows import RoundRow, TokenRow

NOW = 1_800_000_000.25


def a_block(pool: str = "chat", seq: int = 0, positions: int = 8, **changes: Any) -> TokenBlock:
    """A block of `positions` drafted positions in rounds of 8, its probabilities drawn with seed `seq`."""
    rng = np.random.default_rng(seq)
    rounds = -(-positions // 8)
    values: dict[str, Any] = {
        "pool": pool,
        "traffic_class": "default",
        "worker": "w1",
        "boot": "b1",
        "seq": seq,
        "epoch": 1,
        "lease_seq": 1,
        "rule": "token_v3",
        "rho": 1.0,
        "round_rows": np.ones(rounds, np.uint16),
        "round_width": np.full(rounds, 8, np.uint16),
        "round_emitted": np.full(rounds, 5, np.uint32),
        "round_prefill": np.zeros(rounds, np.uint32),
        "request": np.zeros(positions, np.uint16),
        "round": (np.arange(positions) // 8).astype(np.uint32),
        "position": (np.arange(positions) % 8 + 1).astype(np.uint8),
        "theta": np.full(positions, 0.5, np.float32),
        "flags": np.full(positions, EXAMINED | ACCEPTED, np.uint8),
    }
    for name in ("round_draft_s", "round_verify_s", "round_overhead_s"):
        values[name] = rng.random(rounds, np.float32)
    for name in TokenBlock.POSITION_COLUMNS:
        if name not in values:
            values[name] = rng.random(positions, np.float32)
    return TokenBlock(**(values | changes))


def a_request(pool: str = "chat", request_id: str = "r1", **changes: Any) -> RequestRecord:
    """An untouched request of ten tokens."""
    values: dict[str, Any] = {
        "traffic_class": "default",
        "worker": "w1",
        "boot": "b1",
        "epoch": 1,
        "lease_seq": 1,
        "rule": "token_v3",
        "theta": 0.5,
        "rho": 1.0,
        "arm": "untouched",
        "holdback_prob": 0.1,
        "fork_prob": 1.0,
        "label_prob": 1.0,
        "fork_drawn": False,
        "label_drawn": False,
        "touches": 0,
        "first_touch_at": None,
        "started": NOW - 1,
        "prompt_tokens": 20,
        "tokens": 10,
        "target_passes": 4,
        "first_token_s": 0.0625,
        "total_s": 0.5,
        "finish_reason": "eos",
    }
    return RequestRecord(pool=pool, request_id=request_id, **(values | changes))


def touched(pool: str, request_id: str, arm: str = "lenient", **changes: Any) -> RequestRecord:
    """A request with two touches and a drawn fork and label."""
    values = {"arm": arm, "touches": 2, "first_touch_at": NOW - 0.5, "fork_drawn": True, "label_drawn": True}
    return a_request(pool, request_id, **(values | changes))


def a_fork(pool: str = "chat", request_id: str = "r1", **changes: Any) -> ForkRecord:
    """A finished fork."""
    values: dict[str, Any] = {"traffic_class": "default", "worker": "w1", "boot": "b1", "done": True}
    values |= {"touches": 3, "tokens": 12, "target_passes": 5, "total_s": 0.75}
    return ForkRecord(pool=pool, request_id=request_id, **(values | changes))


def a_score(pool: str = "chat", request_id: str = "r1", branch: str = "served", **changes: Any) -> QualityScore:
    """A score of one."""
    values: dict[str, Any] = {"traffic_class": "default", "metric": "answer_correct", "score": 1.0}
    values |= {"scorer": "exact", "scorer_version": "1", "time": NOW}
    return QualityScore(pool=pool, request_id=request_id, branch=branch, **(values | changes))  # type: ignore[arg-type]


def a_lease(pool: str = "chat", epoch: int = 1, seq: int = 1, **changes: Any) -> Lease:
    """A lenient lease of five seconds with numbers that need every bit."""
    values: dict[str, Any] = {
        "traffic_class": "default",
        "policy_revision": 3,
        "issued": NOW + 1 / 3,
        "ttl": 5.0,
        "rule": "token_v3",
        "table": (KnobRow(1, 8, 0.1 + 0.2, 1.0), KnobRow(16, 3, 2 / 3, 1 / 3)),
        "caps": (CapRow(0.5, 0.1, 1.0),),
        "holdback": 0.1,
        "fork": 1.0,
        "label": 1.0,
    }
    return Lease(pool=pool, epoch=epoch, seq=seq, **(values | changes))


def a_decision(pool: str = "chat", epoch: int = 1, seq: int = 1, **changes: Any) -> Decision:
    """A decision whose inputs hold what JSON has no word for."""
    values: dict[str, Any] = {
        "traffic_class": "default",
        "time": NOW + 1 / 3,
        "lease": a_lease(pool, epoch, seq),
        "state": "measured",
        "reason": "budget_ok",
        "explanation": "leniency fits the budget",
        "inputs": {"labels": 12, "u_kappa": 1 / 3},
        "estimates": {"reach": [1.0, 0.75, 0.1]},
        "bounds": {"upper": float("inf")},
        "counterfactual": {"g": 4},
    }
    return Decision(pool=pool, **(values | changes))


def a_token_row(pool: str = "chat", time: float = 1_800_000_000.0, position: int = 1, **changes: Any) -> TokenRow:
    """A minute of one position: eight tokens drafted, six examined, five accepted, one touch."""
    values: dict[str, Any] = {"traffic_class": "default", "bucket": 4, "drafted": 8, "examined": 6, "accepted": 5}
    values |= {"touches": 1, "pinned": 0, "theta_sum": 4.0, "tv_sum": 1.5}
    return TokenRow(pool=pool, time=time, position=position, **(values | changes))


def a_round_row(pool: str = "chat", time: float = 1_800_000_000.0, **changes: Any) -> RoundRow:
    """A minute of four rounds of a batch of three rows."""
    values: dict[str, Any] = {"traffic_class": "default", "bucket": 4, "rounds": 4, "request_rounds": 12}
    values |= {
        "drafted": 96,
        "emitted": 60,
        "prefill_tokens": 40,
        "draft_s": 0.25,
        "verify_s": 0.5,
        "overhead_s": 0.125,
    }
    return RoundRow(pool=pool, time=time, **(values | changes))


def a_slice(start: float = 1_800_000_000.0, **changes: Any) -> dict[str, Any]:
    """A slice of the budget's ledger: five requests, two of them touched, one fork."""
    values: dict[str, Any] = {"traffic_class": "default", "start": start, "evidence_epoch": 1, "level": -40}
    values |= {"rule": "token_v3", "requests": 5, "touched": 2, "touches": 3, "forks": 1, "labelled": 1}
    return values | {"fork_loss": 0.25, "fork_touches": 2} | changes
