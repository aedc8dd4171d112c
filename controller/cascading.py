"""What is measured of a class's strategies: its cascades' answers, and how long requests by rounds really take.

A cascade's seconds are those of whole requests, with their prompts and whatever they waited for; a speculative solution
counts seconds of rounds. So requests by rounds are measured too, against what the solution of their time said of them:
that ratio turns the seconds of any other solution into those of a request.

The list of rules that compete (`controller.contest`) is a list of *arms*: an accept rule, which means speculative
rounds, or a cascade with its rule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from controller.cascade import CASCADES, LEAST, CascadeCurve, CascadeEstimator
from controller.intake import arm_of
from policies.errors import TooFewSamples
from policies.model import ClassPolicy
from storage.records import RequestRecord

ROUNDS = "speculative"
CASCADE_RULE = "confidence_min"  # a draft is as sure of its answer as of the token that it was least sure of
KEPT = 500  # requests remembered, of each cascade and of rounds
POINTS = 101  # thresholds that are looked at


def arms_of(policy: ClassPolicy) -> tuple[str, ...]:
    """What may compete under a policy: its rules, and the sequence cascades on its list where rounds come first."""
    listed = policy.strategies if policy.strategies[0] == ROUNDS else ()
    return (*policy.rules, *(arm_of(name, CASCADE_RULE) for name in listed if name in CASCADES))


def strategy_of(arm: str) -> str:
    """The strategy of an arm."""
    return arm.partition(":")[0] if ":" in arm else ROUNDS


class Cascading:
    """The last requests of each cascade, and of rounds."""

    def __init__(self) -> None:
        self._answers: dict[str, CascadeEstimator] = {}
        self._rounds: deque[tuple[float, float]] = deque(maxlen=KEPT)  # seconds of a request, and by the solution
        self._curves: dict[tuple[str, float | None], CascadeCurve | None] = {}  # since the last answer

    def observe(self, record: RequestRecord, seconds_per_token: float | None) -> None:
        """Take in a served request; ``seconds_per_token`` is what the solution said of it, None where none did."""
        if record.strategy in CASCADES and record.rule == CASCADE_RULE:
            self._curves.clear()
            self._answers.setdefault(record.strategy, CascadeEstimator(KEPT)).add(record)
        elif record.strategy == ROUNDS and seconds_per_token is not None and record.tokens > 0:
            self._rounds.append((record.total_s, record.tokens * seconds_per_token))

    def curve(self, strategy: str, target_s_per_token: float | None = None) -> CascadeCurve | None:
        """A cascade's curve; None while too little is known. ``target_s_per_token`` stands in for the target's seconds
        where every answer was believed."""
        key = strategy, target_s_per_token
        if key not in self._curves:
            self._curves[key] = self._curve(*key)
        return self._curves[key]

    def _curve(self, strategy: str, target_s_per_token: float | None) -> CascadeCurve | None:
        known = self._answers.get(strategy)
        for seconds in (None, target_s_per_token):
            try:
                return None if known is None else known.curve(seconds, POINTS)
            except TooFewSamples:
                continue
        return None

    @property
    def ratio(self) -> tuple[float, float] | None:
        """Seconds of a request by rounds over those that its solution said, with the standard error; None while too
        few are known."""
        n = len(self._rounds)
        modelled = sum(said for _, said in self._rounds)
        if n < LEAST or modelled <= 0:
            return None
        ratio = sum(took for took, _ in self._rounds) / modelled
        squares = sum((took - ratio * said) ** 2 for took, said in self._rounds)
        return ratio, math.sqrt(squares) / modelled

    def to_state(self) -> dict[str, Any]:
        """JSON-able state that continues exactly."""
        answers = {name: known.to_state() for name, known in self._answers.items()}
        return {"answers": answers, "rounds": [list(pair) for pair in self._rounds]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Cascading:
        """What `to_state` described."""
        self = cls()
        self._answers = {name: CascadeEstimator.from_state(rows, KEPT) for name, rows in state["answers"].items()}
        self._rounds.extend((took, said) for took, said in state["rounds"])
        return self
