"""Where drafts come from: small vocabularies whose target and draft distributions are known exactly.

A *population* is a set of contexts. In each, a target ``p`` and a draft ``q`` over a few tokens with
``1 - TV(p, q) = acceptance``: the draft says what the target says, or with some weight something else, which is
plausible to the target (another wording) or a slip (a token it almost rules out). An *atom* is one token of one context
with the scalars that the worker would record for it; drafting is drawing atoms with their probability under ``q``.
Acceptance under any completed rule is then a table look-up, and the truth is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from controller.simulation.document import Hidden, Kind, Recorded
from policies.rules import Scalars, accept_prob, get_rule, lossless_accept
from storage.records import TokenBlock

F = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CONTEXTS = 24
_TOP_ALTERNATIVES, _SLIPS, _SLIP_PROB = 4, 4, 2e-4


@dataclass(frozen=True)
class Population:
    """Atoms of one acceptance rate: their scalars, cumulative probability of being drafted, and which are slips."""

    scalars: Scalars
    cumulative: F
    slip: Bools


@lru_cache(maxsize=512)
def population(acceptance: float, plausible: float) -> Population:
    """Contexts whose lossless acceptance is ``acceptance`` in [0.01, 1] each.

    ``plausible`` in [0, 1] is the share of the draft's deviations that are tokens the target finds plausible; the rest
    are slips. It is lowered where so low an acceptance leaves no room for it.
    """
    acceptance = min(1.0, max(0.01, acceptance))
    rng = np.random.default_rng(20_000)
    columns: list[list[F]] = [[] for _ in range(5)]
    slips: list[Bools] = []
    for _ in range(CONTEXTS):
        p, other = _context(rng, acceptance, plausible)
        weight = min(1.0, (1 - acceptance) / (0.5 * np.abs(p - other).sum()))
        q = (1 - weight) * p + weight * other
        ones = np.ones_like(p)
        values = (p, q, p.max() * ones, q.max() * ones, 0.5 * np.abs(p - q).sum() * ones)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        slips.append(p < 0.01 * p.max())
    px, qx, p_max, q_max, tv = (np.concatenate(c) for c in columns)
    cumulative = np.cumsum(qx)
    return Population(Scalars(px, qx, px, qx, p_max, q_max, tv), cumulative / cumulative[-1], np.concatenate(slips))


def _context(rng: np.random.Generator, acceptance: float, plausible: float) -> tuple[F, F]:
    """The target's distribution and the draft's deviation in one context."""
    top, ratio = rng.uniform(0.3, 0.95), rng.uniform(0.35, 0.8)
    alternatives = ratio ** np.arange(_TOP_ALTERNATIVES)
    rest = 1 - top - _SLIPS * _SLIP_PROB
    p = np.concatenate(([top], rest * alternatives / alternatives.sum(), np.full(_SLIPS, _SLIP_PROB)))
    slips = np.zeros_like(p)
    slips[-_SLIPS:] = 1 / _SLIPS
    wording = np.zeros_like(p)
    wording[1 : 1 + _TOP_ALTERNATIVES] = rng.dirichlet(np.ones(_TOP_ALTERNATIVES))
    share = plausible
    while share > 1e-3:
        other = share * wording + (1 - share) * slips
        if 0.5 * np.abs(p - other).sum() >= 1 - acceptance:
            return p, other
        share *= 0.8
    return p, slips


@dataclass
class Atoms:
    """The atoms of several populations in one table; ``offset[i]`` is where population i begins."""

    populations: tuple[Population, ...]
    scalars: Scalars = field(init=False)
    slip: Bools = field(init=False)
    offset: Ints = field(init=False)
    lossless: F = field(init=False)

    def __post_init__(self) -> None:
        self.scalars = Scalars(*(np.concatenate(c) for c in zip(*(p.scalars for p in self.populations), strict=True)))
        self.slip = np.concatenate([p.slip for p in self.populations])
        sizes = [len(p.slip) for p in self.populations]
        self.offset = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
        self.lossless = np.asarray(lossless_accept(self.scalars), dtype=np.float64)

    def draw(self, which: Ints, rng: np.random.Generator) -> Ints:
        """One drafted atom of population ``which[i]`` for each i."""
        u = rng.random(len(which))
        if len(self.populations) == 1:
            return np.searchsorted(self.populations[0].cumulative, u).astype(np.int64)
        found = np.empty(len(which), dtype=np.int64)
        for i, pop in enumerate(self.populations):
            here = which == i
            found[here] = self.offset[i] + np.searchsorted(pop.cumulative, u[here])
        return found

    def accept(self, rule: str, theta: float, rho: float) -> F:
        """Acceptance probability of every atom under a rule and knob."""
        if theta <= 0 or rho <= 0 or rule == "lossless":
            return self.lossless
        return np.asarray(accept_prob(get_rule(rule), self.scalars, theta, rho), dtype=np.float64)


class Source:
    """Texts of several kinds: which populations the output positions of requests draw from."""

    def __init__(self, kinds: Mapping[str, Kind], directory: Path = Path()):
        self.kinds = tuple(kinds.values())
        self._recorded = {
            kind.acceptance.recorded: load_recording(directory / kind.acceptance.recorded)
            for kind in self.kinds
            if isinstance(kind.acceptance, Recorded)
        }
        self._cursor = dict.fromkeys(self._recorded, 0)
        self._easy = [True] * len(self.kinds)
        self._key: tuple[tuple[float, float], ...] = ()
        self._atoms: Atoms | None = None

    def atoms(self, t: float) -> Atoms:
        """The atoms at ``t`` seconds. Populations come in the order of kinds, easy before hard."""
        key: list[tuple[float, float]] = []
        for kind in self.kinds:
            spec = kind.acceptance
            if isinstance(spec, Recorded):
                key.append((-1.0, 0.0))
            else:
                rates = (spec.easy, spec.hard) if isinstance(spec, Hidden) else (spec,)
                key += [(round(rate.at(t), 3), kind.plausible) for rate in rates]
        if self._atoms is None or tuple(key) != self._key:
            recorded = iter(k.acceptance.recorded for k in self.kinds if isinstance(k.acceptance, Recorded))
            populations = [self._recorded[next(recorded)] if rate < 0 else population(rate, pl) for rate, pl in key]
            self._atoms, self._key = Atoms(tuple(populations)), tuple(key)
        return self._atoms

    def write(self, kind: Ints, tokens: Ints, t: float, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Texts of requests of these kinds and lengths, one after another: (population, atom) per output position.

        Populations of recorded text are -1: its atoms come in recorded order. A kind's easy and hard stretches run on
        from one request to the next.
        """
        atoms = self.atoms(t)
        of = np.repeat(kind, tokens)
        which = np.zeros(len(of), dtype=np.int64)
        drawn = np.empty(len(of), dtype=np.int64)
        number = 0
        for i, spec in enumerate(self.kinds):
            here = np.flatnonzero(of == i)
            if isinstance(spec.acceptance, Recorded):
                name = spec.acceptance.recorded
                size = len(self._recorded[name].slip)
                drawn[here] = atoms.offset[number] + (self._cursor[name] + np.arange(len(here))) % size
                self._cursor[name] = (self._cursor[name] + len(here)) % size
                which[here] = -1
            else:
                which[here] = number + self._hard(i, len(here), rng)
            number += 2 if isinstance(spec.acceptance, Hidden) else 1
        fresh = which >= 0
        drawn[fresh] = atoms.draw(which[fresh], rng)
        return which, drawn

    def _hard(self, i: int, n: int, rng: np.random.Generator) -> Ints:
        """1 where the next n tokens of kind i are hard, and remember where that ends."""
        spec = self.kinds[i].acceptance
        state = np.zeros(n, dtype=np.int64)
        if not isinstance(spec, Hidden) or n == 0:
            return state
        means = (spec.easy_tokens, spec.hard_tokens)
        pairs = max(2, int(2 * n / sum(means)) + 8)
        order = means if self._easy[i] else means[::-1]
        runs = np.stack([rng.geometric(1 / m, pairs) for m in order], axis=1).ravel()
        while runs.sum() < n:
            runs = np.concatenate((runs, np.stack([rng.geometric(1 / m, pairs) for m in order], axis=1).ravel()))
        states = (np.arange(len(runs)) + (not self._easy[i])) % 2
        state = np.repeat(states, runs)[:n]
        self._easy[i] = bool(state[-1] == 0)
        return state


