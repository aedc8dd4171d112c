"""Sums that forget with time, for what is happening now: rates and ratios of one traffic class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class Meter:
    """Sums that forget with time: what is happening now, not since the start."""

    def __init__(self, half_life_s: float):
        self._half_life_s, self._at = half_life_s, 0.0
        self._sums: dict[str, float] = {}

    def add(self, now: float, **amounts: float) -> None:
        """Add amounts that happened at `now` (steady seconds)."""
        self._decay(now)
        for name, amount in amounts.items():
            self._sums[name] = self._sums.get(name, 0.0) + amount

    def ratio(self, numerator: str, denominator: str) -> float | None:
        """A ratio of sums; None while the denominator is empty."""
        below = self._sums.get(denominator, 0.0)
        return self._sums.get(numerator, 0.0) / below if below > 1e-9 else None

    def rate(self, name: str, now: float) -> float:
        """Amount per second over the remembered past."""
        self._decay(now)
        return self._sums.get(name, 0.0) * float(np.log(2.0)) / self._half_life_s

    def to_state(self) -> dict[str, Any]:
        """JSON-able state."""
        return {"at": self._at, "sums": dict(self._sums)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the state that `to_state` wrote."""
        self._at, self._sums = float(state["at"]), dict(state["sums"])

    def _decay(self, now: float) -> None:
        if now > self._at:
            factor = 0.5 ** ((now - self._at) / self._half_life_s)
            self._sums = {name: amount * factor for name, amount in self._sums.items()}
            self._at = now
