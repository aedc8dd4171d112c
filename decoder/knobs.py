"""Leases at the worker: which knobs a round may use, now.

A lease is valid for the time the store says is left, counted from when the worker *asked*, on a clock that runs while
the machine is suspended. When it ends, cannot be read or cannot be obeyed, the worker is lossless by itself and keeps
the last good block length. `ClassLease` decides (pure: times are arguments); `LeaseReader` polls the store.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import structlog

from decoder.request import Knobs
from decoder.strategies import BATCHED, STRATEGIES
from storage.errors import SampleError, StorageError
from storage.records import MAX_DEPTH, CapRow, Lease, Trial

log = structlog.get_logger(__name__)

DEFAULT_G = 4  # block length before any lease was read
MAX_G = 64  # no worker drafts longer blocks, whatever a lease says
MAX_CLASSES = 64  # traffic classes that one worker polls leases for

# Why a class is lossless although no lease said so.
NO_LEASE, UNREACHABLE, EXPIRED, MALFORMED, OLDER = "no lease", "unreachable", "expired", "malformed", "older lease"
UNKNOWN_RULE, INCOMPATIBLE_RULE = "unknown rule", "incompatible rule"
UNKNOWN_STRATEGY, INCOMPATIBLE_STRATEGY = "unknown strategy", "incompatible strategy"
TRIAL = "trial: "  # before the reason why only the trial of a lease may not be used
LEASED = "leased"

_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


ALL: Mapping[str, Sequence[str]] = {name: strategy.rules for name, strategy in STRATEGIES.items()}
KNOWN_RULES = tuple(dict.fromkeys(("lossless", *(rule for rules in ALL.values() for rule in rules))))


def trial_coin(seed: int) -> float:
    """The coin in [0, 1) of the request with that seed: below a trial's share it takes part in it."""
    return float(np.random.Generator(np.random.PCG64([seed, 2])).random())


def boot_clock() -> float:
    """Seconds since boot, suspend included where the system can say (CLOCK_BOOTTIME); never steps."""
    return time.monotonic() if _BOOTTIME is None else time.clock_gettime(_BOOTTIME)


@dataclass(frozen=True)
class Terms:
    """What one caller accepts of a lease. It can only be less than the lease allows.

    ``share`` in [0, 1] of the pool's loss budget (1: all of it, 0: lossless); ``rule`` and ``strategy``: only this one
    (None: that of the lease); ``forks``: whether a paired fork could be scored, else none is drawn.
    """

    share: float = 1.0
    rule: str | None = None
    strategy: str | None = None
    forks: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must lie in [0, 1], not {self.share!r}: a caller can only tighten")

    @property
    def lossless(self) -> bool:
        """Whether nothing that any lease says would make these requests lenient."""
        return self.share == 0 or self.rule == "lossless"

    def take(self, strategy: str, rule: str) -> bool:
        """Whether knobs of ``rule`` in ``strategy`` are acceptable."""
        return self.strategy in (None, strategy) and self.rule in (None, rule)

    def limit(self, caps: Sequence[CapRow]) -> CapRow:
        """The largest theta, rho and depth that these terms leave.

        Those of the greatest share in ``caps`` that is at most ours; nothing if there is none.
        """
        if self.share == 1:
            return _ALL
        affordable = [cap for cap in caps if cap.share <= self.share]
        return max(affordable, key=lambda cap: cap.share) if affordable else _NOTHING


_ALL, _NOTHING = CapRow(1.0, 1.0, 1.0), CapRow(0.0, 0.0, 0.0, 0.0)
ANY = Terms()


class Store(Protocol):
    """What the reader needs of `storage.stream.LeaseStore`."""

    def read(self, pool: str, traffic_class: str, /) -> tuple[Lease, float] | None:
        """The lease and the seconds it has left; SampleError if it is malformed, StorageError if there is no answer."""
        ...