@dataclass(frozen=True)
class Truth:
    """Exact to Monte Carlo error: reach and touches of a round by block length, shape [g + 1]."""

    reach: F
    touches: F

    @property
    def tokens(self) -> F:
        """Tokens per round by block length."""
        return np.cumsum(self.reach)


def frozen_truth(
    kind: Kind, rule: str, theta: float, rho: float, g: int, *, rounds: int, rng: np.random.Generator, t: float = 0.0
) -> Truth:
    """Reach and touches of ``rounds`` rounds that start anywhere in the text of ``kind``, whatever the knob in use."""
    source = Source({"kind": kind})
    length = np.full(rounds, g + 1, dtype=np.int64)
    _, drawn = source.write(np.zeros(rounds, dtype=np.int64), length, t, rng)
    atoms = source.atoms(t)
    table, lossless = atoms.accept(rule, theta, rho), atoms.lossless
    block = drawn.reshape(rounds, g + 1)[:, :g]
    after = np.cumprod(table[block], axis=1)
    before = np.concatenate((np.ones((rounds, 1)), after[:, :-1]), axis=1)
    touch = (before * (table - lossless)[block]).mean(axis=0)
    return Truth(np.concatenate(([1.0], after.mean(axis=0))), np.concatenate(([0.0], np.cumsum(touch))))


def save_recording(path: str | Path, blocks: Sequence[TokenBlock]) -> None:
    """Write the scalars of the drafted positions of telemetry blocks, in order, as a compressed .npz file."""
    columns = {name: np.concatenate([getattr(b, name) for b in blocks]) for name in Scalars._fields}
    np.savez_compressed(path, **columns)  # type: ignore[arg-type]


def load_recording(path: str | Path) -> Population:
    """The population of recorded positions in the order of the file; raises ValueError for a file that is not one."""
    with np.load(path, allow_pickle=False) as stored:
        missing = [name for name in Scalars._fields if name not in stored]
        if missing:
            raise ValueError(f"{path}: no column {', '.join(missing)}; a recording has {', '.join(Scalars._fields)}")
        columns = [np.asarray(stored[name], dtype=np.float64) for name in Scalars._fields]
    if len({len(c) for c in columns}) > 1 or not len(columns[0]):
        raise ValueError(f"{path}: columns must be equally long and not empty")
    if any(not np.all(np.isfinite(c)) or c.min() < 0 or c.max() > 1 + 1e-6 for c in columns):
        raise ValueError(f"{path}: every value must lie in [0, 1]")
    scalars = Scalars(*columns)
    uniform = np.linspace(0, 1, len(columns[0]) + 1)[1:]
    return Population(scalars, uniform, scalars.target_prob_raw < 0.01 * scalars.target_max_raw)
