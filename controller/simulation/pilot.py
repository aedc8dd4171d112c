"""The controller in the simulated loop: the real `ClassSteer`, fed and asked as `controller.loop.PoolLoop` does."""

from __future__ import annotations

import json
from typing import Any

from controller.costs import CostModel
from controller.ingest import Deduplicator
from controller.steer import ClassSteer, Fence, kept_at_age
from policies.model import Policy
from storage.records import Decision, ForkRecord, QualityScore, Record, RequestRecord


class Pilot:
    """One controller process: it can be edited, killed and started again from its last snapshot."""

    def __init__(self, policy: Policy, *, ttl: float, half_life_rounds: float, meter_s: float):
        self.policy, self.ttl = policy, ttl
        self._options = {"half_life_rounds": half_life_rounds, "meter_s": meter_s}
        self.epoch, self.revision, self._seq = 1, 1, 0
        self._seen = Deduplicator()
        self.costs = CostModel(policy.block.max)
        self.steer = ClassSteer(policy.for_class("default"), self.costs, **self._options)
        self.duplicates = 0

    def tick(self, now: float, records: list[Record]) -> Decision:
        """Observe what has come and decide."""
        for record in records:
            if not self._seen.is_new(record):
                self.duplicates += 1
            elif isinstance(record, RequestRecord):
                self.steer.observe_request(record, now)
            elif isinstance(record, ForkRecord):
                self.steer.observe_fork(record, now)
            elif isinstance(record, QualityScore):
                self.steer.observe_score(record, now)
            else:
                self.steer.observe_block(record, now)
        self._seq += 1
        return self.steer.decide(now, Fence(self.epoch, self._seq, self.revision, self.ttl))

    def edit(self, policy: Policy, now: float) -> None:
        """Obey a new policy revision."""
        self.policy = policy
        self.revision += 1
        self.steer.set_policy(policy.for_class("default"), now)

    def snapshot(self, now: float) -> str:
        """Everything a successor needs, as the JSON that the database would hold."""
        state: dict[str, Any] = {
            "time": now,
            "costs": self.costs.to_state(),
            "steer": self.steer.to_state(),
            "seen": self._seen.to_state(),
        }
        return json.dumps(state, allow_nan=False)

    def restart(self, snapshot: str, now: float) -> None:
        """A new process takes over from a snapshot, under a new epoch."""
        state = json.loads(snapshot)
        age_s = now - state["time"]
        self.epoch, self._seq = self.epoch + 1, 0
        self.costs = CostModel.from_state(state["costs"])
        self.costs.forget(kept_at_age(age_s))
        self._seen = Deduplicator.from_state(state["seen"])
        self.steer = ClassSteer.from_state(
            state["steer"], self.policy.for_class("default"), self.costs, age_s=age_s, **self._options
        )
