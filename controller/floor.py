"""An absolute floor on the metric: the mean score of served answers over the window, whatever lossless would score."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from controller.allowance import AlertState

if TYPE_CHECKING:
    from policies.class_policy import ClassPolicy

SLICES = 20


class Floor:
    """Sums of served scores over the last ``window_s`` seconds."""

    def __init__(self, window_s: float):
        self.window_s = window_s
        self._slices: deque[list[float]] = deque()  # start, scores, sum

    def add(self, now: float, score: float) -> None:
        """Count one score in [0, 1]."""
        width = self.window_s / SLICES
        start = math.floor(now / width) * width
        if not self._slices or self._slices[-1][0] < start:
            self._slices.append([start, 0, 0.0])
        self._slices[-1][1] += 1
        self._slices[-1][2] += score

    def below(self, floor: float | None, now: float, min_labels: int) -> float | None:
        """The mean score if it is below ``floor``, from ``min_labels`` scores on; else, and without a floor, None."""
        while self._slices and self._slices[0][0] + self.window_s * (1 + 1 / SLICES) <= now:
            self._slices.popleft()
        scores = sum(s[1] for s in self._slices)
        if floor is None or scores < min_labels:
            return None
        mean = sum(s[2] for s in self._slices) / scores
        return mean if mean < floor else None

    def to_state(self) -> list[Any]:
        """JSON-able state that continues exactly."""
        return [self.window_s, [list(s) for s in self._slices]]

    @classmethod
    def from_state(cls, state: list[Any]) -> Floor:
        """The sums that `to_state` described."""
        self = cls(state[0])
        self._slices = deque(list(s) for s in state[1])
        return self


def floor_alerts(scores: Floor, policy: ClassPolicy, now: float) -> tuple[AlertState, ...]:
    """Whether served answers score below the policy's floor, whatever else holds leniency back; none without one."""
    if policy.floor is None:
        return ()
    mean = scores.below(policy.floor, now, policy.min_labels)
    if mean is None:
        return (AlertState("LenityFloorBreached", False, f"not below the floor of {policy.floor:g}"),)
    detail = f"{policy.metric} is {mean:.3f} on served answers, below the floor of {policy.floor:g}"
    return (AlertState("LenityFloorBreached", True, detail),)
