"""Loss from randomised arms alone: for labels that cannot be paired, and for engines that cannot fork.

A request is assigned to holdback with a known probability h, at its first touch (*triggered*) or before it begins
(plain *two-arm*). With its score s in [0, 1] and any guess s^ made from the past,

    X = (s - s^) (1 / h)   in holdback,    X = -(s - s^) / (1 - h)   otherwise

has, given the past, the mean difference of the two arms: the coin is independent of the outcomes and the guess cancels.
With s^ in [1 - h, 1] no X exceeds 1 / (1 - h), so the upper bound is rescaled by hardly more than one, where an
uncentred estimate would need 1 / h; the lower bound's range is that of the other side, 1 / h. The bound of
`controller.bounds` covers the running mean of conditional differences, whatever steers. A label that was asked for and
is missing counts as its arm's worst. Triggered, the mean is over touched requests: loss per request is it times their
share, which is what makes touched requests worth 1 / P times as much as whole ones.
"""

from __future__ import annotations

from typing import Any

from controller.bounds import mixture_radius

PRIOR = 0.95, 10.0  # the guess before there are scores, and how many of them it is worth


class ScoreGuess:
    """The score that is expected next, from the past only: both arms alike."""

    def __init__(self, number: float = 0.0, total: float = 0.0):
        self.number, self.total = number, total

    def add(self, score: float) -> None:
        """A score in [0, 1] came."""
        self.number, self.total = self.number + 1, self.total + score

    def value(self, holdback: float) -> float:
        """The guess, in [1 - holdback, 1]."""
        mean = (self.total + PRIOR[0] * PRIOR[1]) / (self.number + PRIOR[1])
        return min(1.0, max(1 - holdback, mean))


def difference(score: float | None, *, held_back: bool, holdback: float, guess: float) -> float:
    """X of the module text, at most ``1 / (1 - holdback)``; a missing label (None) counts as its arm's worst."""
    s = float(held_back) if score is None else score
    return (s - guess) / holdback if held_back else -(s - guess) / (1 - holdback)


class ArmDifference:
    """Bounds on the mean of (lossless score - lenient score) from scores of one arm each; ``holdback`` is in (0, 1)."""

    def __init__(self, holdback: float):
        if not 0 < holdback < 1:
            raise ValueError(f"a holdback probability lies between 0 and 1, not {holdback!r}")
        self.holdback = holdback
        self.n = 0
        self.total = self.squares = 0.0
        self._guess = ScoreGuess()

    def add(self, score: float | None, *, held_back: bool) -> None:
        """One assigned request and its score in [0, 1]; None: its label was asked for and never came."""
        if score is not None and not 0 <= score <= 1:
            raise ValueError(f"a score lies in [0, 1], not {score!r}")
        guess = self._guess.value(self.holdback)
        x = difference(score, held_back=held_back, holdback=self.holdback, guess=guess)
        self.n += 1
        self.total += x
        self.squares += x * x
        if score is not None:
            self._guess.add(score)

    @property
    def mean(self) -> float:
        """The estimate; 0 before the first request."""
        return self.total / self.n if self.n else 0.0

    def upper(self, significance: float) -> float:
        """One-sided upper bound on the mean difference, in [-1, 1]; 1 before the first request."""
        if not self.n:
            return 1.0
        return min(1.0, self.mean + mixture_radius(self.squares, significance, 1 / (1 - self.holdback)) / self.n)

    def lower(self, significance: float) -> float:
        """One-sided lower bound, in [-1, 1]; -1 before the first request."""
        if not self.n:
            return -1.0
        return max(-1.0, self.mean - mixture_radius(self.squares, significance, 1 / self.holdback) / self.n)

    def interval(self, significance: float) -> tuple[float, float]:
        """Two-sided: each side at half the significance."""
        return self.lower(significance / 2), self.upper(significance / 2)

    def to_state(self) -> list[Any]:
        """JSON-able state that continues exactly."""
        return [self.holdback, self.n, self.total, self.squares, self._guess.number, self._guess.total]

    @classmethod
    def from_state(cls, state: list[Any]) -> ArmDifference:
        """The estimator that `to_state` described."""
        self = cls(float(state[0]))
        self.n, self.total, self.squares = int(state[1]), float(state[2]), float(state[3])
        self._guess = ScoreGuess(float(state[4]), float(state[5]))
        return self
