"""Change detection with a stated average run length, on signals that do not move when a knob moves.

An e-detector (Shin, Ramdas and Rinaldo 2023) of the Shiryaev-Roberts kind. Units (rounds, requests) arrive with a
weight ``n`` and a value ``0 <= y <= n``; the fraction ``y / n`` has mean ``m`` while nothing changes. For each of a few
other means ``m'`` (a shift of the log odds of m),

    R <- (n + R) exp(l / phi),     l = y ln(m'/m) + (n - y) ln((1 - m')/(1 - m))

and an alarm is raised when the mean of the R reaches ``run_length``. With phi = 1 and values whose mean, given the
past, is m, every factor has mean at most 1 (a Bernoulli law has the largest exponential moments on [0, 1]), so ``R -
sum n`` is a supermartingale and the mean number of weight units to a false alarm is at least ``run_length``.

What is assumed beyond that. Values of a stationary stream that are correlated vary more in the long run: ``phi >= 1``
is the ratio of the variance of sums over windows to that of independent coins, learnt online, in windows of two sizes
(`WINDOWS`) that grow with it; it makes up for correlation that dies out within such a window. The mean itself is
learnt, from the last `MEMORY` units of weight but not from the steepest climb of the test, which may be of another
mean; phi is widened by one plus the weight of a typical run to the alarm over what is remembered. With both the bound
is no theorem, but tests hold it to its word (tests/statistical/test_detect.py).

Traffic of two kinds is stationary, yet its first request of the rarer kind looks like a change, and nothing before it
says otherwise. So an alarm whose mean soon comes back to the old one was a *spell*: the old mean goes on, and phi stays
so large that a spell `TIMES` as long would raise no alarm, until that is forgotten (`FLOOR`).

Signals. *draft*: acceptance, as lossless acceptance ``A0`` over the positions that a lossless rule would have
examined, so that neither the knob nor the block length in use moves it. *cost*: seconds of a round over what the cost
model says. *mix*: tokens per request. *quality*: losses of paired branches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from controller.estimate import Rounds
from policies.rules import Scalars, lossless_accept
from storage.records import TokenBlock

F = npt.NDArray[np.float64]
Signal = Literal["draft", "cost", "mix", "quality"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)

SHIFTS = np.array([-3.0, -1.2, -0.7, 0.7, 1.2, 3.0])  # of the log odds, which are watched for
MEMORY = 5000.0  # half life of the mean, in units of weight
WARM_UP = 100.0  # weight before anything is tested
LONGEST_RUN = 300.0
WINDOWS = (50.0, 200.0)  # times the inflation found in windows of that size
PRIOR_WINDOWS, PRIOR_PHI, KEPT_WINDOWS = 5.0, 1.5, 150.0
CLIP = 9.0  # a window counts as at most this many times phi
CLIMB = 4.5  # of a CUSUM, from when on the mean is taken from before it
SPELL, SPELL_PARTS = 600.0, 20  # weight, and calls of `add`, within which a mean that comes back was no change
LATEST, NEAR = 40.0, 0.35  # half life of what came last; how near to the old mean that is, if it is back
TIMES, FLOOR = 8.0, 100_000.0  # and for what weight this is remembered
EDGE = 0.01  # means are kept this far from 0 and 1


@dataclass(frozen=True)
class Alarm:
    """A detected change: of which signal, its mean before and since, and for how many units it has lasted."""

    signal: Signal
    before: float
    since: float
    units: int


class Detector:
    """Watches one stream of units; restarts by itself after an alarm, from what came since the change.

    ``run_length`` is the mean weight up to a false alarm (module text).
    """

    def __init__(self, signal: Signal = "draft", run_length: float = 100_000.0):
        if not run_length > 1:
            raise ValueError(f"the run length must be above 1, not {run_length!r}")
        self.signal, self.run_length = signal, float(run_length)
        self.alarms = 0
        self._mean = np.zeros(2)  # remembered weight and value
        self._log_r = np.full(len(SHIFTS), -np.inf)
        self._climb = np.zeros(len(SHIFTS))  # CUSUM of the same increments: dates the change
        self._since = np.zeros((3, len(SHIFTS)))  # units, weight and value since it was last at zero
        # By size of window: weight, residual and independent variance of the open one; closed ones and their ratios.
        self._window, self._phi = np.zeros((len(WINDOWS), 3)), np.zeros((len(WINDOWS), 2))
        self._spell = np.zeros(4)  # the mean (weight, value) that the last alarm left, and the one it found
        self._since_spell = np.zeros((2, 2))  # what came since then, all of it and the latest
        self._parts = 0  # and in how many calls
        self._floor = 1.0  # inflation at which the spells that have passed would not have raised an alarm

    @property
    def mean(self) -> float | None:
        """The mean that is watched; None before anything has come."""
        return float(self._mean[1] / self._mean[0]) if self._mean[0] > 0 else None

    @property
    def phi(self) -> float:
        """Variance inflation by correlation, at least 1."""
        return max(1.0, self._floor, *self._inflation())

    def _inflation(self) -> list[float]:
        """Inflation by size of windows; what is known of smaller ones is the prior of the larger."""
        found = [PRIOR_PHI]
        for windows, total in self._phi.tolist():
            found.append((total + PRIOR_WINDOWS * found[-1]) / (windows + PRIOR_WINDOWS))
        return found[1:]

    def add(self, weight: npt.ArrayLike, value: npt.ArrayLike) -> Alarm | None:
        """Take in units, oldest first; returns the last alarm among them. Raises ValueError out of range."""
        n, y = np.asarray(weight, dtype=np.float64), np.asarray(value, dtype=np.float64)
        if n.shape != y.shape or n.ndim != 1 or not np.all((y >= 0) & (y <= n * (1 + 1e-6)) & np.isfinite(n)):
            raise ValueError("weights and values must be as many, with 0 <= value <= weight")
        self._parts += 1
        if self._parts > SPELL_PARTS:
            self._spell[:] = 0.0
        alarm, start = None, 0
        while start < len(n):
            found, used = self._test(n[start:], y[start:])
            alarm = found or alarm
            start += used
        return alarm

    def _test(self, n: F, y: F) -> tuple[Alarm | None, int]:
        """Test units against the mean before them, up to the first alarm; how many were used."""
        if self._mean[0] < WARM_UP:
            count = 1 + int(np.searchsorted(np.cumsum(n), WARM_UP - self._mean[0]))
            self._learn(n[:count], y[:count], windows=False)
            self._pass(n[:count], y[:count])
            return None, min(count, len(n))
        known = self._before_climb()
        m = _inside(known)
        other = np.clip(1 / (1 + np.exp(-(_log_odds(m) + SHIFTS))), EDGE, 1 - EDGE)
        void = np.abs(other - m) < EDGE / 2  # no room for this shift
        apart = other * np.log(other / m) + (1 - other) * np.log((1 - other) / (1 - m)) + void
        run = self.phi * math.log(self.run_length) / apart  # to the alarm, if that were the mean
        phi = self.phi * (1 + np.minimum(run, LONGEST_RUN) / float(known[0]))
        step = (np.outer(y, np.log(other / m)) + np.outer(n - y, np.log((1 - other) / (1 - m)))) / phi
        total = np.cumsum(np.where(void, -n[:, None], step), axis=0)
        with np.errstate(divide="ignore"):
            started = np.log(n)[:, None] - (total - step)
        log_r = total + np.logaddexp(self._log_r, np.logaddexp.accumulate(started, axis=0))
        together = np.logaddexp.reduce(log_r, axis=1) - math.log(len(SHIFTS))
        over = np.flatnonzero(together >= math.log(self.run_length))
        used = int(over[0]) + 1 if len(over) else len(n)
        self._date(n[:used], y[:used], total[:used])
        if len(over):
            self._inflate(n[:used], y[:used])  # too many alarms are how too small a phi shows: it must learn from them
            return self._restart(known, int(log_r[used - 1].argmax())), used
        self._log_r = log_r[-1]
        self._learn(n, y, windows=True)
        self._pass(n, y)
        return None, used

    def _date(self, n: F, y: F, total: F) -> None:
        """Follow each CUSUM and what has come since it was last at zero."""
        lowest = np.minimum.accumulate(np.minimum(total, -self._climb), axis=0)
        self._climb = total[-1] - lowest[-1]
        for k in range(len(SHIFTS)):
            zeros = np.flatnonzero(total[:, k] <= lowest[:, k])
            at = int(zeros[-1]) + 1 if len(zeros) else 0
            if at:
                self._since[:, k] = 0
            self._since[:, k] += (len(n) - at, n[at:].sum(), y[at:].sum())

    def _before_climb(self) -> F:
        """What is remembered, without what came since the steepest climb began: it may be of another mean."""
        k = int(self._climb.argmax())
        rest = self._mean - self._since[1:, k]
        return rest if self._climb[k] >= CLIMB and rest[0] >= WARM_UP else self._mean.copy()

    def _restart(self, known: F, shift: int) -> Alarm | None:
        """Begin again from what came since the change; no alarm if that is the mean from before a spell."""
        units, weight, value = (float(v) for v in self._since[:, shift])
        found = np.array([weight, value])
        if self._spell[0] > 0 and self._is_back(found):
            self._end_spell(self._since_spell[0])
            return None
        self.alarms += 1
        self._spell[:] = *known, weight, value
        self._since_spell[0], self._since_spell[1] = found, 0.0
        self._parts = 0
        self._mean[:] = found
        self._forget_climbs()
        before = _inside(known)
        return Alarm(self.signal, before, value / weight if weight > 0 else before, int(units))

    def _pass(self, n: F, y: F) -> None:
        """See whether the mean comes back soon to what the last alarm left."""
        if self._spell[0] == 0:
            return
        keep = 0.5 ** ((np.cumsum(n[::-1])[::-1] - n) / LATEST)
        out = self._since_spell[0] - self._since_spell[1]
        self._since_spell[0] += (n.sum(), y.sum())
        self._since_spell[1] *= 0.5 ** (float(n.sum()) / LATEST)
        self._since_spell[1] += (float(n @ keep), float(y @ keep))
        if self._since_spell[0, 0] > SPELL:
            self._spell[:] = 0.0
        elif self._since_spell[1, 0] >= LATEST and self._is_back(self._since_spell[1]):
            self._end_spell(out)

    def _is_back(self, latest: F) -> bool:
        """Whether this mean is that from before the spell rather than that of the spell."""
        m, other, now = (_log_odds(_inside(v)) for v in (self._spell[:2], self._spell[2:], latest))
        return abs(now - m) < NEAR * abs(other - m)

    def _end_spell(self, spell: F) -> None:
        """It was no change: the stream varies so much by itself. The old mean goes on, and a spell that is `TIMES` as
        long would raise no alarm from now on."""
        m, out = _inside(self._spell[:2]), _inside(spell)
        apart = out * math.log(out / m) + (1 - out) * math.log((1 - out) / (1 - m))
        self._floor = max(self._floor, TIMES * float(spell[0]) * apart / math.log(self.run_length))
        self._mean[:] = self._spell[:2] + self._since_spell[0]
        self._spell[:] = 0.0
        self._forget_climbs()

    def _forget_climbs(self) -> None:
        self._log_r[:] = -np.inf
        self._climb[:], self._since[:] = 0.0, 0.0

    def _learn(self, n: F, y: F, *, windows: bool) -> None:
        if windows:
            self._inflate(n, y)
        ages = np.cumsum(n[::-1])[::-1] - n
        keep = 0.5 ** (ages / MEMORY)
        self._mean *= 0.5 ** (float(n.sum()) / MEMORY)
        self._floor *= 0.5 ** (float(n.sum()) / FLOOR)
        self._mean += (float(n @ keep), float(y @ keep))

    def _inflate(self, n: F, y: F) -> None:
        m = _inside(self._mean)
        for i, (size, phi) in enumerate(zip(WINDOWS, self._inflation(), strict=True)):
            start, full = 0, size * max(1.0, phi)
            while start < len(n):
                room = full - float(self._window[i, 0])
                end = min(len(n), start + 1 + int(np.searchsorted(np.cumsum(n[start:]), room)))
                weight, value = float(n[start:end].sum()), float(y[start:end].sum())
                self._window[i] += (weight, value - weight * m, weight * m * (1 - m))
                if self._window[i, 0] >= full:
                    ratio = float(self._window[i, 1] ** 2 / self._window[i, 2])
                    self._phi[i] *= 1 - 1 / KEPT_WINDOWS
                    self._phi[i] += (1.0, min(ratio, CLIP * max(1.0, phi)))
                    self._window[i] = 0.0
                start = end

    def to_state(self) -> dict[str, Any]:
        """JSON-able state from which `from_state` goes on bit for bit."""
        return {
            "signal": self.signal,
            "run_length": self.run_length,
            "alarms": self.alarms,
            "mean": self._mean.tolist(),
            "log_r": [None if math.isinf(v) else v for v in self._log_r.tolist()],
            "climb": self._climb.tolist(),
            "since": self._since.tolist(),
            "window": self._window.tolist(),
            "phi": self._phi.tolist(),
            "spell": self._spell.tolist(),
            "since_spell": self._since_spell.tolist(),
            "parts": self._parts,
            "floor": self._floor,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The detector that wrote ``state``."""
        made = cls(state["signal"], float(state["run_length"]))
        made.alarms = int(state["alarms"])
        made._log_r[:] = [-math.inf if v is None else v for v in state["log_r"]]
        made._floor, made._parts = float(state["floor"]), int(state["parts"])
        for name in ("mean", "climb", "since", "window", "phi", "spell", "since_spell"):
            getattr(made, f"_{name}")[...] = state[name]
        return made


