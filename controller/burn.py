"""Burn rates: how fast the budget goes, against plan, over the long and short windows of the policy's paging rules.

A burn of 1 spends exactly what is planned. It is a lower bound: the loss per touch is bounded from below over about the
long window, so that few or lucky labels page nobody, and is multiplied with the touches per request of each window. The
short window makes a page end soon after its cause (SRE Workbook, chapter 5, multiwindow multi-burn-rate alerts).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from controller.bounds import Staggered
from policies.scalars import format_duration

if TYPE_CHECKING:
    from controller.evidence import Evidence
    from policies.model import ClassPolicy

_K = 4
_MAX_BUCKETS = 512


@dataclass(frozen=True)
class Burn:
    """Burn by window name, and the detail of the first rule whose windows both burn too fast (None: no page).

    ``lower`` is the lower bound on loss per touch by name of the long window, 0 while it has too few labels; with
    ``labels``, how many there are in the budget's window, and the counters of requests, touched requests and touches
    anyone can compute the same burn.
    """

    by_window: dict[str, float]
    page: str | None
    lower: dict[str, float] = field(default_factory=dict)
    labels: int = 0


class BurnMeter:
    """Rates and evidence for the paging rules of one policy; ``began`` is steady seconds."""

    def __init__(self, policy: ClassPolicy, began: float):
        self._windows = [(rule.long_s, rule.short_s) for rule in policy.page]
        self._rates = [Rates(a, max(2, min(_MAX_BUCKETS, math.ceil(5 * a / b)))) for a, b in self._windows]
        self._evidence = [Staggered(a, _K, began) for a, _ in self._windows]

    def set_policy(self, policy: ClassPolicy, now: float) -> None:
        """Obey new rules; those whose windows stay keep what they measured."""
        kept = dict(zip(self._windows, zip(self._rates, self._evidence, strict=True), strict=True))
        fresh = BurnMeter(policy, now)
        for i, windows in enumerate(fresh._windows):
            if windows in kept:
                fresh._rates[i], fresh._evidence[i] = kept[windows]
        self._windows, self._rates, self._evidence = fresh._windows, fresh._rates, fresh._evidence

    def reset_evidence(self, now: float) -> None:
        """Start new evidence; what was served stays counted."""
        self._evidence = [Staggered(long_s, _K, now) for long_s, _ in self._windows]

    def add_requests(self, now: float, requests: int, touched: int, touches: int) -> None:
        """Count requests, those of them that were touched leniently, and their served touches."""
        for rates in self._rates:
            rates.add(now, requests, touched, touches)

    def add_fork(self, e: Evidence, touched_at: float) -> None:
        """Take in settled forks."""
        for evidence in self._evidence:
            evidence.add(e.n, e.total, e.squares, e.touches, touched_at)

    def advance(self, now: float) -> None:
        """Open and drop sequences as time passes."""
        for evidence in self._evidence:
            evidence.advance(now)

    def read(self, now: float, policy: ClassPolicy, *, labels: int, min_forks: int, jumped: float = 0.0) -> Burn:
        """Burn rates now. Pages only with the policy's minimum of ``labels`` in the budget's window.

        A paging rule's own evidence counts from ``min_forks`` on; each reads one sequence, at the policy's confidence.
        ``jumped`` is what a touch loses at least since a detected change, 0 without one.
        """
        by_window: dict[str, float] = {}
        lower: dict[str, float] = {}
        page: str | None = None
        plan = policy.planned_loss
        for rule, rates, evidence in zip(policy.page, self._rates, self._evidence, strict=True):
            sequence = evidence.planning(now)
            known = sequence.n >= min_forks and plan > 0
            per_touch = max(0.0, sequence.lower_per_touch(1 - policy.confidence)) if known else 0.0
            per_touch = max(per_touch, jumped)
            lower[format_duration(rule.long_s)] = per_touch
            burns = []
            for window_s in (rule.long_s, rule.short_s):
                touched, touches = rates.per_request(now, window_s)
                burns.append(min(touched, per_touch * touches) / plan if plan > 0 else 0.0)
                name = format_duration(window_s)
                by_window[name] = max(by_window.get(name, 0.0), burns[-1])
            factor = rule.factor(policy.window_s)
            if labels >= policy.min_labels and page is None and min(burns) > factor:
                page = (
                    f"burning {burns[0]:.1f} times the plan over {format_duration(rule.long_s)} and {burns[1]:.1f} "
                    f"over {format_duration(rule.short_s)} (limit {factor:.2f})"
                )
        return Burn(by_window, page, lower, labels)

    def to_state(self) -> dict[str, Any]:
        """JSON-able state that continues exactly."""
        return {
            "windows": [list(w) for w in self._windows],
            "rates": [r.to_state() for r in self._rates],
            "evidence": [e.to_state() for e in self._evidence],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], policy: ClassPolicy, now: float) -> BurnMeter:
        """The meter that `to_state` described, under the rules of ``policy``."""
        self = cls(policy, now)
        self._windows = [(a, b) for a, b in state["windows"]]
        self._rates = [Rates.from_state(r) for r in state["rates"]]
        self._evidence = [Staggered.from_state(e) for e in state["evidence"]]
        self.set_policy(policy, now)
        return self


class Rates:
    """Requests and touches of the last ``span_s`` seconds in ``buckets`` buckets, for burn rates over short windows."""

    def __init__(self, span_s: float, buckets: int):
        self.span_s, self.width_s = span_s, span_s / buckets
        self._buckets: deque[list[float]] = deque()  # start, requests, touched, touches

    def add(self, now: float, requests: int, touched: int, touches: int) -> None:
        """Count requests, those of them that were touched leniently, and their served touches."""
        start = math.floor(now / self.width_s) * self.width_s
        if not self._buckets or self._buckets[-1][0] < start:
            self._buckets.append([start, 0, 0, 0])
            while self._buckets[0][0] + self.width_s <= now - self.span_s:
                self._buckets.popleft()
        last = self._buckets[-1]
        last[1] += requests
        last[2] += touched
        last[3] += touches

    def per_request(self, now: float, window_s: float) -> tuple[float, float]:
        """Touched requests and touches, per request of the last ``window_s`` seconds; zeros without requests."""
        requests = touched = touches = 0.0
        for start, r, hit, t in reversed(self._buckets):
            if start + self.width_s <= now - window_s:
                break
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
