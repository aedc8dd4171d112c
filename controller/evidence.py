"""Paired forks become evidence in the order of their touches, whatever order their labels come in.

A touched request whose fork was drawn waits here until both branches are scored. Evidence leaves in order of first
touch: an unresolved head holds back what came after it, so that quick labels cannot overtake slow ones and make the
evidence look better than the traffic. A fork that never ran, or whose scores are missing `deadline_s` after the request
arrived, leaves with the worst difference, +1. Everything is bounded: beyond the caps the oldest fork is settled at its
worst, the oldest early score is forgotten (which its fork's deadline turns into the worst case again).

Where no fork could be drawn, a touched request whose label was asked for is evidence by its arm alone
(`controller.arms`): it waits for the score of what was served, and missing it takes its arm's worst.

A fork weighs ``(1 - holdback probability) / fork probability``: that many touched requests of its kind, served
leniently, stand behind it (`controller.budget`). Forks that are alike and whose labels come together may be one bundle.
"""

from __future__ import annotations

import copy
import heapq
import math
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from controller.arms import ScoreGuess, difference
from storage.records import ForkRecord, QualityScore, RequestRecord

WORST = 1.0  # the difference of a fork that has no labels: lossless perfect, lenient lost
MAX_PENDING = 20_000
MAX_EARLY = 4_096
MAX_SEEN = 8_192
LEAST_FORK = 0.01  # a fork probability below this is as good as none: no fork may stand for more than 100 requests
_DELAY_MEMORY = 0.05  # weight of a new label in the mean delay


@dataclass(frozen=True)
class Evidence:
    """Settled forks, ``n`` of them: the sum ``total`` of score differences z (lossless - lenient) in [-1, 1], that of
    their ``squares``, and the lenient branches' touches.

    ``labelled`` of them were, the others took the worst case. ``weight`` is each fork's. ``epoch`` and ``level`` say
    which lease served them, ``arrived`` when their records came (their slice of the budget), ``touched_at`` when they
    were touched, both on the controller's clock. With ``arms`` they are assigned requests instead of forks, ``total``
    their estimates of what a touched request loses on average over the holdback coin (at most 1 each, but far below -1
    at times), and ``touches`` those of the lenient ones.
    """

    n: int
    total: float
    squares: float
    touches: int
    labelled: int
    weight: float
    epoch: int
    level: int
    arrived: float
    touched_at: float
    arms: bool = False


@dataclass
class _Pending:
    lenient_served: bool
    touches: int
    weight: float
    epoch: int
    level: int
    arrived: float
    touched_at: float
    fork: int | None = None  # touches of the finished fork; -1: it never ran
    scores: dict[str, tuple[str, float]] = field(default_factory=dict)  # branch -> (scorer version, score)
    resolved_at: float | None = None
    count: int = 1
    bundle: bool = False  # forks that are alike and whose labels come together
    sums: tuple[float, float] | None = None  # of a bundle's differences and their squares
    holdback: float | None = None  # probability of it, where the arm is the evidence and there is no fork

    def ready(self) -> bool:
        """Nothing more to wait for: it never ran, or both branches are scored by one scorer version."""
        if self.bundle:
            return self.sums is not None
        if self.holdback is not None:
            return "served" in self.scores
        if self.fork == -1:
            return True
        known_touches = self.lenient_served or self.fork is not None
        versions = {version for version, _ in self.scores.values()}
        return known_touches and len(self.scores) == 2 and len(versions) == 1

    def settle(self, guess: ScoreGuess) -> Evidence:
        """The evidence as it stands: from the scores if they are there, the worst case if not.

        ``guess`` is of the scores of arms that were settled before.
        """
        touches = self.touches if self.lenient_served else max(self.fork or 0, self.touches)
        labelled = self.ready() and self.fork != -1
        total = squares = self.count * WORST
        if self.holdback is not None:
            score = self.scores["served"][1] if labelled else None
            expected = guess.value(self.holdback)
            x = difference(score, held_back=not self.lenient_served, holdback=self.holdback, guess=expected)
            total = (1 - self.holdback) * x
            squares, touches = total * total, self.touches * self.lenient_served
            if score is not None:
                guess.add(score)
        elif labelled and self.sums is not None:
            total, squares = self.sums
        elif labelled:
            served, fork = self.scores["served"][1], self.scores["fork"][1]
            total = fork - served if self.lenient_served else served - fork
            squares = total * total
        return Evidence(
            n=self.count,
            total=total,
            squares=squares,
            touches=touches if self.holdback is not None else max(self.count, touches),
            labelled=self.count * labelled,
            weight=self.weight,
            epoch=self.epoch,
            level=self.level,
            arrived=self.arrived,
            touched_at=self.touched_at,
            arms=self.holdback is not None,
        )


