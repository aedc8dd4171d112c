"""Traces of `bench.regret`: texts along which drafts are accepted or not, how many rows decode them, and what it costs.

A trace is a sequence of segments, each a fixed amount of text that every policy must decode; inside one nothing is
changed on purpose. What happens at a position does not depend on the policy (`bench.record` says why), so all of them
replay the same luck. Synthetic texts draw each position's acceptance probability ``A0(x)`` of a draft ``x ~ q`` and its
coin; a draft that nobody examined is drawn afresh from the same position.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from controller.simulation.machine import Machine

F = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

G = 16  # longest block
DATA = Path(__file__).with_name("data")
CERTAIN = 0.25  # mean A0 of the drafts that are not accepted for certain, in synthetic texts


class Seconds(NamedTuple):
    """What a round takes by width drafted, without noise: [G + 1] each."""

    draft: F
    verify: F
    overhead: F

    @property
    def total(self) -> F:
        return self.draft + self.verify + self.overhead


@dataclass(frozen=True)
class Text:
    """Per position: drafts accepted and drafts proposed if a round starts there; acceptance probabilities.

    ``accept`` is ``A0`` of the position's own draft, ``afresh`` that of one drawn when nobody examines it; None where
    drafting is deterministic and the target greedy, so that A0 is 1 up to ``length`` and 0 after it.
    """

    length: Ints
    width: Ints
    accept: F | None = None
    afresh: F | None = None

    def __len__(self) -> int:
        return len(self.length)

    def cut(self, start: int, stop: int) -> Text:
        """Positions ``start`` to ``stop``, around the end if it lies behind it."""
        at = np.arange(start, stop) % len(self)
        parts = (None if part is None else part[at] for part in (self.accept, self.afresh))
        return Text(self.length[at], self.width[at], *parts)


@dataclass(frozen=True)
class Segment:
    """A text that ``rows`` requests decode side by side until all of it is emitted."""

    name: str
    text: Text
    seconds: Seconds
    rows: int = 1


@dataclass(frozen=True)
class Trace:
    """What all policies decode, and the relative noise of the seconds they see."""

    name: str
    segments: tuple[Segment, ...]
    noise: float = 0.05
    recorded: bool = False
    held_out: bool = False  # never looked at while the controller's constants were chosen


# -- synthetic ---------------------------------------------------------------------------------------------------------


def drawn(acceptance: F, rng: np.random.Generator) -> Text:
    """A text whose drafts are accepted with this mean probability at each position."""
    n = len(acceptance)
    certain = np.maximum(0.0, (acceptance - CERTAIN) / (1 - CERTAIN))
    other = np.minimum(acceptance, CERTAIN)

    def a0() -> F:
        return np.where(rng.random(n) < certain, 1.0, 2 * other * rng.random(n))

    accept, afresh = a0(), a0()
    return Text(runs(rng.random(n) <= accept), np.full(n, G), accept, afresh)


def runs(taken: npt.NDArray[np.bool_]) -> Ints:
    """How many positions in a row are taken from each one on, at most G; beyond the end the text goes round."""
    twice = np.concatenate((taken, taken[:G]))
    length = np.zeros(len(twice) + 1, dtype=np.int64)
    for i in range(len(twice) - 1, -1, -1):
        length[i] = length[i + 1] + 1 if twice[i] else 0
    return np.minimum(length[: len(taken)], G)


def stretches(n: int, easy: float, hard: float, mean: tuple[float, float], rng: np.random.Generator) -> F:
    """Acceptance of a text of easy and hard stretches with geometric lengths."""
    lengths: list[int] = []
    while sum(lengths) < n:
        lengths += [int(rng.geometric(1 / m)) for m in mean]
    return np.repeat(np.resize([easy, hard], len(lengths)), lengths)[:n].astype(np.float64)


def machine(rows: int = 1, *, draft: float = 0.001, target: float = 0.020, saturates: float = 256.0) -> Seconds:
    """The simulator's cost plant (`controller.simulation.machine`)."""
    plant = Machine(target, draft, 0.001, saturates, 1024.0)
    g = np.arange(G + 1)
    return Seconds(plant.draft(g, rows), plant.verify(g, rows), np.full(G + 1, plant.overhead_s))


def constant(levels: Sequence[float], tokens: int, rng: np.random.Generator, seconds: Seconds) -> tuple[Segment, ...]:
    """A segment for each level of acceptance."""
    return tuple(Segment(f"a={a:g}", drawn(np.full(tokens, a), rng), seconds) for a in levels)


