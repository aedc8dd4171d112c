"""When a policy would have paged and pulled back, and with what speed and loss: on history, or on a simulated pool.

A simulated pool is played by the real controller under each policy, so that everything follows. From history only what
was served is known: the controller's own account of quality is fed with it under the policy, and where the policy
allows fewer touches than were served, that share of the touched requests counts as decoded losslessly. Where it allows
more, history cannot say what would have come of it; that is told as ``unseen``.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from controller.costs import CostModel
from controller.steer import ClassSteer
from policies.model import ClassPolicy, Policy
from storage.records import ForkRecord, QualityScore, RequestRecord

if TYPE_CHECKING:
    from controller.simulate import Run
    from controller.simulation.document import Scenario
    from storage.history import Alert, Point
    from storage.past import Observed

PAGE, EXHAUSTED = "LenityBudgetBurn", "LenityBudgetExhausted"
HELD, PULLED = ("breached",), ("pull_back", "unproven")  # states and reasons
MAX_POINTS = 2_000
_KEPT_FORKS = 20_000


@dataclass(frozen=True)
class Span:
    """From when to when something held, in seconds, and why in a sentence."""

    begin: float
    end: float
    detail: str


@dataclass
class Outcome:
    """What one policy made of a stretch. Ratios are shares of one; None where it is not known."""

    name: str
    begin: float
    end: float
    requests: int = 0
    pages: list[Span] = field(default_factory=list)
    exhausted: list[Span] = field(default_factory=list)
    pulled_back: list[Span] = field(default_factory=list)
    lossless: float = 0.0  # share of the time with no leniency
    unseen: float = 0.0  # share of the time in which more would have been allowed than was served
    speed: float | None = None  # mean against plain decoding
    loss: float | None = None  # mean per request, against lossless
    least_remaining: float = 1.0
    series: dict[str, list[float]] = field(default_factory=dict)


class Watcher:
    """Collects an outcome tick by tick."""

    def __init__(self, name: str, begin: float):
        self.outcome = Outcome(name, begin, begin)
        self._open: dict[str, Span] = {}
        self._ticks = self._lossless = self._unseen = 0
        self._speed = self._speeds = 0.0

    def tick(
        self,
        now: float,
        *,
        page: str | None,
        exhausted: str | None,
        pulled: str | None,
        theta: float,
        remaining: float,
        speed: float | None = None,
        unseen: bool = False,
        more: dict[str, float] | None = None,
    ) -> None:
        """One tick that ended at ``now``; texts are None where the thing does not hold."""
        o = self.outcome
        for name, text, spans in (
            ("page", page, o.pages),
            ("exhausted", exhausted, o.exhausted),
            ("pulled", pulled, o.pulled_back),
        ):
            self._follow(name, text, spans, now)
        self._ticks += 1
        self._lossless += theta <= 0
        self._unseen += unseen
        o.end, o.least_remaining = now, min(o.least_remaining, remaining)
        if speed is not None:
            self._speed, self._speeds = self._speed + speed, self._speeds + 1
        for key, value in {"time": now, "remaining": remaining, **(more or {})}.items():
            o.series.setdefault(key, []).append(value)

    def finish(self) -> Outcome:
        """The outcome, with what still holds ended now."""
        o = self.outcome
        for name, spans in (("page", o.pages), ("exhausted", o.exhausted), ("pulled", o.pulled_back)):
            self._follow(name, None, spans, o.end)
        if self._ticks:
            o.lossless, o.unseen = self._lossless / self._ticks, self._unseen / self._ticks
        if self._speeds:
            o.speed = self._speed / self._speeds
        step = max(1, len(o.series.get("time", ())) // MAX_POINTS)
        o.series = {name: values[::step] for name, values in o.series.items()}
        return o

    def _follow(self, name: str, text: str | None, spans: list[Span], now: float) -> None:
        span = self._open.get(name)
        if text is not None and span is None:
            self._open[name] = Span(now, now, text)
        elif text is None and span is not None:
            spans.append(replace(span, end=now))
            del self._open[name]


def simulated(scenario: Scenario, policy: Policy, name: str) -> Outcome:
    """Play ``scenario`` under ``policy`` in place of its own, without its edits of the policy."""
    from controller.simulate import simulate

    return of_run(simulate(_under(scenario, policy)), name)


def of_run(run: Run, name: str) -> Outcome:
    """The outcome of a played scenario, with the true loss and the true speed."""
    s, watcher = run.series, Watcher(name, 0.0)
    for i, time in enumerate(s["time"]):
        state, reason = str(s["state"][i]), str(s["reason"][i])
        held = state if state in HELD else reason if reason in PULLED else None
        theta = float(s["theta"][i])
        watcher.tick(
            float(time),
            page="the budget burns too fast" if s[f"alert.{PAGE}"][i] else None,
            exhausted="the budget is used up" if s[f"alert.{EXHAUSTED}"][i] else None,
            pulled=held,
            theta=0.0 if math.isnan(theta) else theta,  # a probe has no knobs
            remaining=float(s["remaining"][i]),
            more={"touches": float(s["tau_allowed"][i]), "loss": float(s["window_loss"][i])},
        )
    outcome = watcher.finish()
    requests, seconds = float(s["requests"].sum()), float(s["seconds"].sum())
    outcome.requests = round(requests)
    outcome.loss = float(s["loss"].sum()) / requests if requests else None
    outcome.speed = float(s["plain_seconds"].sum()) / seconds if seconds else None
    return outcome


def as_it_was(points: Sequence[Point], alerts: Iterable[Alert], changes: Iterable[dict[str, Any]]) -> Outcome:
    """What history says happened: ``points`` oldest first, ``alerts`` and ``changes`` of decisions in any order."""
    watcher = Watcher("as it was", points[0].time)
    firing: dict[str, str | None] = {PAGE: None, EXHAUSTED: None}
    events = _newest_first((a.time, "alert", a) for a in alerts if a.name in firing)
    turns = _newest_first((float(c["unix_time"]), "decision", c) for c in changes)
    held: str | None = None
    for point in points:
        for _, _, alert in _due(events, point.time):
            firing[alert.name] = alert.detail if alert.firing else None
        for _, _, change in _due(turns, point.time):
            known = change["state"] in HELD or change["reason"] in PULLED
            held = str(change["explanation"]) if known else None
        v = point.values
        watcher.tick(
            point.time,
            page=firing[PAGE],
            exhausted=firing[EXHAUSTED],
            pulled=held,
            theta=v.get("theta", 0.0),
            remaining=v.get("remaining", 1.0),
            speed=v.get("speedup_plain"),
            more={"touches": v.get("tau_allowed", 0.0), "burn": v.get("burn", 0.0)},
        )
    return watcher.finish()


def replayed(
    policy: ClassPolicy, rule: str, observed: Iterable[tuple[float, Observed]], points: Sequence[Point], name: str
) -> Outcome:
    """Feed the controller of ``policy`` with what was ``observed`` (received, in order), and decide at every point.

    ``points`` are those of the history, oldest first: what was allowed then, and the predicted speeds.
    """
    # What the class would know, but for the curve: that has no say in what may be touched.
    rules = (rule, *(other for other in policy.rules if other != rule))
    steer = ClassSteer(replace(policy, rules=rules), CostModel(policy.g_max), half_life_rounds=4000.0)
    governor, losses = steer.governor, _Losses()
    watcher, thinning = Watcher(name, points[0].time), _Thinning()
    source = iter(observed)
    waiting = next(source, None)
    requests = 0
    for point in points:
        while waiting is not None and waiting[0] <= point.time:
            received, record = waiting
            kept = thinning.keep(record)
            if isinstance(kept, RequestRecord):
                requests += 1
                if thinning.new_lease(kept):
                    governor.leased(kept.epoch, kept.lease_seq, thinning.tau)
                steer.observe_request(kept, received)
            elif isinstance(kept, ForkRecord):
                steer.observe_fork(kept, received)
            elif kept is not None:
                steer.observe_score(kept, received)
            losses.add(kept, policy.metric)
            waiting = next(source, None)
        allowance = governor.decide(point.time)
        served = point.values.get("tau_allowed", 0.0)
        share = thinning.allow(allowance.tau_allowed, served)
        firing = {alert.name: alert.detail for alert in allowance.alerts if alert.firing}
        held = allowance.state in HELD or allowance.reason in PULLED
        watcher.tick(
            point.time,
            page=firing.get(PAGE),
            exhausted=firing.get(EXHAUSTED),
            pulled=allowance.explanation if held else None,
            theta=point.values.get("theta", 0.0) * (share > 0) if served > 0 else float(allowance.tau_allowed > 0),
            remaining=allowance.remaining,
            speed=_speed(point, share),
            unseen=allowance.tau_allowed > 1.02 * served,
            more={"touches": allowance.tau_allowed, "burn": max(allowance.burn.values(), default=0.0)},
        )
    outcome = watcher.finish()
    outcome.requests, outcome.loss = requests, losses.per_request(requests)
    return outcome


class _Thinning:
    """Which of the touched requests would have been touched too, and what becomes of the others."""

    def __init__(self) -> None:
        self.share, self.tau = 1.0, 0.0
        self._untouched: OrderedDict[str, None] = OrderedDict()
        self._leases: set[tuple[int, int]] = set()

    def allow(self, tau: float, served: float) -> float:
        """From now on ``tau`` touches per request are allowed where ``served`` were; returns the share that stays."""
        self.tau = tau
        self.share = min(1.0, tau / served) if served > 0 else float(tau > 0)
        return self.share

    def keep(self, record: Observed) -> Observed | None:
        """``record`` as it would have been; None for the fork or score of a request that was not touched then."""
        if not isinstance(record, RequestRecord):
            return None if record.request_id in self._untouched else record
        if record.arm == "untouched" or _coin(record.request_id) < self.share:
            return record
        self._untouched[record.request_id] = None
        while len(self._untouched) > _KEPT_FORKS:
            self._untouched.popitem(last=False)
        return replace(
            record, arm="untouched", touches=0, first_touch_at=None, fork_drawn=False, label_drawn=False, theta=0.0
        )

    def new_lease(self, record: RequestRecord) -> bool:
        """Whether a request comes from a lease that was not seen before."""
        key = (record.epoch, record.lease_seq)
        new = key not in self._leases
        self._leases.add(key)
        return new


class _Losses:
    """The mean loss of forked requests, and how many were touched."""

    def __init__(self) -> None:
        self._arms: OrderedDict[str, str] = OrderedDict()
        self._half: OrderedDict[str, float] = OrderedDict()
        self.touched = self.pairs = 0
        self.total = 0.0

    def add(self, record: Observed | None, metric: str) -> None:
        """Take in what was kept."""
        if isinstance(record, RequestRecord) and record.arm != "untouched":
            self.touched += record.arm == "lenient"
            if record.fork_drawn:
                self._arms[record.request_id] = record.arm
        elif isinstance(record, QualityScore) and record.metric == metric:
            arm = self._arms.get(record.request_id)
            if arm is not None:
                lenient = (arm == "lenient") == (record.branch == "served")
                self._pair(record.request_id, -record.score if lenient else record.score)
        for kept in (self._arms, self._half):
            while len(kept) > _KEPT_FORKS:
                kept.popitem(last=False)

    def per_request(self, requests: int) -> float | None:
        """Estimated mean loss per request; None without a labelled pair where something was touched."""
        if not requests or (self.touched and not self.pairs):
            return None
        return self.total / max(1, self.pairs) * self.touched / requests

    def _pair(self, key: str, signed: float) -> None:
        first = self._half.pop(key, None)
        if first is None:
            self._half[key] = signed
            return
        self.pairs, self.total = self.pairs + 1, self.total + first + signed


def _newest_first(events: Iterable[tuple[float, str, Any]]) -> list[tuple[float, str, Any]]:
    """Events with the newest first, so that the next one is popped from the end."""
    return sorted(events, key=lambda event: event[0], reverse=True)


def _due(events: list[tuple[float, str, Any]], now: float) -> Iterable[tuple[float, str, Any]]:
    while events and events[-1][0] <= now:
        yield events.pop()


def _speed(point: Point, share: float) -> float | None:
    """At least this speed against plain decoding: between the best lossless block and what was leased."""
    plain, lossless = point.values.get("speedup_plain"), point.values.get("speedup_lossless")
    if plain is None or not lossless:
        return plain
    base = plain / max(1.0, lossless)
    return base + share * (plain - base)


def _coin(request_id: str) -> float:
    """A number in [0, 1) that is the request's own."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=7).digest()) / 2.0**56


def _under(scenario: Scenario, policy: Policy) -> Scenario:
    events = [event for event in scenario.events if event.policy is None]
    made = scenario.model_copy(update={"policy": policy.document(), "events": events})
    made._policy = policy
    return made