class EvidenceBuffer:
    """Joins requests, forks and scores by request id, and releases settled forks in order of first touch."""

    def __init__(self, deadline_s: float):
        self.deadline_s = deadline_s
        self.label_delay_s: float | None = None  # touch to both scores, mean of labelled forks
        self.delay_s: float | None = None  # touch to evidence, mean of released forks
        self.last_label_at: float | None = None
        # Repeated or late; early ones that were forgotten; settled by the cap; repeated with another value.
        self.set_aside = self.unknown = self.forced = self.conflicts = 0
        self.guess = ScoreGuess()
        self._pending: dict[str, _Pending] = {}
        self._order: list[tuple[float, float, str]] = []  # heap: touched_at, arrived, id
        self._early: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._seen: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def counts(self) -> dict[str, int]:
        """What was not taken in, by why; only what has happened."""
        counted = {
            "set_aside": self.set_aside,
            "unknown_request": self.unknown,
            "settled_by_the_cap": self.forced,
            "conflicting_score": self.conflicts,
        }
        return {name: count for name, count in counted.items() if count}

    def add_request(self, record: RequestRecord, epoch: int, level: int, now: float) -> bool:
        """Take in a request record, once; False for a duplicate. What waits here are touched requests whose fork was
        drawn, or whose label was, where no fork could be."""
        key = record.request_id
        if key in self._seen:
            self.set_aside += 1
            return False
        self._seen[key] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        early = self._early.pop(key, None)
        alone = by_arm(record)
        if record.arm == "untouched" or not (record.label_drawn if alone else record.fork_drawn):
            return True
        served, touches = record.arm == "lenient", max(1, record.touches)
        weight = 1 / record.label_prob if alone else weight_of(record)
        pending = _Pending(served, touches, weight, epoch, level, now, _touched_at(record, now))
        pending.holdback = record.holdback_prob if alone else None
        self._pending[key] = pending
        heapq.heappush(self._order, (pending.touched_at, now, key))
        if early:
            pending.fork = early.get("fork")
            pending.scores = early.get("scores", {})
            self._resolve(pending, now)
        return True

    def add_bundle(self, key: str, count: int, touches: int, weight: float, epoch: int, level: int, now: float) -> None:
        """``count`` forks alike, of requests that arrived now, with ``touches`` in all; `settle_bundle` ends it."""
        pending = _Pending(True, touches, weight, epoch, level, now, now, count=count, bundle=True)
        self._pending[key] = pending
        heapq.heappush(self._order, (now, now, key))

    def settle_bundle(self, key: str, total: float, squares: float, now: float) -> None:
        """The labels of a bundle: sum of the differences and of their squares; too late, they are set aside."""
        pending = self._pending.get(key)
        if pending is None or pending.sums is not None:
            self.set_aside += 1
            return
        pending.sums = (total, squares)
        self._resolve(pending, now)

    def add_fork(self, record: ForkRecord, now: float) -> None:
        """Take in how a fork ended; the first report counts."""
        touches = record.touches if record.done else -1
        pending = self._pending.get(record.request_id)
        if pending is None:
            self._keep_early(record.request_id).setdefault("fork", touches)
        elif pending.fork is None:
            pending.fork = touches
            self._resolve(pending, now)
        else:
            self.set_aside += 1

    def add_score(self, score: QualityScore, now: float) -> None:
        """Take in one branch's score; the first of a scorer version counts, a newer version replaces an older one."""
        version = f"{score.scorer}:{score.scorer_version}"
        pending = self._pending.get(score.request_id)
        scores = self._keep_early(score.request_id).setdefault("scores", {}) if pending is None else pending.scores
        known = scores.get(score.branch)
        if known is not None and known[0] == version:
            self.set_aside += 1
            self.conflicts += known[1] != score.score
            return
        if pending is not None and pending.resolved_at is not None:
            self.set_aside += 1
            return
        scores[score.branch] = (version, score.score)
        if pending is not None:
            self._resolve(pending, now)

    def release(self, now: float) -> Iterator[Evidence]:
        """Settled forks from the head on, in order of first touch; stops at a head that may still be resolved."""
        while self._order:
            pending = self._pending[self._order[0][2]]
            late = now >= pending.arrived + self.deadline_s
            full = len(self._pending) > MAX_PENDING
            if not (pending.resolved_at is not None or late or full):
                return
            self.forced += pending.resolved_at is None and full and not late
            _, _, key = heapq.heappop(self._order)
            del self._pending[key]
            evidence = pending.settle(self.guess)
            self.delay_s = _mean(self.delay_s, now - pending.touched_at)
            if evidence.labelled and pending.resolved_at is not None:
                self.label_delay_s = _mean(self.label_delay_s, pending.resolved_at - pending.touched_at)
            yield evidence

    def overdue(self, now: float, after_s: float) -> float:
        """Requests that unresolved forks stand for which arrived more than ``after_s`` ago."""
        late = 0.0
        for p in self._pending.values():  # in order of arrival
            if now - p.arrived <= after_s:
                break
            late += p.weight * p.count * (p.resolved_at is None)
        return late

    def oldest(self, now: float) -> float:
        """When the oldest fork that is not settled arrived; later than ``now`` if there is none."""
        return min((p.arrived for p in self._pending.values()), default=math.nextafter(now, math.inf))

    def missing(self, limit: int) -> Iterator[tuple[str, tuple[str, ...], float, float]]:
        """Up to ``limit`` requests that lack labels, oldest touch first: id, branches, time of touch, deadline.

        The branches are those that exist and have no score, in an order that tells nothing about the arm.
        """
        waiting = [(p.touched_at, key) for key, p in self._pending.items() if p.resolved_at is None and not p.bundle]
        for touched_at, key in heapq.nsmallest(limit, waiting):
            p = self._pending[key]
            forked = p.fork is not None and p.holdback is None
            branches = [b for b in ("served", "fork") if b not in p.scores and (b == "served" or forked)]
            if branches:
                order = tuple(branches[:: 1 if zlib.crc32(key.encode()) & 1 else -1])
                yield key, order, touched_at, p.arrived + self.deadline_s

    def _resolve(self, pending: _Pending, now: float) -> None:
        if pending.resolved_at is None and pending.ready():
            pending.resolved_at = now
            if pending.fork != -1:
                self.last_label_at = now

    def _keep_early(self, key: str) -> dict[str, Any]:
        """What came before its request record; what comes after its fork was settled is not kept."""
        if key in self._seen:
            self.set_aside += 1
            return {}
        if key not in self._early and len(self._early) >= MAX_EARLY:
            self._early.popitem(last=False)
            self.unknown += 1
        return self._early.setdefault(key, {})

    def to_state(self) -> dict[str, Any]:
        """JSON-able state that continues exactly."""
        return {
            "label_delay_s": self.label_delay_s,
            "delay_s": self.delay_s,
            "last_label_at": self.last_label_at,
            "guess": [self.guess.number, self.guess.total],
            "counts": [self.set_aside, self.unknown, self.forced, self.conflicts],
            "pending": [[key, asdict(pending)] for key, pending in self._pending.items()],
            "early": [[key, copy.deepcopy(value)] for key, value in self._early.items()],
            "seen": list(self._seen),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], deadline_s: float) -> EvidenceBuffer:
        """The buffer that `to_state` described."""
        self = cls(deadline_s)
        self.label_delay_s, self.delay_s = state["label_delay_s"], state["delay_s"]
        self.last_label_at = state["last_label_at"]
        self.guess = ScoreGuess(*state.get("guess", ()))
        self.set_aside, self.unknown, self.forced, self.conflicts = state["counts"]
        for key, values in state["pending"]:
            sums = values["sums"]
            restored = {"scores": _scores(values["scores"]), "sums": None if sums is None else (sums[0], sums[1])}
            self._pending[key] = _Pending(**(values | restored))
        self._order = [(p.touched_at, p.arrived, key) for key, p in self._pending.items()]
        heapq.heapify(self._order)
        for key, early in state["early"]:
            self._early[key] = early | ({"scores": _scores(early["scores"])} if "scores" in early else {})
        self._seen = OrderedDict.fromkeys(state["seen"])
        return self


