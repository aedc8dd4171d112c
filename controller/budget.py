"""The quality budget of a rolling window: who was served under which knobs, and what that may have cost.

The window is cut into slices. A slice counts requests, touched requests and touches under the evidence epoch and the
*level* of the lease that served them: its planned touches per request, on a grid of 5 % steps. Prices (loss per touch)
are applied when the ledger is read, so a request is counted once and charged at what is known about its lease now.
Nothing is carried from one slice to another: a slice that gained quality is worth 0.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LEVEL_STEP = math.log(1.05)
LOWEST = -400  # the level of a lossless lease, about 3e-9 touches per request
UNKNOWN = 400  # the level of a lease nobody recorded: above every measured one, so its touches are charged in full

Price = Callable[[int, int], float]


def level_of(tau: float) -> int:
    """The level of a lease with ``tau >= 0`` planned touches per request."""
    return LOWEST if tau <= 0 else max(LOWEST, min(UNKNOWN - 1, round(math.log(tau) / LEVEL_STEP)))


def level_tau(level: int) -> float:
    """Planned touches per request of a level; 0 for a lossless lease."""
    return 0.0 if level <= LOWEST else math.exp(level * LEVEL_STEP)


@dataclass
class Cell:
    """Counts of one slice under one (epoch, level). Touches are those that users got; forks are matured evidence."""

    requests: int = 0
    touched: int = 0
    touches: int = 0
    forks: int = 0
    labelled: int = 0
    fork_loss: float = 0.0
    fork_touches: int = 0


@dataclass
class Slice:
    """Counts of one slice of time that began at ``start`` (steady seconds)."""

    start: float
    requests: int = 0
    tokens: int = 0
    fork_prob_min: float = 1.0
    fork_prob_max: float = 0.0
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)

    def cell(self, epoch: int, level: int) -> Cell:
        """The counts of one (epoch, level), created when first asked for."""
        return self.cells.setdefault((epoch, level), Cell())


class Ledger:
    """Slices of a rolling window of ``window_s`` seconds; at most ``k + 1`` are kept. ``began`` starts the first."""

    def __init__(self, window_s: float, k: int, began: float):
        if not window_s > 0 or k < 1:
            raise ValueError(f"window {window_s!r} must be positive and k {k!r} at least 1")
        self.window_s, self.k, self.began = window_s, k, began
        self.slices: deque[Slice] = deque()

    @property
    def slice_s(self) -> float:
        """Seconds of a slice."""
        return self.window_s / self.k

    def set_window(self, window_s: float, now: float) -> None:
        """Change the window: slices that are still inside it stay; a longer one fills up again from what is kept."""
        if window_s > self.window_s:
            self.began = max(self.began, now - self.window_s)
        self.window_s = window_s
        self.advance(now)

    def advance(self, now: float) -> None:
        """Forget the slices that ended before the window began."""
        start = now - self.window_s
        while self.slices and self.slices[0].start + self.slice_s <= start:
            self.slices.popleft()

    def add_request(
        self, now: float, epoch: int, level: int, *, tokens: int, touches: int, fork_prob: float | None = None
    ) -> None:
        """Count a served request; ``touches`` are those its user got (0 for a holdback request).

        ``fork_prob`` is the probability with which its fork was drawn, None for a request that was not touched.
        """
        current = self._slice(now)
        current.requests += 1
        current.tokens += tokens
        cell = current.cell(epoch, level)
        cell.requests += 1
        cell.touched += touches > 0
        cell.touches += touches
        if fork_prob is not None:
            current.fork_prob_min = min(current.fork_prob_min, fork_prob)
            current.fork_prob_max = max(current.fork_prob_max, fork_prob)

    def add_fork(self, arrived: float, epoch: int, level: int, z: float, touches: int, labelled: bool) -> None:
        """Count a settled fork in the slice where its request was counted; one that has left the window is ignored."""
        for found in reversed(self.slices):
            if found.start <= arrived:
                if arrived < found.start + self.slice_s:
                    cell = found.cell(epoch, level)
                    cell.forks += 1
                    cell.labelled += labelled
                    cell.fork_loss += z
                    cell.fork_touches += touches
                return

    @property
    def requests(self) -> int:
        """Requests in the window."""
        return sum(s.requests for s in self.slices)

    def expected_requests(self, now: float) -> float:
        """Requests in the window, and before a full one those still to come at the rate so far."""
        elapsed = max(now - self.began, self.window_s * 1e-3)
        return self.requests * max(1.0, self.window_s / elapsed)

    def rate(self, now: float) -> float:
        """Requests per second over the window so far."""
        return self.expected_requests(now) / self.window_s

    def mean_length(self, default: float) -> float:
        """Tokens per request: the larger of the window's mean and that of its latest slices; few requests: default."""
        requests = tokens = latest = 0
        best = 0.0
        for s in reversed(self.slices):
            requests, tokens = requests + s.requests, tokens + s.tokens
            if not latest and requests >= 30:
                latest, best = requests, tokens / requests
        return max(best, tokens / requests) if requests >= 8 and tokens else default

    def spent_upper(self, price: Price) -> float:
        """Loss units the window may have cost: per touch its ``price(epoch, level)``, per touched request at most 1."""
        return sum(min(cell.touched, cell.touches * price(*key)) for s in self.slices for key, cell in s.cells.items())

    def unproven(self, price: Price) -> float:
        """Touches weighted by ``price(epoch, level)``, uncapped: what an evidence gap covers."""
        return sum(cell.touches * price(*key) for s in self.slices for key, cell in s.cells.items())

    def spent(self, fallback: float = 0.0, *, credit: bool = False) -> float:
        """Point estimate of the loss units spent: per slice, touches served times the loss per touch its forks showed.

        A slice without settled forks takes ``fallback`` (loss per touch). Slices that gained count as 0, unless
        ``credit`` asks for the plain sum over slices.
        """
        total = 0.0
        for s in self.slices:
            cells = s.cells.values()
            fork_touches = sum(c.fork_touches for c in cells)
            per_touch = sum(c.fork_loss for c in cells) / fork_touches if fork_touches else fallback
            loss = min(sum(c.touched for c in cells), sum(c.touches for c in cells) * per_touch)
            total += loss if credit else max(0.0, loss)
        return max(0.0, total)

    def uneven_forks(self) -> bool:
        """True when forks were drawn with different probabilities in the window, so that pooled means are lopsided."""
        low = min((s.fork_prob_min for s in self.slices if s.fork_prob_max > 0), default=1.0)
        high = max((s.fork_prob_max for s in self.slices), default=0.0)
        return high > 1.25 * low

    def labelled(self, epoch: int) -> int:
        """Labelled forks of one epoch in the window."""
        return sum(c.labelled for s in self.slices for (e, _), c in s.cells.items() if e == epoch)

    def tau_seen(self, epoch: int, labels: int) -> float:
        """The largest level at or above which ``labels`` labelled forks of this epoch were served, or 0."""
        by_level: dict[int, int] = {}
        for s in self.slices:
            for (e, level), cell in s.cells.items():
                if e == epoch and level < UNKNOWN:
                    by_level[level] = by_level.get(level, 0) + cell.labelled
        seen = 0
        for level in sorted(by_level, reverse=True):
            seen += by_level[level]
            if seen >= labels:
                return level_tau(level)
        return 0.0

    def labelled_at(self, epoch: int, tau: float) -> int:
        """Labelled forks of this epoch served at ``tau`` or above, in the window."""
        floor = level_of(tau)
        return sum(
            c.labelled
            for s in self.slices
            for (e, level), c in s.cells.items()
            if e == epoch and floor <= level < UNKNOWN
        )

    def epochs(self) -> set[int]:
        """Evidence epochs that the window still has counts of."""
        return {epoch for s in self.slices for epoch, _ in s.cells}

    def _slice(self, now: float) -> Slice:
        start = math.floor(now / self.slice_s) * self.slice_s
        if not self.slices or self.slices[-1].start < start:
            self.slices.append(Slice(start))
            self.advance(now)
        return self.slices[-1]

    def to_state(self) -> dict[str, Any]:
        """JSON-able state that continues exactly."""
        return {
            "window_s": self.window_s,
            "k": self.k,
            "began": self.began,
            "slices": [
                {
                    "head": [s.start, s.requests, s.tokens, s.fork_prob_min, s.fork_prob_max],
                    "cells": [[*key, *vars(cell).values()] for key, cell in s.cells.items()],
                }
                for s in self.slices
            ],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Ledger:
        """The ledger that `to_state` described."""
        self = cls(state["window_s"], state["k"], state["began"])
        for saved in state["slices"]:
            self.slices.append(Slice(*saved["head"]))
            for epoch, level, *counts in saved["cells"]:
                self.slices[-1].cells[epoch, level] = Cell(*counts)
        return self


class LeaseBook:
    """Which evidence epoch and level each lease belonged to; equal ones in a row are kept as one, at most ``cap``."""

    def __init__(self, cap: int = 4_096):
        self.cap = cap
        self._runs: list[tuple[int, int, int, int]] = []  # lease epoch, first seq, evidence epoch, level
        self._last = (-1, -1)

    def add(self, epoch: int, seq: int, evidence_epoch: int, level: int) -> None:
        """Record a lease; leases come in order of (epoch, seq), an older one is ignored."""
        if (epoch, seq) <= self._last:
            return
        self._last = (epoch, seq)
        last = self._runs[-1] if self._runs else None
        if last is None or (last[0], *last[2:]) != (epoch, evidence_epoch, level):
            self._runs.append((epoch, seq, evidence_epoch, level))
            del self._runs[: -self.cap]

    def find(self, epoch: int, seq: int) -> tuple[int, int] | None:
        """(evidence epoch, level) of a lease; None if it was never recorded or is forgotten."""
        if (epoch, seq) > self._last:
            return None
        i = bisect_right(self._runs, (epoch, seq), key=lambda run: run[:2]) - 1
        return self._runs[i][2:] if i >= 0 and self._runs[i][0] == epoch else None

    def to_state(self) -> list[Any]:
        """JSON-able state that continues exactly."""
        return [list(self._last), [list(run) for run in self._runs]]

    @classmethod
    def from_state(cls, state: list[Any]) -> LeaseBook:
        """The book that `to_state` described."""
        self = cls()
        self._last = (state[0][0], state[0][1])
        self._runs = [(a, b, c, d) for a, b, c, d in state[1]]
        return self


class Rates:
    """Requests and touches of the last ``span_s`` seconds in ``buckets`` buckets, for burn rates over short windows."""

    def __init__(self, span_s: float, buckets: int):
        self.span_s, self.width_s = span_s, span_s / buckets
        self._buckets: deque[list[float]] = deque()  # start, requests, touched, touches

    def add(self, now: float, touches: int) -> None:
        """Count a request with ``touches`` served touches."""
        start = math.floor(now / self.width_s) * self.width_s
        if not self._buckets or self._buckets[-1][0] < start:
            self._buckets.append([start, 0, 0, 0])
            while self._buckets[0][0] + self.width_s <= now - self.span_s:
                self._buckets.popleft()
        last = self._buckets[-1]
        last[1] += 1
        last[2] += touches > 0
        last[3] += touches

    def per_request(self, now: float, window_s: float) -> tuple[float, float]:
        """Touched requests and touches, per request of the last ``window_s`` seconds; zeros without requests."""
        requests = touched = touches = 0.0
        for start, r, hit, t in self._buckets:
            if start + self.width_s > now - window_s:
                requests, touched, touches = requests + r, touched + hit, touches + t
        return (touched / requests, touches / requests) if requests else (0.0, 0.0)

    def to_state(self) -> list[Any]:
        """JSON-able state that continues exactly."""
        return [self.span_s, round(self.span_s / self.width_s), [list(b) for b in self._buckets]]

    @classmethod
    def from_state(cls, state: list[Any]) -> Rates:
        """The rates that `to_state` described."""
        self = cls(state[0], state[1])
        self._buckets = deque(list(b) for b in state[2])
        return self
