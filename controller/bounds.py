"""Anytime-valid bounds on a mean: the empirical-Bernstein mixture confidence sequence, and staggered ones for windows.

Observations ``z`` lie in [-1, 1] (differences of two scores). With a predictable guess ``z^_i`` of every observation
and ``V = sum (z_i - z^_i)^2``, the process ``exp(l sum (m_i - z_i) - psi(l) V)`` with ``psi(l) = -ln(1 - l) - l`` is a
nonnegative supermartingale for every ``l`` in [0, 1) as long as ``z_i - z^_i <= 1``; ``m_i`` is the mean of ``z_i``
given the past (Fan et al. 2015; Howard et al. 2021, Theorem 4). The mixture over a fixed grid of ``l`` gives, at all
times at once, ``mean of the m_i <= mean of the z_i + s / n`` where ``s`` solves

    sum_k w_k exp(l_k s - psi(l_k) V) = 1 / significance.

Where ``z_i - z^_i <= c`` only, ``psi(l c) / c^2`` takes the place of ``psi(l)`` and ``l c < 1``. The upper bound clips
its guesses to [0, 1] and the lower one to [-1, 0], so that neither needs rescaling. A lower bound on a large mean is
loose that way; a second one with guesses in [0, 1] and c = 2 runs beside it, each at half the significance.

What is covered is the *running mean* of conditional means, so the bounds stay valid while a controller changes the
knobs. Never intersect them over time: the minimum of past upper bounds is no bound on a mean that has risen since.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

F = npt.NDArray[np.float64]

# The grid is geometric and its weights fall like 1/k: losses per touch are tiny, so large l matter most.
LAMBDAS = 0.95 * 0.8 ** np.arange(24)
WEIGHTS = (1.0 / np.arange(1, 25)) / (1.0 / np.arange(1, 25)).sum()
PRIOR_WEIGHT = 1.0  # observations that the guess's pull towards 0 is worth

# A tuned mixture puts this much weight at and above one l (for budgets that fall after it was chosen), the rest on the
# grid.
AIM_SPREAD = np.array([1.0, 2.5, 6.0])
AIM_WEIGHTS = np.array([0.56, 0.12, 0.12])

_LOG_WEIGHTS = np.log(WEIGHTS)


@lru_cache(maxsize=4096)
def mixture_radius(variance: float, significance: float, scale: float = 1.0, aim: float | None = None) -> float:
    """The ``s`` that solves ``sum_k w_k exp(l_k s - psi(l_k c) V / c^2) = 1 / significance``.

    ``variance`` is V >= 0, ``significance`` in (0, 1), ``scale`` is c > 0; terms with ``l_k c >= 1`` are left out. With
    ``aim`` > 0, most of the weight lies at that l and above (`AIM_SPREAD`). Returns ``s > 0``, about
    ``c ln(1/significance)`` at V = 0, growing like ``sqrt(2 V ln(1/significance))``. Raises ValueError outside those
    ranges.
    """
    return radius_of(((variance, scale),), significance, aim)


def radius_of(parts: tuple[tuple[float, float], ...], significance: float, aim: float | None = None) -> float:
    """`mixture_radius` where observations differ in scale: ``parts`` are pairs (V, c), and the sum over them of
    ``psi(l_k c) V / c^2`` takes the place of one term. What scale an observation has must be known before it is made.
    """
    variances, scales = np.array(parts, dtype=np.float64).T
    if not (variances.min() >= 0 and np.isfinite(variances).all()) or not 0 < significance < 1:
        raise ValueError(f"variances {variances!r} must be >= 0 and significance {significance!r} in (0, 1)")
    if not 0 < scales.min() <= scales.max() < math.inf:
        raise ValueError(f"scales {scales!r} must be positive")
    lambdas, log_weights = _mixture(float(scales.max()), aim)
    target = math.log(1 / significance)
    steps = lambdas[:, None] * scales
    shift = (-np.log1p(-steps) - steps) @ (variances / scales**2) - log_weights
    # One term alone reaches the target at s; Newton's steps on a convex function fall from there to the root.
    s = float(np.min((target + shift) / lambdas))
    for _ in range(100):
        exponents = lambdas * s - shift
        largest = exponents.max()
        terms = np.exp(exponents - largest)
        total = float(terms.sum())
        step = (float(largest) + math.log(total) - target) * total / float(terms @ lambdas)
        s -= step
        if step <= 1e-12 * s:
            break
    return s


@lru_cache(maxsize=256)
def _mixture(scale: float, aim: float | None) -> tuple[F, F]:
    """The l of a mixture that are below ``1 / scale``, and the logarithms of their weights."""
    lambdas, log_weights = LAMBDAS, _LOG_WEIGHTS
    if aim is not None:
        lambdas = np.concatenate((aim * AIM_SPREAD, LAMBDAS))
        log_weights = np.concatenate((np.log(AIM_WEIGHTS), _LOG_WEIGHTS + math.log1p(-AIM_WEIGHTS.sum())))
    keep = lambdas * scale < 1 - 1e-9
    if not keep.any():  # beyond what the grid was made for: one small l
        return np.array([0.5 / scale]), np.array([0.0])
    return np.asarray(lambdas[keep], dtype=np.float64), np.asarray(log_weights[keep], dtype=np.float64)


class EmpiricalBernstein:
    """Two one-sided bounds on the running mean of observations in [-1, 1]; its state is four numbers."""

    __slots__ = ("n", "total", "variance_lower", "variance_upper")

    def __init__(
        self, n: int = 0, total: float = 0.0, variance_upper: float = 0.0, variance_lower: float = 0.0
    ) -> None:
        self.n, self.total = n, total
        self.variance_upper, self.variance_lower = variance_upper, variance_lower

    def update(self, z: float) -> None:
        """Add one observation in [-1, 1]; raises ValueError otherwise (also for NaN)."""
        if not -1 <= z <= 1:
            raise ValueError(f"an observation must lie in [-1, 1], not {z!r}")
        self.add(1, z, z * z, self.total / (self.n + PRIOR_WEIGHT))  # the guess is of the past only

    def add(self, n: int, total: float, squares: float, guess: float) -> None:
        """Add ``n`` observations at once, all guessed alike from what came before: their sum and sum of squares."""
        above, below = max(guess, 0.0), min(guess, 0.0)
        self.variance_upper += max(0.0, squares - 2 * above * total + n * above * above)
        self.variance_lower += max(0.0, squares - 2 * below * total + n * below * below)
        self.total += total
        self.n += n

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
        """The lower bound, in [-1, 1]; -1 before the first observation. The better of two at half the significance."""
        if not self.n:
            return -1.0
        radius = min(
            mixture_radius(self.variance_lower, significance / 2),
            mixture_radius(self.variance_upper, significance / 2, 2.0),
        )
        return max(-1.0, self.mean - radius / self.n)

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

    __slots__ = ("began", "bound", "squares", "touches")

    def __init__(self, began: float):
        self.began = began
        self.bound = EmpiricalBernstein()
        self.touches = 0
        self.squares = 0.0  # sum of the squared differences

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
        self.squares += z * z

    def add(self, n: int, total: float, squares: float, touches: int) -> None:
        """Add ``n`` forks at once: the sums of differences, of their squares, and of touches."""
        self.bound.add(n, total, squares, self.bound.total / (self.n + PRIOR_WEIGHT))
        self.touches += touches
        self.squares += squares

    def include(self, other: Sequence) -> None:
        """Add what another sequence has seen; it has to follow on this one."""
        self.bound.n += other.bound.n
        self.bound.total += other.bound.total
        self.bound.variance_upper += other.bound.variance_upper
        self.bound.variance_lower += other.bound.variance_lower
        self.touches += other.touches
        self.squares += other.squares

    @property
    def mean_per_touch(self) -> float:
        """Observed loss per touch; 0 before the first fork."""
        return self.bound.total / self.touches if self.touches else 0.0

    def upper_per_touch(self, significance: float) -> float:
        """Upper bound on loss per touch in [0, 1]; 1 before the first fork."""
        if not self.touches:
            return 1.0
        return max(0.0, min(1.0, self.bound.upper(significance) * self.n / self.touches))

    def lower_per_touch(self, significance: float) -> float:
        """Lower bound on loss per touch in [-1, 1]; -1 before the first fork."""
        if not self.touches:
            return -1.0
        return self.bound.lower(significance) * self.n / self.touches

    def to_state(self) -> list[float]:
        """The numbers that continue this sequence exactly."""
        return [self.began, self.touches, self.squares, *self.bound.to_state()]

    @classmethod
    def from_state(cls, state: list[float]) -> Sequence:
        """The sequence that `to_state` described."""
        self = cls(float(state[0]))
        self.touches, self.squares = int(state[1]), float(state[2])
        self.bound = EmpiricalBernstein.from_state(state[3:])
        return self


class Staggered:
    """Sequences opened every ``window_s / k``, so that one of them always spans about the last window.

    All of them guess alike, from the evidence that is kept (every guess is of the past only), so their sums differ only
    in where they begin: what is kept are the pieces between two openings, and a sequence is the sum of the pieces since
    it was opened. At most ``k + 1`` are live; a reader that must have all of them right at once reads each at
    ``significance / (k + 1)`` (`split`). Times are steady seconds; ``began`` opens the first sequence.
    """

    def __init__(self, window_s: float, k: int, began: float):
        if not window_s > 0 or k < 1:
            raise ValueError(f"window {window_s!r} must be positive and k {k!r} at least 1")
        self.window_s = window_s
        self.k = k
        self._pieces: deque[Sequence] = deque([Sequence(began)])

    @property
    def slice_s(self) -> float:
        """Seconds between two openings."""
        return self.window_s / self.k

    @property
    def began(self) -> float:
        """When the oldest live sequence was opened."""
        return self._pieces[0].began

    @property
    def sequences(self) -> list[Sequence]:
        """Every live sequence, oldest first."""
        return [self._since(i) for i in range(len(self._pieces))]

    def split(self, significance: float) -> float:
        """The error level of each sequence, so that all of them together keep ``significance``."""
        return significance / (self.k + 1)

    def window_start(self, now: float) -> float:
        """Where the window that ends at ``now`` starts, rounded down to a slice boundary."""
        return math.floor((now - self.window_s) / self.slice_s) * self.slice_s

    def advance(self, now: float) -> None:
        """Open the sequences that are due and drop those that no window needs any more; time never goes back."""
        boundary = math.floor(self._pieces[-1].began / self.slice_s) + 1
        boundary = max(boundary, math.floor((now - self.window_s) / self.slice_s))  # a long gap opens only what is read
        while boundary * self.slice_s <= now:
            self._pieces.append(Sequence(boundary * self.slice_s))
            boundary += 1
        start = self.window_start(now)
        while len(self._pieces) > 1 and self._pieces[1].began <= start:
            self._pieces.popleft()

    def update(self, z: float, touches: int, time: float) -> None:
        """Add a fork that was touched at ``time`` to every sequence that had begun by then."""
        if not -1 <= z <= 1 or touches < 1:
            raise ValueError(f"a fork has a difference in [-1, 1] and touches, not {z!r} and {touches!r}")
        self.add(1, z, z * z, touches, time)

    def add(self, n: int, total: float, squares: float, touches: int, time: float) -> None:
        """Add ``n`` forks that were touched at ``time``: the sums of differences, of their squares, and of touches."""
        guess = sum(p.bound.total for p in self._pieces) / (sum(p.n for p in self._pieces) + PRIOR_WEIGHT)
        for piece in reversed(self._pieces):
            if piece.began <= time:
                piece.bound.add(n, total, squares, guess)
                piece.touches += touches
                piece.squares += squares
                return

    def planning(self, now: float) -> Sequence:
        """The youngest sequence that began at or before the window's start; the oldest before a window has passed."""
        start = self.window_start(now)
        return self._since(max((i for i, p in enumerate(self._pieces) if p.began <= start), default=0))

    def recent(self, now: float) -> Sequence | None:
        """The youngest sequence that is at least one slice old, if it is younger than `planning`."""
        old = [i for i, p in enumerate(self._pieces) if p.began <= now - self.slice_s]
        start = self.window_start(now)
        planning = max((i for i, p in enumerate(self._pieces) if p.began <= start), default=0)
        return self._since(old[-1]) if old and old[-1] != planning else None

    def _since(self, first: int) -> Sequence:
        made = Sequence(self._pieces[first].began)
        for i, piece in enumerate(self._pieces):
            if i >= first:
                made.include(piece)
        return made

    def to_state(self) -> dict[str, Any]:
        """JSON-able numbers that continue exactly."""
        return {"window_s": self.window_s, "k": self.k, "pieces": [s.to_state() for s in self._pieces]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Staggered:
        """The staggered sequences that `to_state` described."""
        self = cls(float(state["window_s"]), int(state["k"]), 0.0)
        self._pieces = deque(Sequence.from_state(s) for s in state["pieces"])
        return self
