"""How often forks are drawn, and where the bound on what was spent is tuned to.

While a level of touches or the evidence is young, forks are cold (frequent). Later as many are drawn as keep the
uncertainty of the account small against the budget: in a window of N requests with ``tau`` touches each, forked with
probability f, the weighed sum of squares is about ``V / f`` and the radius about ``sqrt(2 L V / f)``; so

    f = 2 L V / (AIM budget)^2

keeps it at the share `AIM` of the budget. The best l of the mixture is then ``2 L / (AIM budget)``, whatever f is. f
lies between the policy's warm and cold probability, and forks take no more passes than the policy allows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from controller.allowance import Reading
from controller.bounds import AIM_WEIGHTS, Sequence
from controller.evidence import LEAST_FORK

if TYPE_CHECKING:
    from policies.model import ClassPolicy

AIM = 0.15  # uncertainty of what a window has spent that is aimed at, as a share of its budget
AIM_LOWER = 1.2  # the mixture is aimed this much below the best l: it forgives a low aim more than a high one
AIM_GRID = math.log(1.5)
LARGEST_AIM = 0.5
REST_TOLERANCE = 1.05  # a level within this factor of tau_seen has matured
MEMORY = 2000.0  # requests over which passes are averaged


class ForkPlan:
    """Probability of forks, from what they are needed for and what they cost."""

    def __init__(self) -> None:
        self._requests = self._passes = 0.0  # remembered served requests and their target passes
        self._forks = self._fork_passes = 0.0

    def served(self, target_passes: float, count: int = 1) -> None:
        """``count`` requests were served with so many target passes in all."""
        keep = (1 - 1 / MEMORY) ** count
        self._requests, self._passes = self._requests * keep + count, self._passes * keep + target_passes

    def ran(self, target_passes: float, count: int = 1) -> None:
        """``count`` forks took so many target passes in all (0: they never ran)."""
        keep = (1 - 1 / MEMORY) ** count
        self._forks, self._fork_passes = self._forks * keep + count, self._fork_passes * keep + target_passes

    @staticmethod
    def aim(policy: ClassPolicy, budget: float) -> float | None:
        """The l that suits a window with that ``budget``, on a grid; None while there is none."""
        if budget <= 0:
            return None
        best = min(LARGEST_AIM, 2 * _log(policy) / (AIM * budget)) / AIM_LOWER
        return math.exp(round(math.log(best) / AIM_GRID) * AIM_GRID)

    def probability(
        self, p: ClassPolicy, r: Reading, tau: float, known: Sequence, requests: float, budget: float, severity: float
    ) -> float:
        """Probability of a fork from now on.

        ``known`` is the evidence planned with, ``requests`` and ``budget`` are those of a window at the rate of late,
        and ``severity`` is the account's (`controller.budget.Ledger`), which counts for as many requests.
        """
        most = self._affordable(p, -math.expm1(-tau))
        if r.labelled < p.min_labels or tau > r.tau_seen * REST_TOLERANCE or tau <= 0 or not known.touches:
            return min(p.fork_cold, most)
        settled = severity * min(1.0, budget / r.budget) if r.budget > 0 else 0.0
        variance = (1 - p.holdback) * max(settled, _to_come(p, tau, known, requests))
        need = 2 * _log(p) * variance / (AIM * budget) ** 2 if budget > 0 else 1.0
        return min(max(p.fork_warm, need), max(p.fork_cold, p.fork_warm), most)

    def shortfall(self, p: ClassPolicy, tau: float, known: Sequence, requests: float, budget: float) -> float:
        """By how much the radius of a window exceeds what is aimed at, as a share of its budget, with as many forks as
        the policy affords at ``tau`` touches per request; 0 where they suffice. Arguments as in `probability`."""
        if budget <= 0 or not known.touches:
            return 0.0
        variance = _to_come(p, tau, known, requests)
        if p.fork_cold >= LEAST_FORK:  # otherwise arms alone are the evidence, each a request of its own
            variance *= (1 - p.holdback) / min(p.fork_cold, max(LEAST_FORK, self._affordable(p, -math.expm1(-tau))))
        reached = math.sqrt(2 * _log(p) * variance) / budget
        return max(0.0, reached - AIM)

    def _affordable(self, p: ClassPolicy, touched: float) -> float:
        """The probability at which forks cost what the policy allows them, by what they have cost."""
        if not self._forks or not self._passes or touched <= 0:
            return 1.0
        per_fork = self._fork_passes / self._forks
        per_request = self._passes / self._requests
        return min(1.0, p.fork_passes_max * per_request / max(touched * per_fork, 1e-9))

    def to_state(self) -> list[Any]:
        """JSON-able state that continues exactly."""
        return [self._requests, self._passes, self._forks, self._fork_passes]

    @classmethod
    def from_state(cls, state: list[Any]) -> ForkPlan:
        """The plan that `to_state` described."""
        self = cls()
        self._requests, self._passes, self._forks, self._fork_passes = state
        return self


def _to_come(p: ClassPolicy, tau: float, known: Sequence, requests: float) -> float:
    """The severity (`controller.budget.Ledger`) of ``requests`` with ``tau`` touches each, by what is known."""
    return (1 - p.holdback) * (known.squares + 1) / known.touches * tau * requests


def _log(policy: ClassPolicy) -> float:
    """``ln(1 / significance)`` and what the mixture costs."""
    return math.log(1 / (1 - policy.confidence)) - math.log(AIM_WEIGHTS[0]) + 0.1
