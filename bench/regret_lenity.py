"""The controller of Lenity in the replay of `bench.regret`: the real `ClassSteer`, told only what its worker saw.

As in service: the worker's rounds of a second become one telemetry block, the controller decides once a second, and the
worker obeys a quarter of a second later. No loss is allowed, so what is tested is the block length. A batch reports the
drafts of up to `REPORTED` of its rows in every round.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bench.regret_rivals import Round
from bench.regret_traces import G
from controller.costs import CostModel
from controller.steer import ClassSteer, Fence
from policies.load import parse_policy
from policies.rules import Scalars
from storage.records import ACCEPTED, EXAMINED, Decision, TokenBlock

TICK_S, TTL_S, HALF_LIFE, LAG_S = 1.0, 5.0, 4000.0, 0.25  # as `LoopConfig`, and how often a worker looks for leases
ORIGIN = 1_700_000_000.0
REPORTED = 4
DOCUMENT = f"""
version: lenity/v1
pool: replay
objective: {{metric: correct, max_loss: 0, window: 1d}}
leniency: {{rules: [threshold]}}
block: {{max: {G}}}
"""


class Lenity:
    """`ClassSteer` under simulated time."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        policy = parse_policy(DOCUMENT).for_class("default")
        self.steer = ClassSteer(policy, CostModel(policy.g_max), half_life_rounds=HALF_LIFE, meter_s=10.0)
        self.seq = 0
        self.rounds: list[Round] = []
        self.decisions: list[Decision] = []
        self.next_tick, self.obeyed_from = TICK_S, 0.0
        self.lease = self.coming = self._decide(0.0).lease

    def lengths(self, rows: int, now: float) -> npt.NDArray[np.int64]:
        """The lease's block length, and now and then one more, row by row."""
        if now >= self.obeyed_from:
            self.lease = self.coming
        explore = self.rng.random(rows) < self.lease.explore
        return np.asarray(self.lease.knobs(rows).g + explore, dtype=np.int64)

    def after(self, done: Round, now: float) -> None:
        """Note the round; once a second report and decide."""
        self.rounds.append(done)
        if now < self.next_tick:
            return
        self.next_tick = max(self.next_tick + TICK_S, now)
        self.steer.observe_block(self._block(), ORIGIN + now)
        self.rounds = []
        self.coming = self._decide(now).lease
        self.obeyed_from = now + LAG_S

    def _decide(self, now: float) -> Decision:
        self.seq += 1
        self.decisions.append(self.steer.decide(ORIGIN + now, Fence(1, self.seq, 1, TTL_S)))
        return self.decisions[-1]

    def _block(self) -> TokenBlock:
        rows = np.array([done.rows for done in self.rounds])
        shown = [self.rng.permutation(done.rows)[:REPORTED] for done in self.rounds]
        drafted = np.concatenate([done.drafted[s] for done, s in zip(self.rounds, shown, strict=True)])
        accepted = np.concatenate([done.accepted[s] for done, s in zip(self.rounds, shown, strict=True)])
        a0 = [_a0(done, int(i)) for done, s in zip(self.rounds, shown, strict=True) for i in s]
        count = np.array([len(s) for s in shown])
        position = np.concatenate([np.arange(1, n + 1) for n in drafted]) if len(drafted) else np.zeros(0)
        examined = position <= np.repeat(accepted + 1, drafted)
        taken = position <= np.repeat(accepted, drafted)
        p = np.concatenate(a0).astype(np.float32) if a0 else np.zeros(0, np.float32)
        half = np.full(len(p), 0.5, np.float32)
        values = dict(zip(Scalars._fields, (p / 2, half, p / 2, half, half, half, 1 - p), strict=True))
        seconds: dict[str, Any] = {
            f"round_{part}_s": np.array([getattr(done, f"{part}_s") for done in self.rounds], dtype=np.float32)
            for part in ("draft", "verify", "overhead")
        }
        return TokenBlock(
            pool="replay",
            traffic_class="default",
            worker="w0",
            boot="b0",
            seq=self.seq,
            epoch=1,
            lease_seq=self.lease.seq,
            rule="threshold",
            rho=0.0,
            round_rows=rows.astype(np.uint16),
            round_width=np.array([done.width for done in self.rounds], dtype=np.uint16),
            round_emitted=np.array([done.emitted for done in self.rounds], dtype=np.uint32),
            round_prefill=np.zeros(len(rows), dtype=np.uint32),
            request=np.repeat(np.concatenate(shown), drafted).astype(np.uint16),
            round=np.repeat(np.repeat(np.arange(len(rows)), count), drafted).astype(np.uint32),
            position=position.astype(np.uint8),
            theta=np.zeros(len(p), dtype=np.float32),
            flags=(examined * np.uint8(EXAMINED) + taken * np.uint8(ACCEPTED)).astype(np.uint8),
            **seconds,
            **values,
        )


def _a0(done: Round, row: int) -> npt.NDArray[np.float64]:
    """Acceptance probabilities of a row's drafts: its own ones as far as they were examined."""
    text, start, n = done.text, int(done.at[row]), int(done.drafted[row])
    steps = np.arange(n)
    if text.accept is None or text.afresh is None:
        return np.where(steps < text.length[start], 1.0, 0.0)
    at = (start + steps) % len(text)
    return np.where(steps <= done.accepted[row], text.accept[at], text.afresh[at])
