"""What Lenity is compared with in `bench.regret`: rules that set the block length from what a round did."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bench.regret_traces import G, Text


class Round(NamedTuple):
    """What one round did, as its policy sees it. Seconds carry noise; arrays have one entry a row."""

    rows: int
    width: int  # drafted by the widest row
    drafted: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.int64]
    draft_s: float
    verify_s: float
    overhead_s: float
    at: npt.NDArray[np.int64]  # where in ``text`` each row started
    text: Text

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify_s + self.overhead_s

    @property
    def emitted(self) -> int:
        return int(self.accepted.sum()) + self.rows


class Policy(Protocol):
    """Something that sets block lengths."""

    def lengths(self, rows: int, now: float) -> npt.NDArray[np.int64] | int:
        """Block length of the next round: of all rows, or of each."""
        ...

    def after(self, done: Round, now: float) -> None:
        """See what the round did; ``now`` is its end."""
        ...


class Fixed:
    """The same block length always; 0 is plain decoding."""

    def __init__(self, g: int):
        self.g = g

    def lengths(self, rows: int, now: float) -> int:
        return self.g

    def after(self, done: Round, now: float) -> None:
        pass


class Heuristic:
    """The schedule of transformers: two more after a round whose drafts were all accepted, else one less, at least 1.

    It is made for one row; here most rows decide. Starts at 5, and is capped at what the others may draft.
    """

    def __init__(self) -> None:
        self.g = 5

    def lengths(self, rows: int, now: float) -> int:
        return self.g

    def after(self, done: Round, now: float) -> None:
        full = 2 * np.count_nonzero(done.accepted == done.drafted) > done.rows
        self.g = min(G, self.g + 2) if full else max(1, self.g - 1)


class Ema:
    """Average of accepted drafts with hysteresis between three block lengths, as SGLang's adaptive steps; no costs."""

    STEPS = (1, 3, 7)
    KEEP, EVERY = 0.8, 5

    def __init__(self) -> None:
        self.at, self.mean, self.rounds = 1, float(self.STEPS[1]), 0

    def lengths(self, rows: int, now: float) -> int:
        return self.STEPS[self.at]

    def after(self, done: Round, now: float) -> None:
        self.mean = self.KEEP * self.mean + (1 - self.KEEP) * float(done.accepted.mean())
        self.rounds += 1
        if self.rounds % self.EVERY:
            return
        if self.at + 1 < len(self.STEPS) and self.mean > self.STEPS[self.at] - 0.5:
            self.at += 1
        elif self.at > 0 and self.mean <= self.STEPS[self.at - 1] - 0.25:
            self.at -= 1


class EmaFormula:
    """Eq. 3 at averages of acceptance and of costs, per batch size, with hysteresis: what one would write first.

    Acceptance is accepted / examined with a memory of 100 rounds. Costs are medians of the last rounds of each kind: a
    plain pass, a draft step, a token of width. A longer or shorter block must be 3% faster to be taken; a plain round
    comes every 50 rounds, so that drafting is not switched off for good, and neither is its price unknown.
    """

    KEEP, GAIN, PROBE = 0.99, 0.03, 50

    def __init__(self) -> None:
        self.accepted, self.examined = 4.0, 5.0
        self.g: dict[int, int] = {}
        self.costs: dict[int, dict[str, float]] = {}
        self.rounds = 0

    def lengths(self, rows: int, now: float) -> int:
        g = self.g.get(rows, 4)
        if self.rounds % self.PROBE == self.PROBE - 1:
            return 0 if g else 1
        return g

    def after(self, done: Round, now: float) -> None:
        self.rounds += 1
        if done.width:
            examined = np.minimum(done.accepted + 1, done.drafted).mean()
            self.accepted = self.KEEP * self.accepted + float(done.accepted.mean())
            self.examined = self.KEEP * self.examined + float(examined)
        known = self.costs.setdefault(done.rows, {"plain": done.verify_s / (1 + 0.02 * done.width)})
        known["overhead"] = _moved(known.get("overhead"), done.overhead_s)
        if done.width:
            known["draft"] = _moved(known.get("draft"), done.draft_s / done.width)
            known["slope"] = _moved(known.get("slope"), max(0.0, done.verify_s - known["plain"]) / done.width)
        else:
            known["plain"] = _moved(known["plain"], done.verify_s)
        if "draft" not in known:
            return
        a, every = min(0.999, self.accepted / self.examined), np.arange(G + 1)
        tokens = (1 - a ** (every + 1)) / (1 - a)
        seconds = known["plain"] + known["overhead"] + every * (known["draft"] + known["slope"])
        speed = tokens / seconds
        held, best = self.g.get(done.rows, 4), int(speed.argmax())
        self.g[done.rows] = best if speed[best] > speed[held] * (1 + self.GAIN) else held


def _moved(old: float | None, new: float, keep: float = 0.9) -> float:
    """An average that a single outlier does not carry away."""
    return new if old is None else keep * old + (1 - keep) * min(new, 3 * old)


class Greedy:
    """Epsilon-greedy on tokens a second, per batch size: the best arm so far, a random one every tenth time."""

    ARMS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
    EPSILON, ROUNDS, KEEP = 0.1, 20, 0.8

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.seen: dict[int, dict[int, tuple[float, float]]] = {}
        self.arm, self.left, self.rows = 4, 0, 0
        self.now = [0.0, 0.0]

    def lengths(self, rows: int, now: float) -> int:
        if self.left == 0 or rows != self.rows:
            self._settle()
            self.rows, self.left = rows, self.ROUNDS
            seen = self.seen.setdefault(rows, {})
            untried = [arm for arm in self.ARMS if arm not in seen]
            if untried or self.rng.random() < self.EPSILON:
                self.arm = int(self.rng.choice(untried or self.ARMS))
            else:
                self.arm = max(seen, key=lambda arm: seen[arm][0] / seen[arm][1])
        self.left -= 1
        return self.arm

    def after(self, done: Round, now: float) -> None:
        self.now[0] += done.emitted
        self.now[1] += done.seconds

    def _settle(self) -> None:
        if self.now[1] > 0:
            tokens, seconds = self.seen[self.rows].get(self.arm, (0.0, 0.0))
            self.seen[self.rows][self.arm] = (self.KEEP * tokens + self.now[0], self.KEEP * seconds + self.now[1])
        self.now = [0.0, 0.0]


RIVALS: dict[str, Callable[[np.random.Generator], Policy]] = {
    "heuristic": lambda rng: Heuristic(),
    "ema": lambda rng: Ema(),
    "ema_formula": lambda rng: EmaFormula(),
    "epsilon_greedy": Greedy,
}