@dataclass
class ClassLease:
    """The lease of one traffic class: what is held, until when, and why it may not be used. No clock, no I/O.

    ``able``: the strategies that the worker's models can do, each with the rules that may make it lenient.
    """

    pool: str
    traffic_class: str
    able: Mapping[str, Sequence[str]] = field(default_factory=lambda: ALL)
    default_g: int = DEFAULT_G
    lease: Lease | None = None
    deadline: float = -math.inf
    trouble: str = NO_LEASE  # what the last answers said; explains a lossless state
    good: Lease | None = None  # whose block length stays
    newest: tuple[int, int] = (-1, -1)
    fallbacks: Counter[str] = field(default_factory=Counter)
    state: str = f"lossless: {NO_LEASE}"
    _trial: Trial | None = None  # of the lease held, if these models can do it

    def answered(self, lease: Lease | None, ttl_left: float, asked: float) -> None:
        """The store answered a question asked at ``asked`` with ``lease``, which has ``ttl_left`` seconds to live.

        A lease that cannot be obeyed takes the place of the one held: the controller wants something else now. An older
        one than the newest seen is refused, and what is held runs out by itself. The same lease never lives longer than
        first said.
        """
        if lease is None:
            self._drop(EXPIRED if self.good is not None else NO_LEASE)
            return
        order = (lease.epoch, lease.seq)
        if order < self.newest:
            self.trouble = OLDER
            return
        problem = self._refusal(lease, ttl_left)
        if problem is not None:
            self.newest, self.deadline = order, -math.inf
            self._drop(problem)
            return
        deadline = asked + min(ttl_left, lease.ttl)
        if order == self.newest:
            deadline = min(deadline, self.deadline)
        trial, problem = lease.trial, None
        if trial is not None:
            problem = self._unable(trial.strategy, trial.rule)
        if problem is not None and (self.lease is None or self.lease.trial != trial):
            self.fallbacks[f"{TRIAL}{problem}"] += 1
        self._trial = trial if problem is None else None
        self.newest, self.lease, self.good, self.deadline, self.trouble = order, lease, lease, deadline, EXPIRED

    def failed(self, reason: str) -> None:
        """No usable answer: ``UNREACHABLE`` leaves what is held to run out, ``MALFORMED`` ends it."""
        if reason == UNREACHABLE:
            self.trouble = UNREACHABLE
        else:
            self._drop(reason)

    def admit(self, now: float, terms: Terms, coin: float) -> Terms:
        """What a request that starts at ``now`` gets until it ends: a strategy, and the trial or not.

        ``coin`` in [0, 1) is the request's own. One that asks for less than the lease, or for something else than what
        is tried, takes no part. If the trial ends meanwhile the request goes on losslessly.
        """
        lease = self._held(now)
        if lease is None:
            return replace(terms, strategy=terms.strategy or "speculative")
        trial = self._trial
        if trial is not None and coin < trial.share and terms.share == 1 and terms.take(trial.strategy, trial.rule):
            return replace(terms, strategy=trial.strategy, rule=trial.rule)
        return replace(terms, strategy=terms.strategy or lease.strategy)

    def knobs(self, now: float, rows: int = 1, terms: Terms = ANY) -> Knobs:
        """The knobs of a round that starts at ``now`` with ``rows`` rows in the batch, for a caller with ``terms``."""
        lease = self._held(now)
        if lease is None:
            return self._without_lease(rows, terms)
        self.state = LEASED
        table, rule, limit = lease.table, "lossless", _NOTHING
        if terms.take(lease.strategy, lease.rule):
            rule, limit = lease.rule, terms.limit(lease.caps)
        elif self._trial is not None and terms.take(self._trial.strategy, self._trial.rule):
            table, rule, limit = self._trial.table, self._trial.rule, terms.limit(())
        row = next((row for row in table if rows <= row.batch), table[-1])
        plain = (terms.strategy or lease.strategy) == "plain"
        if terms.lossless or plain:
            rule, limit = "lossless", _NOTHING
        theta, rho, depth = min(limit.theta, row.theta), min(limit.rho, row.rho), min(limit.depth, row.depth)
        if theta == 0 or rho == 0 or depth == 0:
            theta, rho, depth = 0.0, 0.0, MAX_DEPTH
        return Knobs(
            g=0 if plain else row.g,
            rule=rule,
            theta=theta,
            rho=rho,
            depth=depth,
            holdback=lease.holdback,
            fork=lease.fork if terms.forks else 0.0,
            label=lease.label,
            explore=0.0 if plain else lease.explore,
            epoch=lease.epoch,
            lease_seq=lease.seq,
            structured=lease.structured == "lenient",
            label_deadline=lease.label_deadline,
        )

    def refusal(self, strategy: str | None, rule: str | None) -> tuple[str, str] | None:
        """Which of the two a caller may not ask for, and why; None if it may.

        It may ask for what is on the lists of the lease, for plain decoding and for lossless. While there is no lease
        everything that exists will do: all is lossless then.
        """
        held, strategies, rules = self.lease or self.good, set(STRATEGIES), set(KNOWN_RULES)
        if held is not None:
            tried = () if held.trial is None else (held.trial,)
            strategies = {"plain", held.strategy, *held.strategies, *(trial.strategy for trial in tried)}
            rules = {"lossless", held.rule, *held.rules, *(trial.rule for trial in tried)}
            if strategy not in (None, *BATCHED):
                rules.update(self.able.get(strategy, ()))
        able = {"lossless", *(rule for its in self.able.values() for rule in its)}
        for what, asked, known, listed, usable in (
            ("strategy", strategy, STRATEGIES, strategies, self.able),
            ("rule", rule, KNOWN_RULES, rules, able),
        ):
            if asked is not None and not (asked in listed and asked in usable):
                why = "cannot be used with this worker's models" if asked in listed else "is not on this pool's list"
                there = ", ".join(name for name in known if name in listed and name in usable)
                return what, f"{what} {asked!r} {why}; there is: {there}"
        return None

    def _held(self, now: float) -> Lease | None:
        return self.lease if now < self.deadline else None

    def _without_lease(self, rows: int, terms: Terms) -> Knobs:
        state = f"lossless: {self.trouble}"
        if state != self.state or not self.fallbacks:
            self.state = state
            self.fallbacks[self.trouble] += 1
        if terms.strategy == "plain":
            return Knobs.lossless(0)
        return Knobs.lossless(self.good.knobs(rows).g if self.good is not None else self.default_g)

    def _drop(self, reason: str) -> None:
        self.lease, self.trouble = None, reason  # the deadline stays: the same lease may come back, but not for longer

    def _refusal(self, lease: Lease, ttl_left: float) -> str | None:
        if lease.pool != self.pool or lease.traffic_class != self.traffic_class or not math.isfinite(ttl_left):
            return MALFORMED
        if any(row.g > MAX_G for row in (*lease.table, *(lease.trial.table if lease.trial is not None else ()))):
            return MALFORMED
        if not all(0 <= value <= 1 for value in (lease.holdback, lease.fork, lease.label, lease.explore)):
            return MALFORMED
        return self._unable(lease.strategy, lease.rule)

    def _unable(self, strategy: str, rule: str) -> str | None:
        """Why these models cannot do that, or None."""
        if strategy not in STRATEGIES:
            return UNKNOWN_STRATEGY
        if strategy not in self.able:
            return INCOMPATIBLE_STRATEGY
        if rule not in KNOWN_RULES:
            return UNKNOWN_RULE
        if strategy == "plain" or rule == "lossless" or rule in self.able[strategy]:
            return None
        return INCOMPATIBLE_RULE


