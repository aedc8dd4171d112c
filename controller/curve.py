"""The path of knob settings, and the curve of reach and touches along it.

One path of knobs leads from lossless to full leniency. It climbs level by level, ``theta = level / n``, and on each
level the mixing weight rho runs from 0 to 1. On the first level, where the first touches come from, rho rises in many
recorded steps; on the others in a few.

Some rules are steep in theta: token_v3 on the bundled pair goes from .001 to .115 touches per token between .6 and .8.
Between two thetas nothing can be said, but at one theta the products of acceptance along a round,
``prod (A0 + rho (A - A0))``, are polynomials in rho with coefficients >= 0, and so are their means. Hence between two
recorded values of rho

- touches lie below the straight line through both in log-log coordinates (posynomials are log-convex in log rho);
- reach lies above the straight line through the two recorded values to the left (it is convex).

`Curve.at` returns these two bounds, so a knob that is leased is exact at a recorded setting and pessimistic in between:
more touches and fewer tokens than there will be. Records at rho = 0 come free, since they are lossless.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

F = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FIRST_LEVEL_RHO = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
LATER_RHO = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Settings:
    """Knob settings along one path from lossless to as lenient as the rule goes.

    ``theta``, ``rho`` (shape [S], in [0, 1]) and ``level`` (0 for lossless, then 1 to ``levels``). Path parameter
    ``s = (level - 1 + rho) / levels`` in [0, 1], 0 for lossless.
    """

    theta: F
    rho: F
    level: Ints
    levels: int

    def __len__(self) -> int:
        return len(self.theta)

    @cached_property
    def s(self) -> F:
        """Path parameter of each setting, increasing; shape [S]."""
        return np.where(self.level > 0, (self.level - 1 + self.rho) / self.levels, 0.0)

    @cached_property
    def bounds(self) -> Ints:
        """``bounds[l]`` is level l's first setting, ``bounds[l + 1] - 1`` its last (rho = 1); shape [levels + 2]."""
        return np.searchsorted(self.level, np.arange(self.levels + 2)).astype(np.int64)

    def theta_of(self, level: int) -> float:
        """Knob theta of a level; 0 for level 0."""
        return float(self.theta[self.bounds[level]])

    def knobs(self, s: float) -> tuple[float, float]:
        """(theta, rho) at path parameter ``s`` in [0, 1]; raises ValueError outside."""
        level, rho = self.place(s)
        return self.theta_of(level), rho

    def place(self, s: float) -> tuple[int, float]:
        """(level, rho) at path parameter ``s`` in [0, 1]; raises ValueError outside."""
        if not 0 <= s <= 1:
            raise ValueError(f"a path parameter must lie in [0, 1], not {s!r}")
        if s == 0:
            return 0, 0.0
        level = min(self.levels, max(1, math.ceil(s * self.levels - 1e-9)))
        return level, min(1.0, s * self.levels - (level - 1))


def settings_path(n: int = 40, top: float = 1.0) -> Settings:
    """The path with ``n >= 1`` levels of theta, evenly spaced up to ``top`` in (0, 1]; raises ValueError otherwise."""
    if n < 1 or not 0 < top <= 1:
        raise ValueError(f"a path needs at least one level and a top in (0, 1], not {n!r} and {top!r}")
    first = [(1, rho) for rho in FIRST_LEVEL_RHO]
    later = [(level, rho) for level in range(2, n + 1) for rho in LATER_RHO]
    levels, rhos = zip((0, 0.0), *first, *later, strict=True)
    level = np.array(levels, dtype=np.int64)
    return Settings(theta=top * (level / n), rho=np.array(rhos), level=level, levels=n)