def _inside(sums: F) -> float:
    """Mean of (weight, value), kept away from 0 and 1."""
    return min(1 - EDGE, max(EDGE, float(sums[1] / sums[0]))) if sums[0] > 0 else 0.5


def _log_odds(mean: float) -> float:
    return math.log(mean / (1 - mean))


REQUESTS_RUN_LENGTH = 10_000.0  # of the signals that come once per request or fork
FACTOR = 4.0  # seconds of a round are looked at up to this many times, or parts of, what was expected
AT_ONCE = 8  # lengths of requests that are looked at together, since a test costs as much for one as for eight
LENGTH_UNITS = 50  # requests from which the usual length is taken


class Watch:
    """The signals of one traffic class, each with its own `Detector`."""

    def __init__(self) -> None:
        self.detectors: dict[Signal, Detector] = {
            "draft": Detector("draft"),
            "cost": Detector("cost"),
            "mix": Detector("mix", REQUESTS_RUN_LENGTH),
            "quality": Detector("quality"),  # it pages
        }
        self._length = [0.0, 0.0]  # requests and tokens from which the usual length was taken
        self._tokens: list[float] = []  # lengths that wait to be looked at

    def draft(self, block: TokenBlock) -> Alarm | None:
        """Lossless acceptance over the positions that a lossless rule would have examined, a unit per round."""
        return self.detectors["draft"].add(*examined_and_accepted(block))

    def cost(self, log_ratio: F) -> Alarm | None:
        """Seconds of rounds over what the cost model expected of them, as natural logarithms."""
        y = 0.5 + np.clip(log_ratio / (2 * math.log(FACTOR)), -0.5, 0.5)
        return self.detectors["cost"].add(np.ones(len(y)), y)

    def mix(self, tokens: int) -> Alarm | None:
        """Tokens of a finished request, against the usual length."""
        if self._length[0] < LENGTH_UNITS:
            self._length = [self._length[0] + 1, self._length[1] + tokens]
            return None
        self._tokens.append(float(tokens))
        if len(self._tokens) < AT_ONCE:
            return None
        usual = max(1.0, self._length[1] / self._length[0])
        values, self._tokens = -np.expm1(-np.array(self._tokens) / usual), []
        return self.detectors["mix"].add(np.ones(AT_ONCE), values)

    def quality(self, loss: float) -> Alarm | None:
        """Score lost by the lenient branch of a pair, in [-1, 1]; what was won counts as nothing lost."""
        return self.detectors["quality"].add([1.0], [min(1.0, max(0.0, loss))])

    def to_state(self) -> dict[str, Any]:
        """JSON-able state."""
        return {
            "detectors": [d.to_state() for d in self.detectors.values()],
            "length": self._length,
            "tokens": self._tokens,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The watch that wrote ``state``."""
        made = cls()
        for saved in state["detectors"]:
            detector = Detector.from_state(saved)
            made.detectors[detector.signal] = detector
        made._length = [float(v) for v in state["length"]]
        made._tokens = [float(v) for v in state.get("tokens", ())]
        return made


def examined_and_accepted(block: TokenBlock) -> tuple[F, F]:
    """Per drafted round the tokens that a lossless rule examines and accepts, in expectation over its coins."""
    rounds = Rounds.of(block, int(block.position.max()) if len(block.position) else 1)
    if rounds is None:
        return np.zeros(0), np.zeros(0)
    at = rounds.drafted
    accept = np.asarray(lossless_accept(Scalars(*(getattr(block, name)[at] for name in Scalars._fields))), dtype=float)
    inside = np.arange(1, at.shape[1] + 1) <= rounds.length[:, None]
    alive = np.cumprod(accept, axis=1)
    before = np.concatenate((np.ones((len(at), 1)), alive[:, :-1]), axis=1)
    return (before * inside).sum(axis=1), (alive * inside).sum(axis=1)