class LeaseReader:
    """Polls the leases of a pool's traffic classes, and answers `knobs` from memory without waiting.

    A class that is asked for the first time is polled from then on; until its first answer it is lossless.
    """

    def __init__(
        self,
        store: Store,
        pool: str,
        classes: Iterable[str] = ("default",),
        *,
        clock: Callable[[], float] = boot_clock,
        poll_s: float = 0.25,
        default_g: int = DEFAULT_G,
        able: Mapping[str, Sequence[str]] | None = None,
    ):
        self.pool = pool
        self._store, self._clock, self._poll_s = store, clock, poll_s
        self._default_g, self._able = default_g, ALL if able is None else able
        self._lock = threading.Lock()
        self._classes: dict[str, ClassLease] = {}
        self._stop = threading.Event()
        self._poll_now = threading.Event()
        self._thread: threading.Thread | None = None
        self._said: dict[str, str] = {}
        for name in classes:
            self._class(name)

    def knobs(self, traffic_class: str = "default", rows: int = 1, terms: Terms = ANY) -> Knobs:
        """The knobs of a round that starts now, for a caller with ``terms``."""
        with self._lock:
            return self._class(traffic_class).knobs(self._clock(), rows, terms)

    def admit(self, traffic_class: str, terms: Terms, seed: int) -> Terms:
        """What a request with that seed, which starts now, gets until it ends; see `ClassLease.admit`."""
        with self._lock:
            return self._class(traffic_class).admit(self._clock(), terms, trial_coin(seed))

    def refusal(self, traffic_class: str, strategy: str | None, rule: str | None) -> tuple[str, str] | None:
        """Which of the two a caller of that class may not ask for now, and why; see `ClassLease.refusal`."""
        with self._lock:
            return self._class(traffic_class).refusal(strategy, rule)

    @property
    def state(self) -> dict[str, str]:
        """By traffic class: ``"leased"``, or ``"lossless: "`` and the reason, as of the last round that asked."""
        with self._lock:
            return {name: held.state for name, held in self._classes.items()}

    @property
    def fallbacks(self) -> dict[str, int]:
        """How often a class turned lossless without being told to, by reason; another reason counts anew.

        Trials that these models cannot do are counted too, under ``trial: `` and the reason: they are left out.
        """
        with self._lock:
            return dict(sum((held.fallbacks for held in self._classes.values()), Counter()))

    def poll_once(self) -> None:
        """Ask the store once for every class."""
        with self._lock:
            names = list(self._classes)
        for name in names:
            asked = self._clock()
            lease, ttl_left, failure = None, 0.0, None
            try:
                answer = self._store.read(self.pool, name)
                if answer is not None:
                    lease, ttl_left = answer
            except SampleError as e:
                failure = MALFORMED
                self._say(name, MALFORMED, str(e))
            except StorageError as e:
                failure = UNREACHABLE
                self._say(name, UNREACHABLE, str(e))
            with self._lock:
                held = self._classes[name]
                if failure is not None:
                    held.failed(failure)
                    continue
                held.answered(lease, ttl_left, asked)
                what = LEASED if held.lease is not None and held.trouble == EXPIRED else held.trouble
                order = held.newest
            self._say(name, what, f"newest lease {order}")

    def start(self) -> None:
        """Poll in a daemon thread every ``poll_s`` seconds, and at once when a new class was asked for."""
        if self._thread is not None:
            raise ValueError("the lease reader is already running")
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Stop polling; knobs then run out like any lease."""
        self._stop.set()
        self._poll_now.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _class(self, name: str) -> ClassLease:
        held = self._classes.get(name)
        if held is None:
            held = ClassLease(self.pool, name, self._able, self._default_g)
            if len(self._classes) < MAX_CLASSES:
                self._classes[name] = held
                self._poll_now.set()
        return held

    def _say(self, name: str, what: str, detail: str) -> None:
        if self._said.get(name) != what:
            self._said[name] = what
            say = log.info if what == LEASED else log.warning
            say("leases: " + what, pool=self.pool, traffic_class=name, detail=detail)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._poll_now.clear()
            try:
                self.poll_once()
            except Exception:  # a fault of ours must not end the polling: leases held run out by themselves
                log.exception("leases: polling failed", pool=self.pool)
            self._poll_now.wait(self._poll_s)
