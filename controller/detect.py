"""Change detection with a stated average run length, on signals that do not move when a knob moves.

An e-detector (Shin, Ramdas and Rinaldo 2023) of the Shiryaev-Roberts kind. Units (rounds, requests) arrive with a
weight ``n`` and a value ``0 <= y <= n``; the fraction ``y / n`` has mean ``m`` while nothing changes. For each of a few
other means ``m'`` (a shift of the log odds of m),

    R <- (n + R) exp(l / phi),     l = y ln(m'/m) + (n - y) ln((1 - m')/(1 - m))

and an alarm is raised when the mean of the R reaches ``run_length``. With phi = 1 and values whose mean, given the
past, is m, every factor has mean at most 1 (a Bernoulli law has the largest exponential moments on [0, 1]), so ``R -
sum n`` is a supermartingale and the mean number of weight units to a false alarm is at least ``run_length``.

What is assumed beyond that. Values of a stationary stream that are correlated vary more in the long run: ``phi >= 1``
is the ratio of the variance of sums over windows to that of independent coins, learnt online, in windows that grow with
phi (`WINDOW` phi); it makes up for correlation that dies out within such a window. The mean itself is learnt, from the
last `MEMORY` units of weight; phi is widened by one plus the weight of a typical run to the alarm over what is
remembered. With both the bound is no theorem, but tests hold it to its word (tests/statistical/test_detect.py).

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
LONGEST_RUN = 500.0
WINDOW = 200.0
PRIOR_WINDOWS, PRIOR_PHI, KEPT_WINDOWS = 5.0, 1.5, 150.0
CLIP = 9.0  # a window counts as at most this many times phi
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
        self._window = np.zeros(3)  # weight, residual and independent variance of the open window
        self._phi = np.zeros(2)  # closed windows and their ratios

    @property
    def mean(self) -> float | None:
        """The mean that is watched; None before anything has come."""
        return float(self._mean[1] / self._mean[0]) if self._mean[0] > 0 else None

    @property
    def phi(self) -> float:
        """Variance inflation by correlation, at least 1."""
        windows, total = (float(v) for v in self._phi)
        return max(1.0, (total + PRIOR_WINDOWS * PRIOR_PHI) / (windows + PRIOR_WINDOWS))

    def add(self, weight: npt.ArrayLike, value: npt.ArrayLike) -> Alarm | None:
        """Take in units, oldest first; returns the last alarm among them. Raises ValueError out of range."""
        n, y = np.asarray(weight, dtype=np.float64), np.asarray(value, dtype=np.float64)
        if n.shape != y.shape or n.ndim != 1 or not np.all((y >= 0) & (y <= n * (1 + 1e-6)) & np.isfinite(n)):
            raise ValueError("weights and values must be as many, with 0 <= value <= weight")
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
            return None, min(count, len(n))
        m = min(1 - EDGE, max(EDGE, float(self._mean[1] / self._mean[0])))
        other = 1 / (1 + np.exp(-(math.log(m / (1 - m)) + SHIFTS)))
        apart = other * np.log(other / m) + (1 - other) * np.log((1 - other) / (1 - m))
        run = self.phi * math.log(self.run_length) / apart  # to the alarm, if that were the mean
        phi = self.phi * (1 + np.minimum(run, LONGEST_RUN) / float(self._mean[0]))
        step = (np.outer(y, np.log(other / m)) + np.outer(n - y, np.log((1 - other) / (1 - m)))) / phi
        total = np.cumsum(step, axis=0)
        with np.errstate(divide="ignore"):
            started = np.log(n)[:, None] - (total - step)
        log_r = total + np.logaddexp(self._log_r, np.logaddexp.accumulate(started, axis=0))
        together = np.logaddexp.reduce(log_r, axis=1) - math.log(len(SHIFTS))
        over = np.flatnonzero(together >= math.log(self.run_length))
        used = int(over[0]) + 1 if len(over) else len(n)
        self._date(n[:used], y[:used], total[:used])
        if len(over):
            self._inflate(n[:used], y[:used])  # too many alarms are how too small a phi shows: it must learn from them
            return self._restart(m, int(log_r[used - 1].argmax())), used
        self._log_r = log_r[-1]
        self._learn(n, y, windows=True)
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

    def _restart(self, before: float, shift: int) -> Alarm:
        units, weight, value = (float(v) for v in self._since[:, shift])
        self.alarms += 1
        self._mean[:] = weight, value
        self._log_r[:] = -np.inf
        self._climb[:], self._since[:] = 0.0, 0.0
        return Alarm(self.signal, before, value / weight if weight > 0 else before, int(units))

    def _learn(self, n: F, y: F, *, windows: bool) -> None:
        if windows:
            self._inflate(n, y)
        ages = np.cumsum(n[::-1])[::-1] - n
        keep = 0.5 ** (ages / MEMORY)
        self._mean *= 0.5 ** (float(n.sum()) / MEMORY)
        self._mean += (float(n @ keep), float(y @ keep))

    def _inflate(self, n: F, y: F) -> None:
        m = min(1 - EDGE, max(EDGE, float(self._mean[1] / self._mean[0])))
        start = 0
        while start < len(n):
            room = WINDOW * self.phi - float(self._window[0])
            end = min(len(n), start + 1 + int(np.searchsorted(np.cumsum(n[start:]), room)))
            weight, value = float(n[start:end].sum()), float(y[start:end].sum())
            self._window += (weight, value - weight * m, weight * m * (1 - m))
            if self._window[0] >= WINDOW * self.phi:
                ratio = float(self._window[1] ** 2 / self._window[2])
                self._phi *= 1 - 1 / KEPT_WINDOWS
                self._phi += (1.0, min(ratio, CLIP * self.phi))
                self._window[:] = 0.0
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
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The detector that wrote ``state``."""
        made = cls(state["signal"], float(state["run_length"]))
        made.alarms = int(state["alarms"])
        made._log_r[:] = [-math.inf if v is None else v for v in state["log_r"]]
        for name in ("mean", "climb", "since", "window", "phi"):
            getattr(made, f"_{name}")[...] = state[name]
        return made


REQUESTS_RUN_LENGTH = 10_000.0  # of the signals that come once per request or fork
FACTOR = 4.0  # seconds of a round are looked at up to this many times, or parts of, what was expected
LENGTH_UNITS = 50  # requests from which the usual length is taken


class Watch:
    """The signals of one traffic class, each with its own `Detector`."""

    def __init__(self) -> None:
        self.detectors: dict[Signal, Detector] = {
            "draft": Detector("draft"),
            "cost": Detector("cost"),
            "mix": Detector("mix", REQUESTS_RUN_LENGTH),
            "quality": Detector("quality", REQUESTS_RUN_LENGTH),
        }
        self._length = [0.0, 0.0]  # requests and tokens from which the usual length was taken

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
        usual = max(1.0, self._length[1] / self._length[0])
        return self.detectors["mix"].add([1.0], [-math.expm1(-tokens / usual)])

    def quality(self, loss: float) -> Alarm | None:
        """Score lost by the lenient branch of a pair, in [-1, 1]; what was won counts as nothing lost."""
        return self.detectors["quality"].add([1.0], [min(1.0, max(0.0, loss))])

    def to_state(self) -> dict[str, Any]:
        """JSON-able state."""
        return {"detectors": [d.to_state() for d in self.detectors.values()], "length": self._length}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The watch that wrote ``state``."""
        made = cls()
        for saved in state["detectors"]:
            detector = Detector.from_state(saved)
            made.detectors[detector.signal] = detector
        made._length = [float(v) for v in state["length"]]
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