@dataclass(frozen=True)
class Curve:
    """Reach and touches for every setting and block length, with standard errors; arrays of shape [S, g_max + 1].

    ``reach[s, j]`` is the probability that a round accepts at least j drafts (1 at j=0), ``touches[s, j]`` the expected
    touches of a round of block length j (0 at j=0). Row 0 is lossless. ``n_eff[j]`` is the effective number of rounds
    that drafted at least j tokens; ``n_eff[0]`` repeats ``n_eff[1]``.
    """

    settings: Settings
    reach: F
    touches: F
    reach_se: F
    touches_se: F
    n_eff: F

    @property
    def g_max(self) -> int:
        """The longest block length the curve speaks of."""
        return int(self.reach.shape[1]) - 1

    @cached_property
    def tokens(self) -> F:
        """Tokens per round ``N = 1 + S_1 + ... + S_g`` at every setting and block length; shape [S, g_max + 1]."""
        return np.cumsum(self.reach, axis=1)

    def touches_upper(self, pessimism: float) -> F:
        """Touches plus ``pessimism`` standard errors, made such that touches / rho never falls along a level.

        The latter holds for the true curve and only ever raises a value. Shape [S, g_max + 1].
        """
        if pessimism not in self._uppers:
            rho = self.settings.rho[:, None]
            raised = self.touches + pessimism * self.touches_se
            rate = raised / np.where(rho > 0, rho, 1.0)
            same = (self.settings.level[1:] == self.settings.level[:-1])[:, None]
            for _ in range(int(np.diff(self.settings.bounds).max()) - 1):
                rate[1:] = np.where(same, np.maximum(rate[1:], rate[:-1]), rate[1:])
            self._uppers[pessimism] = np.maximum(raised, rate * rho)
        return self._uppers[pessimism]

    @cached_property
    def _uppers(self) -> dict[float, F]:
        return {}

    def at(self, level: int, rho: float, pessimism: float = 0.0) -> tuple[F, F]:
        """(reach, touches) at a level of the path and ``rho`` in [0, 1]: arrays of shape [g_max + 1].

        Exact at recorded settings; in between reach is a lower and touches an upper bound (module text). Touches carry
        ``pessimism`` standard errors. Raises ValueError for a place that is not on the path.
        """
        if not 0 <= level <= self.settings.levels or not 0 <= rho <= 1:
            raise ValueError(f"level {level!r}, rho {rho!r} is not on the path")
        upper = self.touches_upper(pessimism)
        if level == 0 or rho == 0:
            return self.reach[0], upper[0]
        lo, hi = self.settings.bounds[level], self.settings.bounds[level + 1]
        right = int(lo + np.searchsorted(self.settings.rho[lo:hi], rho))
        right_rho = float(self.settings.rho[right])
        if rho == right_rho:
            return self.reach[right], upper[right]
        if right == lo:
            return np.minimum(self.reach[0], self.reach[right]), upper[right] * (rho / right_rho)
        left = right - 1
        left_rho = float(self.settings.rho[left])
        reach = self.reach[left] + self.reach_slope(left) * (rho - left_rho)
        weight = math.log(rho / left_rho) / math.log(right_rho / left_rho)
        safe = np.where(upper[left] > 0, upper[left], 1.0)
        chord = safe * (upper[right] / safe) ** weight
        straight = upper[right] * (rho - left_rho) / (right_rho - left_rho)
        return reach, np.where(upper[left] > 0, chord, straight)

    def reach_slope(self, left: int) -> F:
        """Slope in rho of the lower bound on reach between settings ``left`` and ``left + 1`` of one level.

        The slope between ``left`` and the recorded setting before it, but never past the setting after it, nor steeper
        than a line through the origin (so that touches per token rise with rho). Shape [g_max + 1].
        """
        rho, reach = self.settings.rho, self.reach
        before = left - 1 if self.settings.level[left - 1] == self.settings.level[left] else 0
        behind = (reach[left] - reach[before]) / (rho[left] - rho[before])
        ahead = (reach[left + 1] - reach[left]) / (rho[left + 1] - rho[left])
        return np.asarray(np.minimum(np.minimum(np.maximum(0.0, behind), ahead), reach[left] / rho[left]))
