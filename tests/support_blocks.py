"""Builders of `TokenBlock`s for tests: from given acceptance probabilities, or from a synthetic source with memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policies.rules import Scalars, accept_prob, get_rule, lossless_accept
from storage.records import ACCEPTED, EXAMINED, PINNED, TOUCH, TokenBlock

F = npt.NDArray[np.float64]


def make_block(
    scalars: Scalars,
    length: Sequence[int] | npt.NDArray[np.int64],
    *,
    rule: str = "token_v3",
    theta: float = 0.0,
    rho: float = 1.0,
    rng: np.random.Generator | None = None,
    pinned: npt.NDArray[np.bool_] | None = None,
    rows: int = 1,
    requests: npt.NDArray[np.int64] | None = None,
    draft_s: F | float = 0.004,
    verify_s: F | float = 0.02,
    overhead_s: F | float = 0.001,
    pool: str = "pool",
    traffic_class: str = "default",
    seq: int = 0,
    worker: str = "w0",
) -> TokenBlock:
    """A block whose drafted positions have these scalars (flat, in order), with these numbers of drafts a round.

    Coins are drawn from ``rng`` (seed 0 by default): positions are examined until the first rejection.
    """
    rng = rng or np.random.default_rng(0)
    length = np.asarray(length, dtype=np.int64)
    n = int(length.sum())
    rounds = len(length)
    first = np.concatenate(([0], np.cumsum(length)[:-1])).astype(np.int64)
    round_index = np.repeat(np.arange(rounds), length)
    position = np.arange(n) - np.repeat(first, length) + 1
    pinned = np.zeros(n, dtype=bool) if pinned is None else pinned
    a0 = np.asarray(lossless_accept(scalars))
    a = np.where(pinned, a0, accept_prob(get_rule(rule), scalars, theta, rho))
    u = rng.random(n)
    examined = np.zeros(n, dtype=bool)
    emitted = np.ones(rounds, dtype=np.int64)
    for r in range(rounds):
        for i in range(first[r], first[r] + length[r]):
            examined[i] = True
            if u[i] > a[i]:
                break
            emitted[r] += 1
    accepted = examined & (u <= a)
    flags = EXAMINED * examined + ACCEPTED * accepted + TOUCH * (accepted & (u > a0)) + PINNED * pinned

    def seconds(value: F | float) -> npt.NDArray[np.float32]:
        return np.broadcast_to(np.asarray(value, dtype=np.float32), (rounds,)).copy()

    return TokenBlock(
        pool=pool,
        traffic_class=traffic_class,
        worker=worker,
        boot="b0",
        seq=seq,
        epoch=1,
        lease_seq=1,
        rule=rule,
        rho=rho,
        round_rows=np.full(rounds, rows, dtype=np.uint16),
        round_width=length.astype(np.uint16),
        round_emitted=emitted.astype(np.uint32),
        round_prefill=np.zeros(rounds, dtype=np.uint32),
        round_draft_s=seconds(draft_s) * (length > 0),
        round_verify_s=seconds(verify_s),
        round_overhead_s=seconds(overhead_s),
        request=(np.zeros(n) if requests is None else requests).astype(np.uint16),
        round=round_index.astype(np.uint32),
        position=position.astype(np.uint8),
        theta=np.where(pinned, 0.0, theta).astype(np.float32),
        flags=flags.astype(np.uint8),
        **{name: np.asarray(value, dtype=np.float32) for name, value in scalars._asdict().items()},
    )


def coin_scalars(a0: F | Sequence[float], plausible: F | Sequence[float] | None = None) -> Scalars:
    """Scalars of drafts with lossless acceptance ``a0`` and, for the token rules, ``p(x) / max p = plausible``.

    ``token_v3`` accepts the draft with certainty where ``plausible >= 1 - theta``.
    """
    a = np.asarray(a0, dtype=np.float64)
    ratio = np.ones_like(a) if plausible is None else np.asarray(plausible, dtype=np.float64)
    q = np.full_like(a, 0.5)
    return Scalars(a * q, q, 0.5 * ratio, q, np.full_like(a, 0.5), q, 1 - a)


def timing_block(
    width: Sequence[int] | npt.NDArray[np.int64],
    *,
    draft_s: F | float,
    verify_s: F | float,
    overhead_s: F | float = 0.001,
    rows: int = 1,
    seq: int = 0,
    worker: str = "w0",
) -> TokenBlock:
    """A block with measured seconds for rounds of these block lengths; its drafts are all accepted."""
    n = int(np.sum(width))
    return make_block(
        coin_scalars(np.ones(n)),
        width,
        draft_s=draft_s,
        verify_s=verify_s,
        overhead_s=overhead_s,
        rows=rows,
        seq=seq,
        worker=worker,
    )


@dataclass
class MarkovSource:
    """Target and draft distributions that depend on a hidden state with memory, driven by the emitted tokens.

    Each state has its own target ``p`` and draft ``q`` over ``vocab`` tokens; some states agree, some do not. The state
    moves with the last token and stays put with probability ``stickiness``, so rounds are autocorrelated, and where a
    round starts depends on the knob in use.
    """

    states: int = 6
    vocab: int = 8
    stickiness: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.p = rng.dirichlet(np.full(self.vocab, 0.6), size=self.states)
        other = rng.dirichlet(np.full(self.vocab, 0.6), size=self.states)
        agree = np.linspace(0.98, 0.3, self.states)[:, None]
        self.q = agree * self.p + (1 - agree) * other
        self.next = rng.integers(0, self.states, size=(self.states, self.vocab))

    def step(self, state: int, token: int, u: float) -> int:
        """The state after a token."""
        return state if u < self.stickiness else int(self.next[state, token])

    def scalars(self, state: npt.NDArray[np.int64], token: npt.NDArray[np.int64]) -> Scalars:
        """The scalars of drafts ``token`` proposed in ``state``."""
        p, q = self.p[state], self.q[state]
        rows = np.arange(len(state))
        px, qx = p[rows, token], q[rows, token]
        tv = 0.5 * np.abs(p - q).sum(axis=1)
        return Scalars(px, qx, px, qx, p.max(axis=1), q.max(axis=1), tv)

    def draft(
        self, starts: npt.NDArray[np.int64], g: int, rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """States (shape [rounds, g + 1]) and tokens ([rounds, g]) of blocks drafted from these states."""
        n = len(starts)
        states, tokens = np.empty((n, g + 1), dtype=np.int64), np.empty((n, g), dtype=np.int64)
        states[:, 0] = starts
        cumulative = np.cumsum(self.q, axis=1)
        for j in range(g):
            u = rng.random(n)[:, None] * cumulative[states[:, j], -1][:, None]
            tokens[:, j] = (u > cumulative[states[:, j]]).sum(axis=1)
            stay = rng.random(n) < self.stickiness
            states[:, j + 1] = np.where(stay, states[:, j], self.next[states[:, j], tokens[:, j]])
        return states, tokens

    def starts(self, rounds: int, g: int, rng: np.random.Generator, rule: str, theta: float) -> npt.NDArray[np.int64]:
        """States in which the rounds of one long generation at a knob begin."""
        out = np.empty(rounds, dtype=np.int64)
        state = 0
        for r in range(rounds):
            out[r] = state
            states, tokens = self.draft(np.array([state]), g, rng)
            a = accept_prob(get_rule(rule), self.scalars(states[0, :g], tokens[0]), theta)
            rejected = np.flatnonzero(rng.random(g) > a)
            stop = int(rejected[0]) if len(rejected) else g
            state = int(states[0, stop])
            p, q = self.p[state], self.q[state]
            residual = np.maximum(p - q, 0.0) if stop < g else p
            law = residual / residual.sum() if residual.sum() > 0 else p
            state = self.step(state, int(rng.choice(self.vocab, p=law)), rng.random())
        return out
