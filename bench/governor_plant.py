"""Traffic whose loss per touch is known, tick by tick, and the speed that touches buy on the bundled pair.

A request has a Poisson number of touches; touched T times it is lost with probability ``min(1, T kappa)``. Nobody is
told kappa. What counts as lost is the probability, not the coin, and only for requests that kept their leniency.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

F = npt.NDArray[np.float64]

REQUESTS = 20_000  # a window
TICKS = 100  # a window
HOLDBACK = 0.1
TOKENS = 100  # a request

# Touches per request and speed over plain decoding, token_v3 on the bundled pair's word problems (docs/frontier.md).
TOUCHES = np.array([0.0, 0.098, 1.678, 1.846, 5.656, 5.958])
SPEED = np.array([2.296, 2.310, 2.515, 2.542, 3.152, 3.206])
MOST = float(TOUCHES[-1])  # touches per request of the widest knob


def gain(tau: F | float) -> F:
    """Speed gained over lossless decoding, in speeds of plain decoding, at ``tau`` touches per request."""
    return np.asarray(np.interp(tau, TOUCHES, SPEED) - SPEED[0], dtype=np.float64)


def held_back(tau: F) -> F:
    """Share of a request's tokens that holdback decodes losslessly: those after its first touch, where it is drawn."""
    before = np.where(tau > 1e-9, -np.expm1(-tau) / np.maximum(tau, 1e-9), 1.0)
    return HOLDBACK * (1 - before)


@dataclass(frozen=True)
class Scenario:
    """What happens over time, in windows: loss per touch as a factor on the base, requests as a factor on `REQUESTS`.

    ``trigger`` is a factor on the loss for a twentieth of a window after each loosening. Labels come ``delay`` windows
    late, and not at all where ``silent``. A cycle is repeated; ``quiet`` says when nothing is wrong, so that a
    pull-back would be false.
    """

    name: str
    cycle: float
    factor: Callable[[float], float] = lambda t: 1.0
    traffic: Callable[[float], float] = lambda t: 1.0
    silent: Callable[[float], bool] = lambda t: False
    quiet: Callable[[float], bool] = lambda t: True
    trigger: float = 1.0
    delay: float = 0.0
    window_s: float = 86_400.0
    deadline_s: float = 900.0
    kappa: float | None = None  # instead of the base
    fork_passes_max: float = 10.0  # target passes that forks may take, as a share of those of serving
    changed_at: float | None = None  # of a cycle, where the loss jumps
    ended_at: float | None = None


@dataclass
class Batch:
    """The requests of one tick: how many, those that kept leniency and were touched, their touches, and drawn forks."""

    requests: int
    touched: int
    touches: int
    forks: int
    fork_touches: int
    lost: float  # of those forks, as a scorer sees them
    expected_loss: float  # of what users got, the truth


class Pilot(Protocol):
    """What steers: it is told what was served and labelled, and says how much to touch and to fork."""

    def decide(self, now: float) -> tuple[float, float]:
        """(touches per request, fork probability) from now on."""

    def serve(self, now: float, batch: Batch, key: str) -> None: ...
    def label(self, now: float, batch: Batch, key: str) -> None: ...

    @property
    def held(self) -> bool: ...


@dataclass
class Log:
    """What happened, per tick; arrays of shape [ticks]."""

    time: list[float] = field(default_factory=list)
    tau: list[float] = field(default_factory=list)
    fork: list[float] = field(default_factory=list)
    kappa: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    forks: list[int] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)

    def arrays(self) -> dict[str, F]:
        """The columns as arrays."""
        return {name: np.asarray(values, dtype=np.float64) for name, values in vars(self).items()}


def fork_passes(tau: float) -> float:
    """Target passes of a touched request's fork over those of serving a request: it decodes losslessly what comes after
    the first of ``tau`` touches."""
    if tau <= 1e-9:
        return 0.5
    touched = -math.expm1(-tau)
    after = 1 - (touched / tau - math.exp(-tau)) / touched
    return float(after * np.interp(tau, TOUCHES, SPEED) / SPEED[0])


def serve(rng: np.random.Generator, requests: int, tau: float, fork: float, kappa: float) -> Batch:
    """One tick's requests."""
    touches = rng.poisson(tau, requests) if tau > 0 else np.zeros(requests, dtype=np.int64)
    hit = np.flatnonzero(touches)
    touches = touches[hit]
    chance = np.minimum(1.0, touches * kappa)
    lenient = rng.random(len(hit)) >= HOLDBACK
    forked = rng.random(len(hit)) < fork
    lost = rng.random(len(hit)) < chance
    return Batch(
        requests=requests,
        touched=int(lenient.sum()),
        touches=int(touches[lenient].sum()),
        forks=int(forked.sum()),
        fork_touches=int(touches[forked].sum()),
        lost=float((lost & forked).sum()),
        expected_loss=float(chance[lenient].sum()),
    )


def play(scenario: Scenario, base: float, pilot: Pilot, rng: np.random.Generator, windows: int) -> dict[str, F]:
    """``windows`` windows of the scenario; returns the log."""
    log, dt = Log(), scenario.window_s / TICKS
    waiting: list[tuple[int, str, Batch]] = []
    rise_until, last_tau, late = -1.0, 0.0, round(scenario.delay * TICKS)
    tau, fork = pilot.decide(0.0)
    for i in range(windows * TICKS):
        t = (i / TICKS) % scenario.cycle
        kappa = (base if scenario.kappa is None else scenario.kappa) * scenario.factor(t)
        tau = min(tau, MOST)
        if tau > 1.05 * last_tau:
            rise_until = i + TICKS / 20
        if i < rise_until:
            kappa *= scenario.trigger
        last_tau = tau
        now = (i + 1) * dt
        batch = serve(rng, int(rng.poisson(REQUESTS * scenario.traffic(t) / TICKS)), tau, fork, kappa)
        key = f"b{i}"
        pilot.serve(now, batch, key)
        if batch.forks and not scenario.silent(t):
            waiting.append((i + late, key, batch))
        while waiting and waiting[0][0] <= i:
            _, which, done = waiting.pop(0)
            pilot.label(now, done, which)
        row = (i / TICKS, tau, fork, kappa, batch.requests, batch.expected_loss, batch.forks, pilot.held)
        for column, value in zip(vars(log).values(), row, strict=True):
            column.append(value)
        tau, fork = pilot.decide(now)
    return log.arrays()