def step(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    return constant((0.8, 0.5, 0.92), n // 3, rng, machine())


def ramp(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    edges = np.linspace(0.92, 0.4, 9)
    return tuple(
        Segment(f"a={a:.2f}-{b:.2f}", drawn(np.linspace(a, b, n // 8), rng), machine())
        for a, b in itertools.pairwise(edges)
    )


def cycle(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    return constant((0.9, 0.5) * 3, n // 6, rng, machine())


def mixture(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    kinds = np.repeat(rng.choice([0.92, 0.45], size=n // 100), 100)
    return (Segment("requests of two kinds", drawn(kinds, rng), machine()),)


def autocorrelated(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    text = drawn(stretches(n, 0.95, 0.35, (60, 20), rng), rng)
    return (Segment("easy and hard stretches", text, machine()),)


def load(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    waves = (1, 4, 16, 32, 8, 1, 32, 2)
    return tuple(
        Segment(f"{rows} rows", drawn(np.full(n // 8 * rows, 0.88), rng), machine(rows, saturates=12.0), rows)
        for rows in waves
    )


def cold(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    return constant((0.93,), n // 4, rng, machine())


def gone_bad(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    return constant((0.85, 0.05, 0.85), n // 3, rng, machine(draft=0.003))


def useless(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    return constant((0.1,), n, rng, machine(draft=0.004))


def dear(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    """A draft model a third of the target: little to win, much to lose."""
    return constant((0.6, 0.75), n // 2, rng, machine(draft=0.007))


def slower(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    """A neighbour takes the draft model's device for a while."""
    costs = (machine(), machine(draft=0.006), machine())
    return tuple(Segment(f"draft step {c.draft[1] * 1e3:.0f} ms", drawn(np.full(n // 3, 0.8), rng), c) for c in costs)


SYNTHETIC: dict[str, Callable[[int, np.random.Generator], tuple[Segment, ...]]] = {
    "step": step,
    "ramp": ramp,
    "cycle": cycle,
    "mixture": mixture,
    "autocorrelated": autocorrelated,
    "load waves": load,
    "cold start": cold,
    "draft gone bad": gone_bad,
    "useless draft": useless,
    "dear draft": dear,
    "draft slower": slower,
}


def rise(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    levels = (0.5, 0.6, 0.7, 0.8, 0.88)
    return constant(levels, n // 5, rng, machine(draft=0.002))


def short_cycle(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    return constant((0.6, 0.85) * 4, n // 8, rng, machine(draft=0.0015))


def long_requests(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    kinds = np.repeat(rng.choice([0.85, 0.6, 0.3], size=n // 300 + 1, p=[0.6, 0.3, 0.1]), 300)[:n]
    return (Segment("requests of three kinds", drawn(kinds, rng), machine(draft=0.002)),)


def slow_stretches(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    text = drawn(stretches(n, 0.9, 0.5, (200, 100), rng), rng)
    return (Segment("stretches of 200 and 100", text, machine()),)


def night_and_day(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    waves = (2, 8, 32, 16, 4)
    return tuple(
        Segment(f"{rows} rows", drawn(np.full(n // 8 * rows, 0.8), rng), machine(rows, saturates=40.0), rows)
        for rows in waves
    )


def cold_and_middling(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    return constant((0.7,), n // 4, rng, machine(draft=0.002))


def slower_target(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    """The target's device is shared for a while: a pass takes twice as long."""
    costs = (machine(draft=0.003), machine(draft=0.003, target=0.040), machine(draft=0.003))
    names = ("a pass of 20 ms", "of 40 ms", "of 20 ms again")
    return tuple(Segment(name, drawn(np.full(n // 3, 0.75), rng), c) for name, c in zip(names, costs, strict=True))


def nearly_even(n: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    """Drafting and plain decoding take about as long."""
    return constant((0.4, 0.3), n // 2, rng, machine(draft=0.006))


HELD_OUT: dict[str, Callable[[int, np.random.Generator], tuple[Segment, ...]]] = {
    "rise": rise,
    "short cycle": short_cycle,
    "long requests": long_requests,
    "slow stretches": slow_stretches,
    "night and day": night_and_day,
    "cold and middling": cold_and_middling,
    "slower target": slower_target,
    "nearly even": nearly_even,
}


# -- recorded ----------------------------------------------------------------------------------------------------------


@cache
def recording(name: str) -> dict[str, npt.NDArray[np.float64]]:
    """The columns of a file of `bench/data`."""
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key].astype(np.float64) for key in file.files}


def recorded(name: str, kinds: Sequence[str], tokens: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    """A segment of ``tokens`` for each kind, from a random request on; a kind that comes again goes on where it was."""
    columns = recording(name)
    seconds = Seconds(columns["draft_s"], columns["verify_s"], columns["overhead_s"])
    began: dict[str, int] = {}
    found = []
    for kind in kinds:
        length, width = (columns[f"{kind}_{part}"].astype(np.int64) for part in ("length", "width"))
        accept = columns.get(f"{kind}_accept")
        text = Text(length, width, accept, accept)
        starts = np.flatnonzero(columns[f"{kind}_first"])
        start = began.get(kind, int(rng.choice(starts)))
        found.append(Segment(kind, text.cut(start, start + tokens), seconds))
        began[kind] = start + tokens
    return tuple(found)


RECORDED: dict[str, tuple[str, tuple[str, ...]]] = {
    "bundled easy": ("bundled", ("easy",)),
    "bundled hard": ("bundled", ("hard",)),
    "bundled easy-hard-easy": ("bundled", ("easy", "hard", "easy")),
    "SmolLM2 GSM8K": ("smollm2", ("gsm8k",)),
    "SmolLM2 copying": ("smollm2", ("copy",)),
    "SmolLM2 chat": ("smollm2", ("chat",)),
    "SmolLM2 categories": ("smollm2", ("gsm8k", "copy", "chat", "translation")),
}


def traces(tokens: int, seed: int, only: Sequence[str] = ()) -> list[Trace]:
    """All traces, of about ``tokens`` output tokens a row each; ``only`` those whose names are given."""
    made = []
    for i, (name, make) in enumerate(SYNTHETIC.items()):
        if not only or name in only:
            made.append(Trace(name, make(tokens, np.random.default_rng([seed, i]))))
    for i, (name, make) in enumerate(HELD_OUT.items()):
        if not only or name in only:
            made.append(Trace(name, make(tokens, np.random.default_rng([seed, 200 + i])), held_out=True))
    for i, (name, (file, kinds)) in enumerate(RECORDED.items()):
        if not only or name in only:
            segments = recorded(file, kinds, tokens // len(kinds), np.random.default_rng([seed, 100 + i]))
            made.append(Trace(name, segments, recorded=True))
    return made
