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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from decoder.generate import Knobs
from policies.rules import RULES
from storage.errors import SampleError, StorageError
from storage.records import Lease

log = structlog.get_logger(__name__)

DEFAULT_G = 4  # block length before any lease was read
MAX_G = 64  # no worker drafts longer blocks, whatever a lease says
MAX_CLASSES = 64  # traffic classes that one worker polls leases for

# Why a class is lossless although no lease said so.
NO_LEASE, UNREACHABLE, EXPIRED, MALFORMED, OLDER = "no lease", "unreachable", "expired", "malformed", "older lease"
UNKNOWN_RULE, INCOMPATIBLE_RULE = "unknown rule", "incompatible rule"
LEASED = "leased"

_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def boot_clock() -> float:
    """Seconds since boot, suspend included where the system can say (CLOCK_BOOTTIME); never steps."""
    return time.monotonic() if _BOOTTIME is None else time.clock_gettime(_BOOTTIME)


@dataclass(frozen=True)
class Terms:
    """What one caller accepts of a lease. It can only be less than the lease allows.

    ``share`` in [0, 1] of the pool's loss budget (1: all of it, 0: lossless); ``rule``: only this one (None: any);
    ``plain``: no drafting; ``forks``: whether a paired fork could be scored, else none is drawn.
    """

    share: float = 1.0
    rule: str | None = None
    plain: bool = False
    forks: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must lie in [0, 1], not {self.share!r}: a caller can only tighten")

    @property
    def lossless(self) -> bool:
        """Whether nothing that any lease says would make these requests lenient."""
        return self.share == 0 or self.rule == "lossless"

    def limit(self, lease: Lease) -> tuple[float, float]:
        """The largest theta and rho that these terms leave under ``lease``.

        Those of the greatest share in its caps that is at most ours; (0, 0) if there is none, or for another rule.
        """
        if self.rule not in (None, lease.rule):
            return 0.0, 0.0
        if self.share == 1:
            return 1.0, 1.0
        affordable = [cap for cap in lease.caps if cap.share <= self.share]
        if not affordable:
            return 0.0, 0.0
        cap = max(affordable, key=lambda cap: cap.share)
        return cap.theta, cap.rho


ANY = Terms()


class Store(Protocol):
    """What the reader needs of `storage.stream.LeaseStore`."""

    def read(self, pool: str, traffic_class: str, /) -> tuple[Lease, float] | None:
        """The lease and the seconds it has left; SampleError if it is malformed, StorageError if there is no answer."""
        ...


@dataclass
class ClassLease:
    """The lease of one traffic class: what is held, until when, and why it may not be used. No clock, no I/O."""

    pool: str
    traffic_class: str
    deterministic_drafter: bool = False
    default_g: int = DEFAULT_G
    lease: Lease | None = None
    deadline: float = -math.inf
    trouble: str = NO_LEASE  # what the last answers said; explains a lossless state
    good: Lease | None = None  # whose block length stays
    newest: tuple[int, int] = (-1, -1)
    fallbacks: Counter[str] = field(default_factory=Counter)
    state: str = f"lossless: {NO_LEASE}"

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
        self.newest, self.lease, self.good, self.deadline, self.trouble = order, lease, lease, deadline, EXPIRED

    def failed(self, reason: str) -> None:
        """No usable answer: ``UNREACHABLE`` leaves what is held to run out, ``MALFORMED`` ends it."""
        if reason == UNREACHABLE:
            self.trouble = UNREACHABLE
        else:
            self._drop(reason)

    def knobs(self, now: float, rows: int = 1, terms: Terms = ANY) -> Knobs:
        """The knobs of a round that starts at ``now`` with ``rows`` rows in the batch, for a caller with ``terms``."""
        lease = self.lease
        if lease is not None and now < self.deadline:
            self.state = LEASED
            row = lease.knobs(rows)
            theta, rho = terms.limit(lease)
            theta, rho = min(theta, row.theta), min(rho, row.rho)
            if theta == 0 or rho == 0:
                theta, rho = 0.0, 0.0
            return Knobs(
                g=0 if terms.plain else row.g,
                rule="lossless" if terms.lossless else lease.rule,
                theta=theta,
                rho=rho,
                holdback=lease.holdback,
                fork=lease.fork if terms.forks else 0.0,
                label=lease.label,
                explore=0.0 if terms.plain else lease.explore,
                epoch=lease.epoch,
                lease_seq=lease.seq,
            )
        state = f"lossless: {self.trouble}"
        if state != self.state or not self.fallbacks:
            self.state = state
            self.fallbacks[self.trouble] += 1
        if terms.plain:
            return Knobs.lossless(0)
        return Knobs.lossless(self.good.knobs(rows).g if self.good is not None else self.default_g)

    def refusal(self, rule: str) -> str | None:
        """Why a caller may not ask for ``rule``, or None: it may for lossless, and for the rule of the lease.

        While there is no lease every rule that exists will do: all are lossless then.
        """
        held = self.lease or self.good
        allowed = ["lossless", *([held.rule] if held is not None else RULES)]
        if rule in allowed:
            return None
        return f"rule {rule!r} is not on the list of this pool; there is: {', '.join(dict.fromkeys(allowed))}"

    def _drop(self, reason: str) -> None:
        self.lease, self.trouble = None, reason  # the deadline stays: the same lease may come back, but not for longer

    def _refusal(self, lease: Lease, ttl_left: float) -> str | None:
        if lease.pool != self.pool or lease.traffic_class != self.traffic_class or not math.isfinite(ttl_left):
            return MALFORMED
        if any(row.g > MAX_G for row in lease.table):
            return MALFORMED
        if not all(0 <= value <= 1 for value in (lease.holdback, lease.fork, lease.label, lease.explore)):
            return MALFORMED
        rule = RULES.get(lease.rule)
        if rule is None:
            return UNKNOWN_RULE
        if rule.draft_confidence and self.deterministic_drafter:
            return INCOMPATIBLE_RULE
        return None


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
        deterministic_drafter: bool = False,
    ):
        self.pool = pool
        self._store, self._clock, self._poll_s = store, clock, poll_s
        self._default_g, self._deterministic = default_g, deterministic_drafter
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

    def refusal(self, traffic_class: str, rule: str) -> str | None:
        """Why a caller of that class may not ask for ``rule`` now, or None."""
        with self._lock:
            return self._class(traffic_class).refusal(rule)

    @property
    def state(self) -> dict[str, str]:
        """By traffic class: ``"leased"``, or ``"lossless: "`` and the reason, as of the last round that asked."""
        with self._lock:
            return {name: held.state for name, held in self._classes.items()}

    @property
    def fallbacks(self) -> dict[str, int]:
        """How often a class turned lossless without being told to, by reason; another reason counts anew."""
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
            held = ClassLease(self.pool, name, self._deterministic, self._default_g)
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
