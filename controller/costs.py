"""Seconds that drafting, verifying and the rest of a round take, against block length and batch size.

Per bucket of batch rows, with g the block length:

    draft     0 at g = 0, else d0 + d1 g
    verify    v0 + v1 g                    a pass of width g + 1; v1 is small while the pass waits for memory
    overhead  o

Each line is fitted online to the rounds' own measured seconds, with exponential forgetting and coefficients >= 0.
A pass is not always straight in its width: kernels have steps. So each width's own mean corrects the line, as far as
its rounds outweigh `STEP_ROUNDS`, with straight lines between the widths seen and never falling.

Outliers do not move it: residuals beyond `CLIP` running scales are pulled in, seen from the median of their chunk, so a
two-second pause counts as a slightly slow round while a whole chunk that got slower is followed at once. Rounds wait
until `LEAST` have come, so that every chunk has a median, however few rounds a block brings. The first
`WARM_UP` rounds are kept and fitted together, starting from medians, since there is no scale yet. Where block lengths
do not vary the data cannot tell the slope from the fixed part; a weak prior on their ratio then decides. A new bucket
takes it from the nearest one, with the slope of verification scaled by rows.

Workers differ. Each has a factor on the pool's lines, a running median of its seconds over theirs, and its rounds are
divided by it before they are fitted, so that a round's shape is pooled from all. The factors average to one (in
logarithms, weighted by rounds), so what all workers share moves the lines, and with one worker there is no factor. A
worker whose clock is wrong does not move the lines: rounds of no possible duration are left out, and so are those of a
worker whose factor is more than `FAR` away from the middle one or whose seconds vary more than e-fold.

A bucket with fewer than `WARM_UP` rounds borrows the line of the nearest bucket that has them (in doublings). Before
any data there is a prior shape with a target pass of 20 ms; only its ratios mean something.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from storage.records import TokenBlock

F = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BUCKETS = (1, 2, 4, 8, 16, 32)  # rows; a round belongs to the smallest that holds it, or to the last
WARM_UP = 16
CHUNK = 32
LEAST = 8  # rounds in a chunk
CLIP = 3.0
PRIOR_ROUNDS = 0.5  # weight of the prior on the ratio of slope and fixed part
SCALE_HALF_LIFE = 100.0
STEP_ROUNDS, WIDEST = 8.0, 64  # weight of the line against a width's own mean; widths kept apart

SHORTEST_S, LONGEST_S = 1e-5, 60.0  # a target pass outside cannot be
FAR = 8.0
WORKER_ROUNDS = 200.0  # memory of a worker's factor
SETTLED = 32.0  # rounds after which a worker's factor and spread say something
MAX_WORKERS = 256

PASS_S, DRAFT_STEP, VERIFY_SLOPE = 0.020, 0.1, 0.02  # prior shape: seconds; per draft token, relative to one pass


class _Line:
    """A robust running fit of seconds = fixed + slope * x, both >= 0; ``ratio`` is the prior of slope / fixed."""

    def __init__(self, ratio: float, half_life: float):
        self.ratio, self.half_life = ratio, half_life
        self.sums = np.zeros(5)  # weights of 1, x, xx, y, xy
        self.plain = 0.0  # weight of rounds at x = 0
        self.scale = 0.0
        self.first: list[tuple[float, float]] = []  # rounds of the warm-up
        self.waiting: list[tuple[float, float]] = []  # fewer than LEAST
        self.fit = (0.0, 0.0)
        self.steps = np.zeros((2, WIDEST + 1))  # by x: weight, seconds

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
        self.waiting += zip(x[max(0, room) :].tolist(), y[max(0, room) :].tolist(), strict=True)
        while len(self.waiting) >= LEAST:
            chunk, self.waiting = self.waiting[:CHUNK], self.waiting[CHUNK:]
            self._follow(*(np.array(column) for column in zip(*chunk, strict=True)))

    def at(self, x: F) -> F:
        """Seconds at ``x`` on the line."""
        return self.fit[0] + self.fit[1] * x

    def stepped(self, x: F) -> F:
        """Seconds at ``x`` = 0, 1, 2, ..., corrected by the means of the x that were seen; not falling."""
        line, seen = self.at(x), np.flatnonzero(self.steps[0] > 0)
        if not len(seen):
            return line
        weight, total = self.steps[:, seen]
        own = (total / weight - self.at(seen.astype(np.float64))) * weight / (weight + STEP_ROUNDS)
        return np.asarray(np.maximum.accumulate(np.maximum(line + np.interp(x, seen, own), 0.0)))

    def _step(self, x: F, y: F, weight: F) -> None:
        at = np.minimum(x, WIDEST).astype(np.int64)
        self.steps += [np.bincount(at, w, minlength=WIDEST + 1) for w in (weight, weight * y)]

    def _warm_up(self) -> None:
        x, y = (np.array(column) for column in zip(*self.first, strict=True))
        centre = np.median(y)
        scale = max(1.4826 * float(np.median(np.abs(y - centre))), 0.02 * float(centre))
        model = np.full_like(y, centre)
        for _ in range(5):
            pulled = model + np.clip(y - model, -CLIP * scale, CLIP * scale)
            self.sums = _sums(x, pulled, np.ones_like(x))
            self.plain = float(np.count_nonzero(x == 0))
            self.steps[:] = 0.0
            self._step(x, pulled, np.ones_like(x))
            self.fit = self._solve()
            model = self.at(x)
            scale = max(1.4826 * float(np.median(np.abs(y - model))), 1e-3 * float(centre), 1e-9)
        self.scale = scale

    def _follow(self, x: F, y: F) -> None:
        n = len(x)
        model = self.at(x)
        residual = y - model
        middle = float(np.median(residual))
        reach = CLIP * self.scale
        pulled = np.clip(residual, min(0.0, middle) - reach, max(0.0, middle) + reach)
        age = np.arange(n - 1, -1, -1.0)
        weight = 0.5 ** (age / self.half_life)
        self.forget(0.5 ** (n / self.half_life))
        self.sums = self.sums + _sums(x, model + pulled, weight)
        self._step(x, model + pulled, weight)
        self.plain += float(weight[x == 0].sum())
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

    def forget(self, keep: float) -> None:
        """Scale the weight of everything remembered, after the warm-up, by ``keep`` in [0, 1]."""
        self.sums, self.steps = self.sums * keep, self.steps * keep
        self.plain *= keep

    def to_state(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "sums": self.sums.tolist(),
            "plain": self.plain,
            "scale": self.scale,
            "first": [list(v) for v in self.first],
            "waiting": [list(v) for v in self.waiting],
            "fit": self.fit,
            "steps": [[int(x), *self.steps[:, x].tolist()] for x in np.flatnonzero(self.steps[0])],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.ratio = float(state.get("ratio", self.ratio))
        self.sums, self.scale = np.array(state["sums"], dtype=np.float64), float(state["scale"])
        self.plain = float(state.get("plain", 0.0))
        self.first = [(float(x), float(y)) for x, y in state["first"]]
        self.waiting = [(float(x), float(y)) for x, y in state.get("waiting", ())]
        self.fit = (float(state["fit"][0]), float(state["fit"][1]))
        for x, weight, total in state.get("steps", ()):
            self.steps[:, int(x)] = float(weight), float(total)


def _sums(x: F, y: F, w: F) -> F:
    return np.array([w.sum(), (w * x).sum(), (w * x * x).sum(), (w * y).sum(), (w * x * y).sum()])


@dataclass
class _Worker:
    """How one worker's seconds compare with the pool's lines: logarithm of its factor, spread around it, rounds."""

    log_factor: float = 0.0
    spread: float = 0.0
    rounds: float = 0.0
    trusted: bool = False

    @property
    def say(self) -> float:
        """Weight in who is the middle one: who is trusted outweighs one newcomer, not two."""
        return self.rounds * (1.5 if self.trusted else 1.0)

    def follow(self, log_ratio: F) -> None:
        """Take in the logarithms of rounds' seconds over the pool's lines."""
        n = len(log_ratio)
        keep = self.rounds / (self.rounds + n)
        middle = float(np.median(log_ratio))
        self.log_factor = keep * self.log_factor + (1 - keep) * middle
        self.spread = keep * self.spread + (1 - keep) * float(np.mean(np.minimum(8.0, np.abs(log_ratio - middle))))
        self.rounds = min(self.rounds + n, WORKER_ROUNDS)


class CostModel:
    """Seconds per round by block length 0 to ``g_max`` and batch bucket, measured online.

    A round's weight halves after ``half_life_rounds`` further rounds of its bucket.
    """

    def __init__(self, g_max: int, half_life_rounds: float = 300.0):
        if g_max < 0 or not half_life_rounds > 0:
            raise ValueError(f"g_max must not be negative and the half life positive: {g_max!r}, {half_life_rounds!r}")
        self.g_max, self.half_life_rounds = g_max, float(half_life_rounds)
        self._lines: dict[int, dict[str, _Line]] = {}
        self._workers: dict[str, _Worker] = {}

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
        bucket, measured = _buckets(block), _measured(block)
        trusted, factor = self._judge(block)
        if not trusted:
            return
        width = block.round_width.astype(np.float64)
        seconds = {
            "draft": block.round_draft_s.astype(np.float64) / factor,
            "verify": block.round_verify_s.astype(np.float64) / factor,
            "overhead": block.round_overhead_s.astype(np.float64) / factor,
        }
        for b in np.unique(bucket[measured]).tolist():
            if b not in self._lines:
                self._lines[b] = self._new(b)
            lines = self._lines[b]
            here = measured & (bucket == b)
            for name, line in lines.items():
                use = here & (width > 0) if name == "draft" else here
                if use.any():
                    line.add(width[use], seconds[name][use])

    def log_ratio(self, block: TokenBlock) -> F:
        """Natural logarithm of each measured round's seconds over what is expected of this worker; empty if nothing is.

        Call it before `add`. Shape [measured rounds whose bucket is known].
        """
        factor = self.worker_factors.get(block.worker, 1.0)
        return self._log_ratio(block, ("draft", "verify", "overhead")) - math.log(factor)

    @property
    def worker_factors(self) -> dict[str, float]:
        """Each worker's seconds over the pool's, 1 for a lone one."""
        return {name: math.exp(worker.log_factor) for name, worker in self._workers.items()}

    @property
    def distrusted(self) -> tuple[str, ...]:
        """Workers whose seconds are left out because their clock or load cannot be like the others'."""
        return tuple(name for name, worker in self._workers.items() if not worker.trusted)

    def forget(self, keep: float) -> None:
        """Scale the weight of everything remembered by ``keep`` in [0, 1], so that new rounds outweigh it sooner."""
        for lines in self._lines.values():
            for line in lines.values():
                line.forget(keep)
        for worker in self._workers.values():
            worker.rounds *= keep

    def narrow_rounds(self, rows: int) -> float:
        """Remembered rounds of this batch bucket that were plain decoding, in rounds' weight: what the line's start
        rests on. Infinite for a bucket that only borrows."""
        line = self._lines.get(_bucket_of(rows), {}).get("verify")
        return line.plain if line is not None else math.inf

    def _log_ratio(self, block: TokenBlock, names: tuple[str, ...]) -> F:
        bucket, measured = _buckets(block), _measured(block)
        columns = {"draft": block.round_draft_s, "verify": block.round_verify_s, "overhead": block.round_overhead_s}
        seen = sum(columns[name].astype(np.float64) for name in names)
        found = []
        for b in np.unique(bucket[measured]).tolist():
            if b not in self.seen_buckets:
                continue
            here = measured & (bucket == b)
            width = np.minimum(block.round_width[here].astype(np.int64), self.g_max)
            parts = {"draft": self.draft_s(b), "verify": self.verify_s(b)}
            expected = sum(parts[name][width] if name in parts else self.overhead_s(b) for name in names)
            found.append(np.log(np.maximum(np.asarray(seen)[here], 1e-9) / np.maximum(expected, 1e-9)))
        return np.concatenate(found) if found else np.zeros(0)

    def _judge(self, block: TokenBlock) -> tuple[bool, float]:
        """Follow the block's worker; whether its rounds count, and its factor."""
        if block.worker not in self._workers and len(self._workers) >= MAX_WORKERS:
            del self._workers[min(self._workers, key=lambda name: self._workers[name].rounds)]
        worker = self._workers.setdefault(block.worker, _Worker())
        for other in self._workers.values():  # a worker that is gone stops counting
            if other is not worker:
                other.rounds *= 0.5 ** (len(block.round_rows) / (20 * WORKER_ROUNDS))
        ratio = self._log_ratio(block, ("verify",))
        if len(ratio):
            worker.follow(ratio)
        elif not self.ready:
            worker.rounds = min(worker.rounds + len(block.round_rows), WORKER_ROUNDS)
        self._compare()
        return worker.trusted, math.exp(worker.log_factor)

    def _compare(self) -> None:
        """See who can be trusted, and let the factors of those average to one."""
        ranked = sorted(self._workers.values(), key=lambda worker: worker.log_factor)
        say = np.cumsum([worker.say for worker in ranked])
        middle = ranked[int(np.searchsorted(say, say[-1] / 2))].log_factor
        for worker in ranked:
            erratic = worker.rounds >= SETTLED and worker.spread > 1 and len(ranked) > 1
            worker.trusted = not erratic and abs(worker.log_factor - middle) <= math.log(FAR)
        heard = [worker for worker in ranked if worker.trusted]
        weight = sum(worker.rounds for worker in heard)
        if weight > 0:
            centre = sum(worker.rounds * worker.log_factor for worker in heard) / weight
            for worker in ranked:
                worker.log_factor -= centre

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
        return line.stepped(g) if line is not None else PASS_S * (1 + VERIFY_SLOPE * g)

    def overhead_s(self, rows: int) -> float:
        """Seconds of a round spent on neither, in a batch of ``rows``."""
        line = self._line("overhead", rows)
        return line.fit[0] if line is not None else 0.0

    def width_cost(self, rows: int) -> float:
        """Cost of one more token of width relative to a pass of width 1: near 0 while verification is nearly free."""
        verify = self.verify_s(rows)
        return float((verify[-1] - verify[0]) / (self.g_max * verify[0])) if self.g_max and verify[0] > 0 else 0.0

    def _new(self, bucket: int) -> dict[str, _Line]:
        """Lines of a bucket without rounds. What one more token of width costs is expected to grow with the rows, from
        the nearest bucket that has rounds: a batch that comes up decodes at one width, which does not tell."""
        ratios = {"draft": 2.0, "verify": VERIFY_SLOPE, "overhead": 0.0}
        near = self._nearest("verify", bucket, WARM_UP)
        if near is not None:
            fixed, slope = self._lines[near]["verify"].fit
            ratios["verify"] = min(1.0, bucket / near * slope / fixed) if fixed > 0 else 1.0
        return {name: _Line(ratio, self.half_life_rounds) for name, ratio in ratios.items()}

    def _nearest(self, name: str, bucket: int, enough: int) -> int | None:
        """The nearest bucket with ``enough`` rounds of this line, by doublings, larger on a tie."""
        known = [b for b, lines in self._lines.items() if lines[name].seen >= enough]
        return min(known, key=lambda b: (abs(math.log2(b / bucket)), -b), default=None)

    def _line(self, name: str, rows: int) -> _Line | None:
        """The line of the nearest bucket that knows it, by doublings, larger on a tie; else of one warming up."""
        if rows < 1:
            raise ValueError(f"a batch has at least one row, not {rows!r}")
        for enough in (WARM_UP, 1):
            near = self._nearest(name, _bucket_of(rows), enough)
            if near is not None:
                return self._lines[near][name]
        return None

    def to_state(self) -> dict[str, Any]:
        """JSON-able state from which `from_state` goes on bit for bit."""
        return {
            "g_max": self.g_max,
            "half_life_rounds": self.half_life_rounds,
            "lines": {str(b): {n: line.to_state() for n, line in lines.items()} for b, lines in self._lines.items()},
            "workers": {name: [w.log_factor, w.spread, w.rounds, w.trusted] for name, w in self._workers.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The model that wrote ``state``."""
        made = cls(int(state["g_max"]), float(state["half_life_rounds"]))
        for bucket, lines in state["lines"].items():
            made._lines[int(bucket)] = made._new(int(bucket))
            for name, line in lines.items():
                made._lines[int(bucket)][name].restore(line)
        for name, values in state.get("workers", {}).items():
            made._workers[name] = _Worker(float(values[0]), float(values[1]), float(values[2]), bool(values[3]))
        return made


def _bucket_of(rows: int) -> int:
    return next((b for b in BUCKETS if rows <= b), BUCKETS[-1])


def _buckets(block: TokenBlock) -> Ints:
    """The batch bucket of each round."""
    rows = np.minimum(block.round_rows.astype(np.int64), BUCKETS[-1])
    return np.array(BUCKETS)[np.searchsorted(BUCKETS, np.maximum(rows, 1))]


def buckets_of(block: TokenBlock) -> set[int]:
    """The batch buckets that the rounds of a block count for."""
    return set(np.unique(_buckets(block)).tolist())


def _measured(block: TokenBlock) -> npt.NDArray[np.bool_]:
    """Rounds with a target pass of a possible duration that read no prompt."""
    possible = (block.round_verify_s >= SHORTEST_S) & (block.round_verify_s <= LONGEST_S)
    return np.asarray(possible & (block.round_prefill == 0))
