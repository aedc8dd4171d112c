"""The path of knob settings, and the curve of reach and touches along it.

A setting has a level, ``theta = level / n``, and a depth: the rule is lenient at the first ``depth`` positions of a
block and lossless after them (docs/decisions/0001). Within a level leniency rises from lossless (depth 0) to all
positions; of a depth that is not whole the fraction is the mixing weight of the next position. So a rule that is steep
in theta (token_v3 on the bundled pair goes from .001 to .115 touches per token between .6 and .8) has settings with as
few touches as one likes, and the first positions, which unlock most, come first.

Mixing at one position is linear in its weight, so between two whole depths reach and touches are straight lines:
`Curve.at` interpolates without error. Between two thetas nothing can be said.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

F = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Settings:
    """Levels of theta from lossless to as lenient as the rule goes; ``theta`` has shape [levels + 1], 0 first."""

    theta: F
    levels: int

    def __len__(self) -> int:
        return len(self.theta)

    def level_of(self, theta: float) -> int:
        """The level with this theta, or the last one below it."""
        return int(np.searchsorted(self.theta, theta + 1e-9, side="right")) - 1


def settings_path(n: int = 40, top: float = 1.0) -> Settings:
    """The path with ``n >= 1`` levels of theta, evenly spaced up to ``top`` in (0, 1]; raises ValueError otherwise."""
    if n < 1 or not 0 < top <= 1:
        raise ValueError(f"a path needs at least one level and a top in (0, 1], not {n!r} and {top!r}")
    return Settings(theta=top * (np.arange(n + 1) / n), levels=n)


@dataclass(frozen=True)
class Curve:
    """Reach and touches by level and block length, with standard errors; arrays of shape [levels + 1, g_max + 1].

    ``reach[l, j]`` is the probability that a round that is lenient at all positions accepts at least j drafts (1 at
    j=0), ``touches[l, j]`` the expected touches of a round of block length j (0 at j=0). Row 0 is lossless.
    ``by_depth[l, k, j]`` is the reach of a round that is lenient at the first k positions only: ``reach[l, j]`` for
    ``j <= k``, lossless reach at k=0; its touches are ``touches[l, k]``. ``n_eff[j]`` is the effective number of rounds
    that drafted at least j tokens; ``n_eff[0]`` repeats ``n_eff[1]``. ``starts[g]`` is by how much tokens per round at
    block length g differ from what the reach says, since that length starts its rounds elsewhere; None: not at all.
    """

    settings: Settings
    reach: F
    touches: F
    reach_se: F
    touches_se: F
    by_depth: F
    n_eff: F
    starts: F | None = None

    @property
    def g_max(self) -> int:
        """The longest block length the curve speaks of."""
        return int(self.reach.shape[1]) - 1

    @cached_property
    def tokens(self) -> F:
        """Tokens per round ``N = 1 + S_1 + ... + S_g`` by level and block length; shape [levels + 1, g_max + 1]."""
        return np.cumsum(self.reach, axis=1)

    @property
    def shift(self) -> F:
        """`starts` with 1 for None; shape [g_max + 1]."""
        return np.ones(self.g_max + 1) if self.starts is None else self.starts

    def tokens_by_depth(self, level: Ints) -> F:
        """The same for each of these levels at every depth; shape [len(level), g_max + 1 (depth), g_max + 1]."""
        return np.cumsum(self.by_depth[level], axis=2)

    def touches_upper(self, pessimism: float) -> F:
        """Touches plus ``pessimism`` standard errors, not falling with the position; shape [levels + 1, g_max + 1]."""
        if pessimism not in self._uppers:
            raised = self.touches + pessimism * self.touches_se
            self._uppers[pessimism] = np.maximum.accumulate(raised, axis=1)
        return self._uppers[pessimism]

    @cached_property
    def _uppers(self) -> dict[float, F]:
        return {}

    def at(self, level: int, depth: float, pessimism: float = 0.0) -> tuple[F, F]:
        """(reach, touches) of rounds that are lenient at the first ``depth >= 0`` positions: shape [g_max + 1].

        Touches carry ``pessimism`` standard errors, in proportion between whole depths, where they are upper bounds.
        Raises ValueError for a place that is not on the path.
        """
        if not 0 <= level <= self.settings.levels or not depth >= 0:
            raise ValueError(f"level {level!r}, depth {depth!r} is not on the path")
        whole = int(min(depth, self.g_max))
        rest = min(depth, float(self.g_max)) - whole
        upper = self.touches_upper(pessimism)[level]
        reach = self.by_depth[level, whole]
        touches = upper[np.minimum(np.arange(self.g_max + 1), whole)]
        if rest > 0:
            longer = upper[np.minimum(np.arange(self.g_max + 1), whole + 1)]
            reach = (1 - rest) * reach + rest * self.by_depth[level, whole + 1]
            touches = (1 - rest) * touches + rest * longer
        return reach, touches


def flat(reach: F) -> F:
    """``by_depth`` when every position accepts on its own: lenient reach up to k, then what lossless rounds keep.

    ``reach`` of shape [levels + 1, g_max + 1], row 0 lossless. For tests and closed forms.
    """
    n = reach.shape[1]
    safe = np.where(reach[0] > 0, reach[0], 1.0)
    k, j = np.arange(n)[:, None], np.arange(n)
    kept = np.where(j > k, reach[0] / safe[:, None], 1.0)
    return np.asarray(np.where(j > k, reach[:, :, None] * kept, reach[:, None, :]))
