"""The quality budget of a window: who was served under which knobs, and what that may have cost.

The window is cut into slices. For every touched request a fork is drawn with a recorded probability f, and the lossless
outcome is served with a recorded probability h. Weighing the difference of a drawn fork by ``w = (1 - h) / f`` makes it
an unbiased estimate of what the request's user lost, whatever f and h were at the time; a slice keeps ``sum w z`` and
``sum w^2 z^2``. Over the slices since any opening the mixture bound of `controller.bounds` then holds, with guesses of
zero and the largest weight as its scale, so the loss of everything served and settled since then is at most

    sum over slices of max(0, sum w z)  +  the radius of sum w^2 z^2.

A slice that gained quality counts as 0. All terms grow with the span, so the bound of the oldest slice is the largest:
one reading holds every window to the budget, each by its own sequence at the full significance
(docs/mathematics.md, section 6). Rules, levels and evidence epochs share this one account.

What is not settled yet is *in flight* and charged at a price per touch, never more than 1 a request. Requests whose
forks had (almost) no chance to be drawn are *blind*: no evidence stands for them, and each counts as lost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from controller.bounds import radius_of
from controller.evidence import Evidence
from controller.flight import InFlight, Price

LEVEL_STEP = math.log(1.05)
LOWEST = -400  # the level of a lossless lease, about 3e-9 touches per request
UNKNOWN = 400  # the level of a lease nobody recorded: above every measured one, so its touches are charged in full
LEAST_ELAPSED = 1e-3  # shares of the window: over less no rate is taken,
TRUSTED_ELAPSED = 0.1  # and over less it is not remembered as what was expected


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
    """One slice of time that began at ``start`` (steady seconds).

    ``touched`` are requests that a fork stands for, ``blind`` those without; ``loss`` and ``squares`` are the weighed
    sums of settled forks, ``severity`` is ``sum w z^2`` and ``weight`` the largest weight. ``expected`` is how many
    requests a window was expected to have while the slice was open, ``aim`` where its bound is tuned to (fixed when it
    was opened).
    """

    start: float
    aim: float | None = None
    requests: int = 0
    tokens: int = 0
    touched: int = 0
    blind: int = 0
    loss: float = 0.0
    squares: float = 0.0
    severity: float = 0.0
    weight: float = 0.0
    expected: float = 0.0
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)

    def cell(self, epoch: int, level: int) -> Cell:
        """The counts of one (epoch, level), created when first asked for."""
        return self.cells.setdefault((epoch, level), Cell())


class Ledger:
    """Slices of a window of ``window_s`` seconds; at most ``k + 1`` are kept. ``began`` starts the first.

    The account reaches back over the rolling window, or to `since` where that is later (a calendar window's start, a
    reset by an operator); `aim` tunes the slices that are opened from now on.
    """

    def __init__(self, window_s: float, k: int, began: float):
        if not window_s > 0 or k < 1:
            raise ValueError(f"window {window_s!r} must be positive and k {k!r} at least 1")
        self.window_s, self.k, self.began = window_s, k, began
        self.since = -math.inf
        self.aim: float | None = None
        self.slices: deque[Slice] = deque()
        self.flight = InFlight()
        self._at_first = 0  # requests that were counted at `began`

    @property
    def slice_s(self) -> float:
        """Seconds of a slice."""
        return self.window_s / self.k

    def set_window(self, window_s: float, now: float) -> None:
        """Change the window: slices that are still inside it stay; a longer one fills up again from what is kept."""
        self.window_s = window_s
        self.advance(now)

    def advance(self, now: float) -> None:
        """Forget the slices that ended before the window began."""
        start = now - self.window_s
        while self.slices and self.slices[0].start + self.slice_s <= start:
            self.slices.popleft()
        self.flight.settle(self.slices[0].start if self.slices else start)

    def forgive(self, now: float) -> None:
        """Start the account anew from ``now``: what was spent before is spent, and what is in flight with it."""
        self.since = now
        self.flight = InFlight()

    def add_requests(
        self,
        now: float,
        epoch: int,
        level: int,
        *,
        tokens: int,
        touched: int = 0,
        touches: int = 0,
        requests: int = 1,
        blind: bool = False,
    ) -> None:
        """Count served requests; ``touched`` of them got ``touches`` (a holdback request got none).

        ``blind``: their forks could not be drawn, so that no evidence will stand for them.
        """
        current = self._slice(now)
        if now == self.began:
            self._at_first += requests
        current.requests += requests
        current.tokens += tokens
        cell = current.cell(epoch, level)
        cell.requests += requests
        cell.touched += touched
        cell.touches += touches
        if blind:
            current.blind += touched
        elif touched:
            current.touched += touched
            self.flight.add(now, epoch, level, touched, touches)

    def add_fork(self, e: Evidence) -> None:
        """Count settled forks in the slice where their requests were counted; ignored when that has left the window."""
        for found in reversed(self.slices):
            if found.start <= e.arrived:
                if e.arrived < found.start + self.slice_s:
                    cell = found.cell(e.epoch, e.level)
                    cell.forks += e.n
                    cell.labelled += e.labelled
                    cell.fork_loss += e.total
                    cell.fork_touches += e.touches
                    if e.arrived >= self.since:
                        found.loss += e.weight * e.total
                        found.squares += e.weight**2 * e.squares
                        found.severity += e.weight * e.squares
                        found.weight = max(found.weight, e.weight)
                return

    @property
    def requests(self) -> int:
        """Requests in the window."""
        return sum(s.requests for s in self.slices)

    def expected_requests(self, now: float) -> float:
        """Requests in a window at the rate since the oldest slice began; while that is young, at the rate so far."""
        if not self.slices:
            return 0.0
        elapsed, requests = self._elapsed(now), self.requests
        if elapsed > 0 and self.slices[0].start <= self.began:
            requests -= self._at_first  # they came in the time before
        return requests * self.window_s / max(elapsed, self.window_s * LEAST_ELAPSED)

    def _elapsed(self, now: float) -> float:
        return now - max(self.began, self.slices[0].start)

    def note_expected(self, now: float) -> None:
        """Remember in the open slice what was expected while its requests were served."""
        trusted = self.slices and self._elapsed(now) >= TRUSTED_ELAPSED * self.window_s
        if trusted and now < self.slices[-1].start + self.slice_s:
            self.slices[-1].expected = self.lately(now)

    def budget_requests(self, now: float, first: int = 0) -> float:
        """How many requests the budget is for: as many as were expected when the ones on the account were served.

        Where traffic fades, what was served before was planned for a window of more requests; it is not called
        overspent because fewer came. Where traffic grows, the requests that came count. With ``first`` > 0, those of
        the window that began with that slice of the account and is not over yet.
        """
        account = list(self._account())[first:]
        served = float(sum(s.requests for s in account))
        usual = self.expected_requests(now)
        if first:
            usual = served + self.lately(now) * max(0.0, 1 - (now - account[0].start) / self.window_s)
        total = sum(s.requests * (s.expected or usual) for s in account)
        return max(usual, total / served) if served else usual

    def lately(self, now: float) -> float:
        """Requests in a window at the lowest of the rate so far, that of its last tenth, and that of its last slices.

        The last is believed as far as two deviations of a count allow: a fall of traffic shows within a slice.
        """
        usual = self.expected_requests(now)
        lowest = usual
        for share, deviations in ((1 / 10, 0.0), (1.5 / self.k, 2.0)):
            recent, began = 0, now
            for s in reversed(self.slices):
                if s.start < now - self.window_s * share:
                    break
                recent, began = recent + s.requests, s.start
            if now - began >= self.window_s * share / 3 and self.slices[0].start < began:
                most = recent + deviations * (math.sqrt(recent) + 1)
                lowest = min(lowest, most * self.window_s / (now - began))
        return lowest

    def rate(self, now: float) -> float:
        """Requests per second over the window so far."""
        return self.expected_requests(now) / self.window_s

    def mean_length(self, default: float) -> float:
        """Tokens per request: the largest of the window's mean and those of its latest 30, 100, 300, … requests.

        With fewer than 8 requests the default.
        """
        requests = tokens = 0
        best, least = 0.0, 30
        for s in reversed(self.slices):
            requests, tokens = requests + s.requests, tokens + s.tokens
            if requests >= least:
                best = max(best, tokens / requests)
                least = max(least * 3, requests + 1)
        return max(best, tokens / requests) if requests >= 8 and tokens else default

    def spent_upper(self, significance: float, price: Price, first: int = 0) -> float:
        """Loss units that the account may have cost, at most (module text): settled, in flight, and blind.

        With ``first`` > 0, since that slice of the account.
        """
        account = list(self._account())[first:]
        since = account[0].start if first else -math.inf
        blind = sum(s.blind for s in account)
        flying = self.flight.touched_since(since)
        settled = max(0, sum(s.touched for s in account) - flying)
        bound, aims = 0.0, set()
        for i, s in enumerate(account):
            if s.aim not in aims:
                aims.add(s.aim)
                bound = max(bound, self._bound(account[i:], significance, s.aim))
        return min(float(settled), bound) + self.flight.charge(price, since) + blind

    def turns(self) -> list[int]:
        """Slices of the account, but the first, around which the expected budget of a window changed (by its `aim`).

        While the budget is steady the oldest window is the tightest. After a fall, windows that are not over yet are
        tighter: they will hold fewer requests.
        """
        aims = [s.aim for s in self._account()]
        found = {i for j in range(1, len(aims)) if aims[j] != aims[j - 1] for i in (j - 1, j)}
        return sorted(found - {0})

    def _bound(self, slices: list[Slice], significance: float, aim: float | None) -> float:
        drawn = tuple((s.squares, s.weight) for s in slices if s.weight > 0)
        radius = radius_of(drawn or ((0.0, 1.0),), significance, aim)
        return sum(max(0.0, s.loss) for s in slices) + radius

    @property
    def severity(self) -> float:
        """``sum w z^2`` of the account: with fork probability f its sum of squares would be about ``severity / f``."""
        return sum(s.severity for s in self._account())

    def spent(self, per_touch: float) -> float:
        """Point estimate of the loss units spent; what is in flight at ``per_touch``. No slice counts as a gain."""
        known = sum(max(0.0, s.loss) + s.blind for s in self._account())
        return known + self.flight.charge(lambda *_: max(0.0, per_touch))

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

    def rows(self) -> list[dict[str, Any]]:
        """One row for each slice, evidence epoch and level: its counts."""
        return [
            {"start": s.start, "evidence_epoch": epoch, "level": level} | vars(cell)
            for s in self.slices
            for (epoch, level), cell in s.cells.items()
        ]

    def _account(self) -> Iterable[Slice]:
        """The slices whose cost counts: all, or those since the account was started anew."""
        return (s for s in self.slices if s.start >= self.since)

    def _slice(self, now: float) -> Slice:
        start = math.floor(now / self.slice_s) * self.slice_s
        if self.since <= now:
            start = max(start, self.since)
        if not self.slices or self.slices[-1].start < start:
            self.slices.append(Slice(start, self.aim))
            self.advance(now)
        return self.slices[-1]

    def to_state(self) -> dict[str, Any]:
        """JSON-able state that continues exactly."""
        return {
            "window_s": self.window_s,
            "k": self.k,
            "began": [self.began, self._at_first],
            "since": None if self.since == -math.inf else self.since,
            "aim": self.aim,
            "flight": self.flight.to_state(),
            "slices": [
                {
                    "head": [v for name, v in vars(s).items() if name != "cells"],
                    "cells": [[*key, *vars(cell).values()] for key, cell in s.cells.items()],
                }
                for s in self.slices
            ],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Ledger:
        """The ledger that `to_state` described."""
        self = cls(state["window_s"], state["k"], state["began"][0])
        self._at_first = state["began"][1]
        self.since = -math.inf if state["since"] is None else state["since"]
        self.aim = state["aim"]
        self.flight = InFlight.from_state(state["flight"])
        for saved in state["slices"]:
            self.slices.append(Slice(*saved["head"]))
            for epoch, level, *counts in saved["cells"]:
                self.slices[-1].cells[epoch, level] = Cell(*counts)
        return self
