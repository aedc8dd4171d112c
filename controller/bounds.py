"""Anytime-valid bounds on a mean: the empirical-Bernstein mixture confidence sequence, and staggered ones for windows.

Observations ``z`` lie in [-1, 1] (differences of two scores). With a predictable guess ``z^_i`` of every observation
and ``V = sum (z_i - z^_i)^2``, the process ``exp(l sum (m_i - z_i) - psi(l) V)`` with ``psi(l) = -ln(1 - l) - l`` is a
nonnegative supermartingale for every ``l`` in [0, 1) as long as ``z_i - z^_i <= 1``; ``m_i`` is the mean of ``z_i``
given the past (Fan et al. 2015; Howard et al. 2021, Theorem 4). The mixture over a fixed grid of ``l`` gives, at all
times at once, ``mean of the m_i <= mean of the z_i + s / n`` where ``s`` solves

    sum_k w_k exp(l_k s - psi(l_k) V) = 1 / significance.

The upper bound clips its guesses to [0, 1] and the lower one to [-1, 0], so that neither needs rescaling. What is
covered is the *running mean* of conditional means, so the bounds stay valid while a controller changes the knobs.
Never intersect them over time: the minimum of past upper bounds is no bound on a mean that has risen since.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.optimize import brentq

# The grid is geometric and its weights fall like 1/k: losses per touch are tiny, so large l matter most.
LAMBDAS = 0.95 * 0.8 ** np.arange(24)
WEIGHTS = (1.0 / np.arange(1, 25)) / (1.0 / np.arange(1, 25)).sum()
PRIOR_WEIGHT = 1.0  # observations that the guess's pull towards 0 is worth

_PSI = -np.log1p(-LAMBDAS) - LAMBDAS
_LOG_WEIGHTS = np.log(WEIGHTS)


def mixture_radius(variance: float, significance: float) -> float:
    """The ``s`` that solves ``sum_k w_k exp(l_k s - psi(l_k) V) = 1 / significance`` for ``variance = V >= 0``.

    ``significance`` is in (0, 1). Returns ``s > 0``; it is about ``ln(1/significance)`` at ``V = 0`` and grows like
    ``sqrt(2 V ln(1/significance))``. Raises ValueError outside those ranges.
    """
    if not (variance >= 0 and math.isfinite(variance)) or not 0 < significance < 1:
        raise ValueError(f"variance {variance!r} must be >= 0 and significance {significance!r} in (0, 1)")
    target = math.log(1 / significance)
    shift = _PSI * variance
    # One term alone reaches the target at high; at low even the largest term, with all the weight, does not exceed it.
    low = float(np.min((target + shift) / LAMBDAS))
    high = float(np.min((target - _LOG_WEIGHTS + shift) / LAMBDAS))

    def excess(s: float) -> float:
        exponents = _LOG_WEIGHTS + LAMBDAS * s - shift
        largest = exponents.max()
        return float(largest + math.log(np.exp(exponents - largest).sum()) - target)

    return float(brentq(excess, low * (1 - 1e-9), high * (1 + 1e-9), xtol=1e-9, rtol=1e-12))


class EmpiricalBernstein:
    """Two one-sided bounds on the running mean of observations in [-1, 1]; its state is four numbers."""

    __slots__ = ("n", "total", "variance_lower", "variance_upper")

    def __init__(self) -> None:
        self.n = 0
        self.total = 0.0
        self.variance_upper = 0.0
        self.variance_lower = 0.0

    def update(self, z: float) -> None:
        """Add one observation in [-1, 1]; raises ValueError otherwise (also for NaN)."""
        if not -1 <= z <= 1:
            raise ValueError(f"an observation must lie in [-1, 1], not {z!r}")
        guess = self.total / (self.n + PRIOR_WEIGHT)  # of the past only
        self.variance_upper += (z - max(guess, 0.0)) ** 2
        self.variance_lower += (z - min(guess, 0.0)) ** 2
        self.total += z
        self.n += 1

    @property
    def mean(self) -> float:
        """The mean of the observations; 0 before the first."""
        return self.total / self.n if self.n else 0.0

    def upper(self, significance: float) -> float:
        """The upper bound, in [-1, 1]; 1 before the first observation."""
        if not self.n:
            return 1.0
        return min(1.0, self.mean + mixture_radius(self.variance_upper, significance) / self.n)

    def lower(self, significance: float) -> float:
        """The lower bound, in [-1, 1]; -1 before the first observation."""
        if not self.n:
            return -1.0
        return max(-1.0, self.mean - mixture_radius(self.variance_lower, significance) / self.n)

    def to_state(self) -> list[float]:
        """The numbers that continue this sequence exactly."""
        return [self.n, self.total, self.variance_upper, self.variance_lower]

    @classmethod
    def from_state(cls, state: list[float]) -> EmpiricalBernstein:
        """The sequence that `to_state` described."""
        self = cls()
        self.n = int(state[0])
        self.total, self.variance_upper, self.variance_lower = (float(v) for v in state[1:])
        return self


class Sequence:
    """A confidence sequence on loss per touch: paired differences of touched requests, and their touches.

    The loss per touch is a ratio of sums: the mean difference times the number of forks, over the touches of the same
    forks. It never exceeds 1, since a touched request has at least one touch and loses at most 1.
    """

    __slots__ = ("_cache", "began", "bound", "touches")

    def __init__(self, began: float):
        self.began = began
        self.bound = EmpiricalBernstein()
        self.touches = 0
        self._cache: dict[tuple[str, float], float] = {}

    @property
    def n(self) -> int:
        """Forks in evidence."""
        return self.bound.n

    def update(self, z: float, touches: int) -> None:
        """Add a fork with score difference ``z`` in [-1, 1] whose lenient branch had ``touches >= 1``."""
        if touches < 1:
            raise ValueError(f"a fork has at least one touch, not {touches!r}")
        self.bound.update(z)
        self.touches += touches
        self._cache.clear()

    @property
    def mean_per_touch(self) -> float:
        """Observed loss per touch; 0 before the first fork."""
        return self.bound.total / self.touches if self.touches else 0.0

    def upper_per_touch(self, significance: float) -> float:
        """Upper bound on loss per touch in [0, 1]; 1 before the first fork."""
        if not self.touches:
            return 1.0
        return max(0.0, min(1.0, self._read("upper", significance) * self.n / self.touches))

    def lower_per_touch(self, significance: float) -> float:
        """Lower bound on loss per touch in [-1, 1]; -1 before the first fork."""
        if not self.touches:
            return -1.0
        return self._read("lower", significance) * self.n / self.touches

    def _read(self, side: str, significance: float) -> float:
        key = (side, significance)
        if key not in self._cache:
            bound = self.bound.upper if side == "upper" else self.bound.lower
            self._cache[key] = bound(significance)
        return self._cache[key]

    def to_state(self) -> list[float]:
        """The numbers that continue this sequence exactly."""
        return [self.began, self.touches, *self.bound.to_state()]

    @classmethod
    def from_state(cls, state: list[float]) -> Sequence:
        """The sequence that `to_state` described."""
        self = cls(float(state[0]))
        self.touches = int(state[1])
        self.bound = EmpiricalBernstein.from_state(state[2:])
        return self


class Staggered:
    """Sequences opened every ``window_s / k``, so that one of them always spans about the last window.

    A reader uses one of at most ``k + 1`` live sequences, so each is read at ``significance / (k + 1)``
    (`split`). Times are steady seconds; ``began`` opens the first sequence.
    """

    def __init__(self, window_s: float, k: int, began: float):
        if not window_s > 0 or k < 1:
            raise ValueError(f"window {window_s!r} must be positive and k {k!r} at least 1")
        self.window_s = window_s
        self.k = k
        self.sequences = [Sequence(began)]

    @property
    def slice_s(self) -> float:
        """Seconds between two openings."""
        return self.window_s / self.k

    def split(self, significance: float) -> float:
        """The error level of each sequence, so that all of them together keep ``significance``."""
        return significance / (self.k + 1)

    def window_start(self, now: float) -> float:
        """Where the window that ends at ``now`` starts, rounded down to a slice boundary."""
        return math.floor((now - self.window_s) / self.slice_s) * self.slice_s

    def advance(self, now: float) -> None:
        """Open the sequences that are due and drop those that no window needs any more; time never goes back."""
        boundary = math.floor(self.sequences[-1].began / self.slice_s) + 1
        boundary = max(boundary, math.floor((now - self.window_s) / self.slice_s))  # a long gap opens only what is read
        while boundary * self.slice_s <= now:
            self.sequences.append(Sequence(boundary * self.slice_s))
            boundary += 1
        start = self.window_start(now)
        while len(self.sequences) > 1 and self.sequences[1].began <= start:
            del self.sequences[0]

    def update(self, z: float, touches: int, time: float) -> None:
        """Add a fork that was touched at ``time`` to every sequence that had begun by then."""
        for sequence in self.sequences:
            if sequence.began <= time:
                sequence.update(z, touches)

    def planning(self, now: float) -> Sequence:
        """The youngest sequence that began at or before the window's start; the oldest before a window has passed."""
        start = self.window_start(now)
        began = [s for s in self.sequences if s.began <= start]
        return began[-1] if began else self.sequences[0]

    def recent(self, now: float) -> Sequence | None:
        """The youngest sequence that is at least one slice old, if it is younger than `planning`."""
        old_enough = [s for s in self.sequences if s.began <= now - self.slice_s]
        return old_enough[-1] if old_enough and old_enough[-1] is not self.planning(now) else None

    def to_state(self) -> dict[str, Any]:
        """JSON-able numbers that continue exactly."""
        return {"window_s": self.window_s, "k": self.k, "sequences": [s.to_state() for s in self.sequences]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Staggered:
        """The staggered sequences that `to_state` described."""
        self = cls(float(state["window_s"]), int(state["k"]), 0.0)
        self.sequences = [Sequence.from_state(s) for s in state["sequences"]]
        return self