class ScorerWatch:
    """Which scorer version counts. A newcomer wins once; two scorers at once do not restart the evidence for ever.

    A version that was replaced comes back only when its successor has been silent for a label's deadline.
    """

    def __init__(self) -> None:
        self.current: str | None = None
        self._retired: list[str] = []
        self._last_at = 0.0

    def admit(self, version: str, now: float, deadline_s: float) -> Literal["known", "new", "retired"]:
        """Whether a score of ``version`` counts; "new" has just replaced another version."""
        if version != self.current:
            if version in self._retired and now - self._last_at <= deadline_s:
                return "retired"
            before, self.current, self._last_at = self.current, version, now
            self._retired = [v for v in self._retired if v != version][-15:]
            if before is None:
                return "known"
            self._retired.append(before)
            return "new"
        self._last_at = now
        return "known"

    def to_state(self) -> list[Any]:
        """JSON-able state that continues exactly."""
        return [self.current, list(self._retired), self._last_at]

    @classmethod
    def from_state(cls, state: list[Any]) -> ScorerWatch:
        """The watch that `to_state` described."""
        self = cls()
        self.current, self._retired, self._last_at = state[0], list(state[1]), state[2]
        return self


def weight_of(record: RequestRecord) -> float:
    """How many touched requests, served leniently, the fork of this one stands for."""
    return (1 - record.holdback_prob) / max(record.fork_prob, LEAST_FORK)


def by_arm(record: RequestRecord) -> bool:
    """Whether its arm alone is the evidence about a touched request: no fork could be drawn, and a label could."""
    forks = record.fork_drawn or record.fork_prob >= LEAST_FORK
    return not forks and record.label_prob >= LEAST_FORK and 0 < record.holdback_prob < 1


def _mean(mean: float | None, new: float) -> float:
    new = max(0.0, new)
    return new if mean is None else mean + _DELAY_MEMORY * (new - mean)


def _scores(raw: dict[str, Any]) -> dict[str, tuple[str, float]]:
    return {branch: (str(version), float(score)) for branch, (version, score) in raw.items()}


def _touched_at(record: RequestRecord, now: float) -> float:
    """When the request was touched, on the controller's clock: only differences of the worker's clock are used."""
    began = now - record.total_s
    if record.first_touch_at is None:
        return began
    return min(now, max(began, began + record.first_touch_at - record.started))
