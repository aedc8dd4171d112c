"""One point of the frontier: rounds under a rule and its knob, many tasks at a time, paired with lossless decoding.

Token by token, as `decoder.demo.simulation` does it, whose streams and draws are used here, but with rounds: up to
``g`` examined positions, ended by a rejection or by a bonus token that comes from the target alone. So passes are
counted as a worker counts them, and bonus tokens are as lossless as a worker's. Published forms can be run too.

The random numbers belong to (task, position). At every step the lossless outcome is computed beside the rule's, on the
same proposal and numbers; a *touch* is a step where the two differ. Until its first touch a request is its lossless
self, rounds included, so untouched requests have no loss at all, and losses are paired differences.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoder.demo.pair import EOS, Pair
from decoder.demo.simulation import _Stream as Stream
from decoder.demo.simulation import distributions, inverse_cdf
from decoder.demo.tasks import Problem, score_exact, score_strict
from policies.published import Form, Laws, drift, examine, get_form
from policies.rules import get_rule

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """What one setting did; one entry per task, in the order of the tasks, and ``rounds`` of shape [n, g + 1].

    ``exact`` and ``strict`` are scores in [0, 1]; ``text`` is a checksum of the answer; ``tokens`` came out;
    ``touches`` as above; ``rounds[i, j]`` counts the rounds that put out more than j tokens (j = 0: all rounds, so
    target passes). ``examined`` and ``accepted`` count drafted tokens; ``gain`` and ``drift`` are sums over the
    examined positions of ``E_q[A] - E_q[A0]`` and of the total variation between what comes out and the target's law.
    """

    exact: Floats
    strict: Floats
    text: Floats
    tokens: Floats
    touches: Floats
    rounds: Floats
    examined: Floats
    accepted: Floats
    gain: Floats
    drift: Floats

    @property
    def passes(self) -> Floats:
        """Target passes of each task."""
        return np.asarray(self.rounds[:, 0])

    def to_json(self) -> dict[str, Any]:
        """Plain lists; whole numbers are written as such."""
        return {
            name: np.round(column, 5).tolist() if name in ("gain", "drift") else column.astype(int).tolist()
            for name, column in asdict(self).items()
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Columns:
        """The inverse of `to_json`; raises KeyError for a missing column."""
        return cls(**{field.name: np.array(data[field.name], dtype=np.float64) for field in fields(cls)})


def run_point(
    pair: Pair,
    tasks: Sequence[Problem],
    rule: str,
    theta: float,
    rho: float = 1.0,
    *,
    g: int,
    temperature: float = 1.0,
    seed: int = 5,
    max_tokens: int = 200,
    batch: int = 250,
) -> Columns:
    """Decode all tasks with blocks of ``g`` under the rule or published form of that name.

    The uniform numbers are a function of ``seed``, the task's place and the position: runs over the same tasks with the
    same seed are coupled. ``batch`` changes speed only.
    """
    form = get_form(rule)
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(3, len(tasks), max_tokens, generator=generator)
    parts = []
    for start in range(0, len(tasks), batch):
        rows = slice(start, start + batch)
        run = _Run(len(tasks[rows]), form, theta, rho, g, temperature)
        run.decode(pair, tasks[rows], uniforms[:, rows])
        parts.append(run)
    texts = [pair.tokenizer.decode([t for t in ids if t != EOS]) for part in parts for ids in part.out]
    graded = list(zip(texts, tasks, strict=True))
    sums = {name: torch.cat([getattr(part, name) for part in parts]).double().numpy() for name in _SUMS}
    return Columns(
        exact=np.array([score_exact(text, task.answer) for text, task in graded]),
        strict=np.array([score_strict(text, task.answer) for text, task in graded]),
        text=np.array([zlib.crc32(text.encode()) for text in texts], dtype=np.float64),
        tokens=np.array([len(ids) for part in parts for ids in part.out], dtype=np.float64),
        **sums,
    )


_SUMS = ("touches", "rounds", "examined", "accepted", "gain", "drift")


class _Run:
    """One batch of tasks at work: what came out of each, where its round stands, and the sums of `Columns`."""

    def __init__(self, n: int, form: Form, theta: float, rho: float, g: int, temperature: float) -> None:
        self.form, self.theta, self.rho, self.g, self.temperature = form, theta, rho, g, temperature
        self.lossless = get_rule("lossless")
        self.out: list[list[int]] = [[] for _ in range(n)]
        self.place = torch.zeros(n, dtype=torch.long)  # drafted tokens accepted so far in the row's round
        self.touches, self.examined, self.accepted = (torch.zeros(n, dtype=torch.long) for _ in range(3))
        self.gain, self.drift = (torch.zeros(n, dtype=torch.float64) for _ in range(2))
        self.rounds = torch.zeros(n, g + 1, dtype=torch.long)

    @torch.inference_mode()
    def decode(self, pair: Pair, tasks: Sequence[Problem], uniforms: Tensor) -> None:
        """``uniforms`` float [3: draft, accept, residual or bonus; rows; positions] in [0, 1)."""
        live, stream = torch.arange(len(tasks)), Stream(pair, tasks)
        for t in range(uniforms.shape[-1]):
            logits = stream.logits()
            raw = [distributions(x, 1.0) for x in logits]
            p, q = raw if self.temperature == 1 else [distributions(x, self.temperature) for x in logits]
            tokens = self._step(live, Laws(p, q, *raw), uniforms[:, live, t])
            for i, token in zip(live.tolist(), tokens.tolist(), strict=True):
                self.out[i].append(token)
            live = live[stream.advance(tokens)]
            if len(live) == 0:
                break

    def _step(self, live: Tensor, laws: Laws, uniforms: Tensor) -> Tensor:
        """One position of every live row: an examined one, or the bonus where the whole block was accepted."""
        u_draft, u_accept, u_residual = uniforms
        x = inverse_cdf(laws.draft_probs, u_draft)
        exact = examine(self.lossless, laws, 0.0)
        mine = exact if self.form is self.lossless else examine(self.form, laws, self.theta, self.rho)
        outcomes = []
        for accept, residual in (exact, mine):
            a = accept.gather(1, x[:, None])[:, 0]
            passed = (1 - u_accept <= a) & (a > 0)
            outcomes.append((passed, torch.where(passed, x, inverse_cdf(residual, u_residual))))
        (passed0, token0), (passed, token) = outcomes

        place = self.place[live]
        bonus = place == self.g
        self.rounds[live, place] += 1
        self.touches[live] += (~bonus & ((passed != passed0) | (token != token0))).long()
        self.examined[live] += (~bonus).long()
        self.accepted[live] += (~bonus & passed).long()
        if mine is not exact:
            gained = (laws.draft_probs * (mine.accept - exact.accept)).sum(-1)
            self.gain[live] += torch.where(bonus, 0.0, gained).double()
            self.drift[live] += torch.where(bonus, 0.0, drift(mine, laws)).double()
        self.place[live] = torch.where(bonus | ~passed, 0, place + 1)
        return torch.where(bonus, inverse_cdf(laws.target_probs, u_residual), token)
