"""What is known about the loss per touch of one accept rule (under one strategy): a track of its own.

Loss per touch differs between rules by two orders of magnitude, so evidence, its epochs, what was seen and what is
allowed are kept for each. What was spent is not: all tracks share one account (`controller.budget`).
"""

from __future__ import annotations

import math
from typing import Any

from controller.bounds import Sequence, Staggered
from controller.evidence import Evidence

U_FLOOR = 1e-4  # loss per touch is never believed to be below this
SHARE_OF_ERROR = 0.5  # standard errors added to the estimate that is planned with


class Track:
    """Evidence about one rule. ``tau`` is what it may touch per request now; times are steady seconds."""

    def __init__(self, name: str, epoch: int, window_s: float, k: int, began: float):
        self.name, self.epoch, self.began = name, epoch, began
        self.sequences = Staggered(window_s, k, began)
        self.tau = 0.0
        self.matured = self.matured_at_step = 0  # labelled forks in all, and when it was loosened last
        self.changed: Sequence | None = None  # what came since a detected rise of loss
        self.factor = 1.0  # by which it rose
        self.arms = False  # whether some of it is by assignment: then no lower bound holds

    def restart(self, epoch: int, now: float) -> None:
        """Forget everything: a new evidence epoch."""
        window_s, k = self.sequences.window_s, self.sequences.k
        self.__init__(self.name, epoch, window_s, k, now)  # type: ignore[misc]

    def add(self, e: Evidence) -> None:
        """Take in settled forks of this epoch."""
        touched_at = max(e.touched_at, self.began)
        self.sequences.add(e.n, e.total, e.squares, e.touches, touched_at)
        self.matured += e.labelled
        self.arms = self.arms or e.arms
        if self.changed is not None and not e.arms and touched_at >= self.changed.began:
            self.changed.add(e.n, e.total, e.squares, e.touches)

    def rose(self, factor: float, now: float) -> None:
        """The loss of its forks was detected to have risen by ``factor``."""
        self.factor = max(factor, self.factor) if self.changed is not None else factor
        self.changed = Sequence(now)

    def since_change(self, now: float, enough: int) -> float | None:
        """Loss per touch to plan with at least, for one window after a rise: what was planned with times the factor,
        from ``enough`` forks on what came since; None without a rise."""
        if self.changed is None:
            return None
        if now - self.changed.began > self.sequences.window_s:
            self.changed = None
            return None
        if self.changed.n >= enough:
            return planned_per_touch(self.changed)
        return min(1.0, planned_per_touch(self.sequences.planning(now)) * self.factor)

    def upper(self, sequence: Sequence, significance: float) -> float:
        """Upper bound on loss per touch, one of all live sequences that are right together."""
        return max(U_FLOOR, sequence.upper_per_touch(self.sequences.split(significance)))

    def to_state(self) -> list[Any]:
        """JSON-able state that continues exactly."""
        known = [self.name, self.epoch, self.began, self.sequences.to_state()]
        changed = None if self.changed is None else self.changed.to_state()
        return [*known, self.tau, self.matured, self.matured_at_step, changed, self.factor, self.arms]

    @classmethod
    def from_state(cls, state: list[Any]) -> Track:
        """The track that `to_state` described."""
        name, epoch, began, sequences, tau, matured, at_step, changed, factor, *arms = state
        self = cls(name, epoch, sequences["window_s"], sequences["k"], began)
        self.sequences = Staggered.from_state(sequences)
        self.tau, self.matured, self.matured_at_step = tau, matured, at_step
        self.arms = bool(arms and arms[0])
        self.changed, self.factor = None if changed is None else Sequence.from_state(changed), factor
        return self


def planned_per_touch(sequence: Sequence) -> float:
    """Loss per touch to plan with, in [U_FLOOR, 1]: one loss more than seen and a share of its standard error.

    No guarantee rests on it: what is spent is bounded by the account, which pulls back before it is overdrawn. 1 before
    the first fork.
    """
    if not sequence.touches:
        return 1.0
    seen = max(0.0, sequence.bound.total) + 1 + SHARE_OF_ERROR * math.sqrt(sequence.squares + 1)
    return min(1.0, max(U_FLOOR, seen / sequence.touches))
