"""What was served and is not settled yet: touched requests whose evidence is still to come."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

Price = Callable[[int, int], float]  # (evidence epoch, level) -> loss units per touch


class InFlight:
    """Touched requests that were served and whose evidence is not settled yet, by when they arrived and their lease."""

    def __init__(self) -> None:
        self.touched = 0
        self._buckets: deque[tuple[float, dict[tuple[int, int], list[int]]]] = deque()

    def add(self, now: float, epoch: int, level: int, touched: int, touches: int) -> None:
        """Count ``touched`` requests with ``touches`` that arrived now."""
        if not self._buckets or self._buckets[-1][0] < now:
            self._buckets.append((now, {}))
        counts = self._buckets[-1][1].setdefault((epoch, level), [0, 0])
        counts[0] += touched
        counts[1] += touches
        self.touched += touched

    def settle(self, before: float) -> None:
        """Everything that arrived before then has its evidence on the account."""
        while self._buckets and self._buckets[0][0] < before:
            self.touched -= sum(touched for touched, _ in self._buckets.popleft()[1].values())

    def touched_since(self, since: float) -> int:
        """Those that arrived at ``since`` or later."""
        if since == -math.inf:
            return self.touched
        return sum(touched for at, cells in self._buckets if at >= since for touched, _ in cells.values())

    def charge(self, price: Price, since: float = -math.inf) -> float:
        """Loss units of what arrived at ``since`` or later: per touch its price, at most 1 a request."""
        return sum(
            min(float(touched), touches * price(*key))
            for at, cells in self._buckets
            if at >= since
            for key, (touched, touches) in cells.items()
        )

    def touches(self, price: Price) -> float:
        """Touches weighted by a price, not capped: what an evidence gap covers."""
        return sum(touches * price(*key) for _, cells in self._buckets for key, (_, touches) in cells.items())

    def to_state(self) -> list[Any]:
        """JSON-able state that continues exactly."""
        return [[at, [[*key, *counts] for key, counts in cells.items()]] for at, cells in self._buckets]

    @classmethod
    def from_state(cls, state: list[Any]) -> InFlight:
        """The counts that `to_state` described."""
        self = cls()
        for at, cells in state:
            self._buckets.append((at, {(epoch, level): [a, b] for epoch, level, a, b in cells}))
            self.touched += sum(a for _, _, a, _ in cells)
        return self
