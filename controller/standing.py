"""Operators' orders that stand for a class, and what they do to its leniency: only ever less, but for the budget."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from storage.records import OperatorAction

_KEPT_ADJUSTMENTS = 64


class Standing:
    """The freeze or forced lossless in force, and the adjustments of the budget."""

    def __init__(self) -> None:
        self.order: OperatorAction | None = None  # the last freeze or lossless that was not resumed
        self._adjusted: list[tuple[float, float]] = []  # when, loss units

    def obey(self, action: OperatorAction) -> None:
        """Take in a freeze, lossless or resume; others change no leniency by themselves."""
        if action.action in ("freeze", "lossless"):
            self.order = action
        elif action.action == "resume":
            self.order = None

    def adjust(self, now: float, amount: float) -> None:
        """Add ``amount`` loss units (fewer, if negative) to the budget for one window from now on."""
        self._adjusted = [*self._adjusted, (now, amount)][-_KEPT_ADJUSTMENTS:]

    def adjusted(self, since: float) -> float:
        """Loss units added to the budget since then."""
        return sum(amount for at, amount in self._adjusted if at > since)

    def limit(self, tau: float, before: float) -> tuple[float, str, str] | None:
        """Touches per request under the order in force, its reason and explanation; None where it changes nothing.

        ``before`` is what was allowed up to now.
        """
        order = self.order
        if order is None:
            return None
        said = f"by {order.who}: {order.why}"
        if order.action == "lossless":
            return 0.0, "forced_lossless", f"Lossless, ordered {said}."
        tau = min(tau, before)
        return tau, "frozen", f"Leniency is frozen at most at {tau:.3g} touches per request, ordered {said}."

    def limit_trial(self, tau: float) -> float:
        """Touches per request of a rule on trial: none while an order stands."""
        return 0.0 if self.order is not None else tau

    def to_state(self) -> list[Any]:
        """JSON-able state that continues exactly."""
        return [None if self.order is None else asdict(self.order), [list(a) for a in self._adjusted]]

    @classmethod
    def from_state(cls, state: list[Any]) -> Standing:
        """The orders that `to_state` described."""
        self = cls()
        self.order = None if state[0] is None else OperatorAction(**state[0])
        self._adjusted = [(at, amount) for at, amount in state[1]]
        return self
