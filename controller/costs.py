"""Seconds that drafting, verifying and the rest of a round take, against block length and batch size.

Per bucket of batch rows, with g the block length:

    draft     0 at g = 0, else d0 + d1 g
    verify    v0 + v1 g                    a pass of width g + 1; v1 is small while the pass waits for memory
    overhead  o

Each line is fitted online to the rounds' own measured seconds, with exponential forgetting and coefficients >= 0.
Outliers do not move it: residuals beyond `CLIP` running scales are pulled in, seen from the median of their chunk, so a
two-second pause counts as a slightly slow round while a whole chunk that got slower is followed at once. The first
`WARM_UP` rounds are kept and fitted together, starting from medians, since there is no scale yet. Where block lengths
do not vary the data cannot tell the slope from the fixed part; a weak prior on their ratio then decides.

A bucket with fewer than `WARM_UP` rounds borrows the line of the nearest bucket that has them (in doublings). Before
any data there is a prior shape with a target pass of 20 ms; only its ratios mean something.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from storage.records import TokenBlock

F = npt.NDArray[np.float64]

BUCKETS = (1, 2, 4, 8, 16, 32)  # rows; a round belongs to the smallest that holds it, or to the last
WARM_UP = 16
CHUNK = 32
CLIP = 3.0
PRIOR_ROUNDS = 2.0  # weight of the prior on the ratio of slope and fixed part
SCALE_HALF_LIFE = 100.0

PASS_S, DRAFT_STEP, VERIFY_SLOPE = 0.020, 0.1, 0.02  # prior shape: seconds; per draft token, relative to one pass


class _Line:
    """A robust running fit of seconds = fixed + slope * x, both >= 0; ``ratio`` is the prior of slope / fixed."""

    def __init__(self, ratio: float, half_life: float):
        self.ratio, self.half_life = ratio, half_life
        self.sums = np.zeros(5)  # weights of 1, x, xx, y, xy
        self.scale = 0.0
        self.first: list[tuple[float, float]] = []  # rounds of the warm-up
        self.fit = (0.0, 0.0)

    @property
    def seen(self) -> int:
        """Rounds so far, up to WARM_UP."""
        return len(self.first)

    def add(self, x: F, y: F) -> None:
        """Take in rounds, oldest first: seconds ``y`` at ``x``."""
        room = WARM_UP - len(self.first)
        if room > 0:
            self.first += zip(x[:room].tolist(), y[:room].tolist(), strict=True)
            self._warm_up()
        for i in range(max(0, room), len(x), CHUNK):
            self._follow(x[i : i + CHUNK], y[i : i + CHUNK])

    def at(self, x: F) -> F:
        """Seconds at ``x``."""
        return self.fit[0] + self.fit[1] * x

    def _warm_up(self) -> None:
        x, y = (np.array(column) for column in zip(*self.first, strict=True))
        centre = np.median(y)
        scale = max(1.4826 * float(np.median(np.abs(y - centre))), 0.02 * float(centre))
        model = np.full_like(y, centre)
        for _ in range(5):
            pulled = model + np.clip(y - model, -CLIP * scale, CLIP * scale)
            self.sums = _sums(x, pulled, np.ones_like(x))
            self.fit = self._solve()
            model = self.at(x)
            scale = max(1.4826 * float(np.median(np.abs(y - model))), 1e-3 * float(centre), 1e-9)
        self.scale = scale

    def _follow(self, x: F, y: F) -> None:
        n = len(x)
        model = self.at(x)
        residual = y - model
        middle = float(np.median(residual)) if n >= CHUNK // 4 else 0.0
        reach = CLIP * self.scale
        pulled = np.clip(residual, min(0.0, middle) - reach, max(0.0, middle) + reach)
        age = np.arange(n - 1, -1, -1.0)
        self.sums = self.sums * 0.5 ** (n / self.half_life) + _sums(x, model + pulled, 0.5 ** (age / self.half_life))
        keep = 0.5 ** (n / SCALE_HALF_LIFE)
        spread = 1.2533 * float(np.mean(np.minimum(np.abs(residual), reach)))  # of a normal law, from mean deviation
        level = abs(float(np.mean(model)))
        self.scale = max(keep * self.scale + (1 - keep) * spread, 1e-3 * level, 1e-9)
        self.fit = self._solve()

    def _solve(self) -> tuple[float, float]:
        """Weighted least squares with PRIOR_ROUNDS rounds' worth of ``slope = ratio * fixed``, on the quadrant >= 0."""
        n, x, xx, y, xy = (float(v) for v in self.sums)
        if self.ratio == 0:
            return max(0.0, y / n), 0.0
        w, r = PRIOR_ROUNDS, self.ratio
        a, b, c = n + w * r * r, x - w * r, xx + w
        det = a * c - b * b
        fixed, slope = (c * y - b * xy) / det, (a * xy - b * y) / det
        if slope < 0:
            fixed, slope = y / a, 0.0
        elif fixed < 0:
            fixed, slope = 0.0, xy / c
        return max(0.0, fixed), max(0.0, slope)

    def to_state(self) -> dict[str, Any]:
        return {
            "sums": self.sums.tolist(),
            "scale": self.scale,
            "first": [list(v) for v in self.first],
            "fit": self.fit,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.sums, self.scale = np.array(state["sums"], dtype=np.float64), float(state["scale"])
        self.first = [(float(x), float(y)) for x, y in state["first"]]
        self.fit = (float(state["fit"][0]), float(state["fit"][1]))


def _sums(x: F, y: F, w: F) -> F:
    return np.array([w.sum(), (w * x).sum(), (w * x * x).sum(), (w * y).sum(), (w * x * y).sum()])


class CostModel:
    """Seconds per round by block length 0 to ``g_max`` and batch bucket, measured online.

    A round's weight halves after ``half_life_rounds`` further rounds of its bucket.
    """

    def __init__(self, g_max: int, half_life_rounds: float = 300.0):
        if g_max < 0 or not half_life_rounds > 0:
            raise ValueError(f"g_max must not be negative and the half life positive: {g_max!r}, {half_life_rounds!r}")
        self.g_max, self.half_life_rounds = g_max, float(half_life_rounds)
        self._lines: dict[int, dict[str, _Line]] = {}

    @property
    def ready(self) -> bool:
        """True once some bucket has measured target passes enough to go by."""
        return bool(self.seen_buckets)

    @property
    def seen_buckets(self) -> tuple[int, ...]:
        """Batch buckets with enough rounds of their own, in order."""
        return tuple(b for b in sorted(self._lines) if self._lines[b]["verify"].seen >= WARM_UP)

    def add(self, block: TokenBlock) -> None:
        """Take in the rounds of one telemetry block; rounds that read a prompt, or without a
        measured target pass, are left out."""
        rows = np.minimum(block.round_rows.astype(np.int64), BUCKETS[-1])
        bucket = np.array(BUCKETS)[np.searchsorted(BUCKETS, np.maximum(rows, 1))]
        measured = (block.round_verify_s > 0) & (block.round_prefill == 0)
        width = block.round_width.astype(np.float64)
        seconds = {
            "draft": block.round_draft_s.astype(np.float64),
            "verify": block.round_verify_s.astype(np.float64),
            "overhead": block.round_overhead_s.astype(np.float64),
        }
        for b in np.unique(bucket[measured]).tolist():
            lines = self._lines.setdefault(b, self._new())
            here = measured & (bucket == b)
            for name, line in lines.items():
                use = here & (width > 0) if name == "draft" else here
                if use.any():
                    line.add(width[use], seconds[name][use])

    def draft_s(self, rows: int) -> F:
        """Seconds to draft a block in a batch of ``rows``, by block length: shape [g_max + 1], 0 first, not falling."""
        g = np.arange(self.g_max + 1, dtype=np.float64)
        line = self._line("draft", rows)
        if line is not None:
            return np.where(g > 0, line.at(g), 0.0)
        return DRAFT_STEP * float(self.verify_s(rows)[0]) * g

    def verify_s(self, rows: int) -> F:
        """Seconds of a target pass of width g + 1 in a batch of ``rows``: shape [g_max + 1], not falling."""
        g = np.arange(self.g_max + 1, dtype=np.float64)
        line = self._line("verify", rows)
        return line.at(g) if line is not None else PASS_S * (1 + VERIFY_SLOPE * g)

    def overhead_s(self, rows: int) -> float:
        """Seconds of a round spent on neither, in a batch of ``rows``."""
        line = self._line("overhead", rows)
        return line.fit[0] if line is not None else 0.0

    def width_cost(self, rows: int) -> float:
        """Cost of one more token of width relative to a pass of width 1: near 0 while verification is nearly free."""
        verify = self.verify_s(rows)
        return float((verify[-1] - verify[0]) / (self.g_max * verify[0])) if self.g_max and verify[0] > 0 else 0.0

    def _new(self) -> dict[str, _Line]:
        ratios = {"draft": 2.0, "verify": VERIFY_SLOPE, "overhead": 0.0}
        return {name: _Line(ratio, self.half_life_rounds) for name, ratio in ratios.items()}

    def _line(self, name: str, rows: int) -> _Line | None:
        """The line of the nearest bucket that knows it, by doublings, larger on a tie; else of one warming up."""
        if rows < 1:
            raise ValueError(f"a batch has at least one row, not {rows!r}")
        wanted = math.log2(next((b for b in BUCKETS if rows <= b), BUCKETS[-1]))
        for enough in (WARM_UP, 1):
            known = [b for b, lines in self._lines.items() if lines[name].seen >= enough]
            if known:
                return self._lines[min(known, key=lambda b: (abs(math.log2(b) - wanted), -b))][name]
        return None

    def to_state(self) -> dict[str, Any]:
        """JSON-able state from which `from_state` goes on bit for bit."""
        return {
            "g_max": self.g_max,
            "half_life_rounds": self.half_life_rounds,
            "lines": {str(b): {n: line.to_state() for n, line in lines.items()} for b, lines in self._lines.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The model that wrote ``state``."""
        made = cls(int(state["g_max"]), float(state["half_life_rounds"]))
        for bucket, lines in state["lines"].items():
            made._lines[int(bucket)] = made._new()
            for name, line in lines.items():
                made._lines[int(bucket)][name].restore(line)
        return made
