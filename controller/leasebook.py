"""Which touches per request a lease was planned to cause, so that a request is charged to the lease that served it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

Plans = dict[str, tuple[int, int]]  # what a lease allows (rule, or the rule on trial) -> evidence epoch, level


class LeaseBook:
    """Remembers the last ``cap`` changes of plan by lease (epoch, seq); leases with the same plans in a row are one."""

    def __init__(self, cap: int = 4096):
        self.cap = cap
        self._runs: list[tuple[int, int, Plans]] = []  # lease epoch, first seq, plans
        self._last = (-1, -1)

    def add(self, epoch: int, seq: int, plans: Mapping[str, tuple[int, int]]) -> None:
        """Record a lease; leases come in order of (epoch, seq), an older one is ignored."""
        if (epoch, seq) <= self._last:
            return
        self._last = (epoch, seq)
        last = self._runs[-1] if self._runs else None
        if last is None or last[0] != epoch or last[2] != plans:
            self._runs.append((epoch, seq, dict(plans)))
            del self._runs[: -self.cap]

    def find(self, epoch: int, seq: int) -> Plans | None:
        """What a lease allowed; None if it was never recorded or is forgotten."""
        if (epoch, seq) > self._last:
            return None
        i = bisect_right(self._runs, (epoch, seq), key=lambda run: run[:2]) - 1
        return self._runs[i][2] if i >= 0 and self._runs[i][0] == epoch else None

    def to_state(self) -> list[Any]:
        """JSON-able state that continues exactly."""
        runs = [[epoch, seq, [[name, *plan] for name, plan in plans.items()]] for epoch, seq, plans in self._runs]
        return [list(self._last), runs]

    @classmethod
    def from_state(cls, state: list[Any]) -> LeaseBook:
        """The book that `to_state` described."""
        self = cls()
        self._last = (state[0][0], state[0][1])
        self._runs = [(a, b, {name: (e, level) for name, e, level in plans}) for a, b, plans in state[1]]
        return self
