"""Token-by-token simulation of lenient speculative decoding, many problems at a time.

At every position the draft proposes ``x ~ q``. It is accepted when ``u <= A(x)``, where the rule's ``A >= A0`` and
``A0 = min(1, p/q)`` is the lossless rule. On rejection the token is drawn from the residual ``(p - q)+``.
The random numbers belong to (problem, position), so all settings see the same ones: a request that is never touched
(no ``u`` in ``(A0, A]``) gets exactly its lossless text, and losses are paired differences. With a holdback a request
takes the lossless outcome at its first touch with that probability, and stays lossless from there on.

The worker's own code is not used here, only the rules: each is a check of the other. Every position is examined,
there are no rounds and no bonus tokens, so acceptance is the mean over positions, weighted by emitted tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from decoder.demo.pair import CACHE_ARGUMENT, EOS, PAD, Pair, prompt_ids
from decoder.demo.problems import Domain
from decoder.demo.tasks import Problem, make_problem, score_exact, score_strict
from policies.rules import Scalars, accept_prob, get_rule, lossless_accept

LONGEST = 200  # tokens of a solution; the longest in the hard domain have about 130

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Setting(NamedTuple):
    """A rule of `policies.rules.RULES` with its knob ``theta`` and mixing weight ``rho``, both in [0, 1]."""

    rule: str
    theta: float
    rho: float = 1.0


LOSSLESS = Setting("lossless", 0.0)
FULL = Setting("threshold", 1.0)  # every rule accepts everything at its end; the text is the draft's own


@dataclass(frozen=True)
class Run:
    """What one setting did; arrays have one entry per problem, in the order the problems were given.

    ``accepted``, ``drift`` and ``overlap`` are sums over the positions of a request: the expected acceptance
    ``E_q[A]``, the expected touches ``E_q[A - A0]``, and ``sum min(p, q)``.
    """

    texts: list[str]
    exact: Floats
    strict: Floats
    touches: NDArray[np.int64]
    held: Flags
    tokens: NDArray[np.int64]
    accepted: Floats
    drift: Floats
    overlap: Floats

    @property
    def touched(self) -> Flags:
        return self.touches > 0

    @property
    def acceptance(self) -> float:
        """Mean acceptance probability of a position, in [0, 1]."""
        return float(self.accepted.sum() / self.tokens.sum())


def fresh_problems(seed: int, n: int, domain: Domain) -> list[Problem]:
    """``n`` problems of a domain, ordered by length so that batches need little padding."""
    rng = random.Random(seed)
    return sorted((make_problem(rng, domain) for _ in range(n)), key=lambda p: len(p.prompt))


def distributions(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Softmax over the last axis at ``temperature``; one-hot on the argmax at temperature 0."""
    if temperature > 0:
        return (logits.float() / temperature).softmax(-1)
    return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()


def position_scalars(p: torch.Tensor, q: torch.Tensor, p_raw: torch.Tensor, q_raw: torch.Tensor) -> Scalars:
    """The scalars of every token of the vocabulary at once: (rows, vocabulary) arrays, the maxima and TV (rows, 1)."""
    tv = (p - q).clamp_min(0).sum(-1, keepdim=True)
    return Scalars(p, q, p_raw, q_raw, p_raw.amax(-1, keepdim=True), q_raw.amax(-1, keepdim=True), tv)


def inverse_cdf(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """One draw per row from unnormalised weights, made from the given uniform numbers in [0, 1)."""
    cdf = weights.double().cumsum(-1)
    return torch.searchsorted(cdf, (u.double() * cdf[:, -1])[:, None], right=True)[:, 0].clamp_max(cdf.shape[1] - 1)


def decode(
    pair: Pair,
    problems: Sequence[Problem],
    setting: Setting = LOSSLESS,
    *,
    temperature: float = 1.0,
    holdback: float = 0.0,
    seed: int = 5,
    batch: int = 250,
) -> Run:
    """Decode all problems at one setting.

    The uniform numbers are a function of ``seed``, the problem's place in ``problems`` and the position, so runs over
    the same problems with the same seed are coupled whatever their setting. ``batch`` changes speed only.
    """
    n = len(problems)
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(3, n, LONGEST, generator=generator)
    hold = torch.rand(n, generator=generator) < holdback
    parts = []
    for start in range(0, n, batch):
        rows = slice(start, min(start + batch, n))
        parts.append(_decode_batch(pair, problems[rows], setting, temperature, uniforms[:, rows], hold[rows]))
    tokens, touches, held, sums = (list(column) for column in zip(*parts, strict=True))
    texts = [pair.tokenizer.decode([t for t in ids if t != EOS]) for part in tokens for ids in part]
    accepted, drift, overlap = np.concatenate(sums, axis=1)
    graded = list(zip(texts, problems, strict=True))
    return Run(
        texts=texts,
        exact=np.array([score_exact(text, p.answer) for text, p in graded]),
        strict=np.array([score_strict(text, p.answer) for text, p in graded]),
        touches=np.concatenate(touches),
        held=np.concatenate(held),
        tokens=np.array([len(ids) for part in tokens for ids in part]),
        accepted=accepted,
        drift=drift,
        overlap=overlap,
    )


@torch.inference_mode()
def _decode_batch(
    pair: Pair,
    problems: Sequence[Problem],
    setting: Setting,
    temperature: float,
    uniforms: torch.Tensor,  # (3: draft, accept, residual; rows; positions)
    hold: torch.Tensor,  # (rows,): would this request be held back at its first touch?
) -> tuple[list[list[int]], NDArray[np.int64], Flags, Floats]:
    n = len(problems)
    rule = get_rule(setting.rule)
    tokens: list[list[int]] = [[] for _ in range(n)]
    touches = torch.zeros(n, dtype=torch.long)
    held = torch.zeros(n, dtype=torch.bool)
    sums = torch.zeros(3, n, dtype=torch.float64)
    live = torch.arange(n)  # the problem of each row that has not ended
    stream = _Stream(pair, problems)
    for t in range(LONGEST):
        logits = stream.logits()
        p_raw, q_raw = (distributions(x, 1.0) for x in logits)
        p, q = (p_raw, q_raw) if temperature == 1 else (distributions(x, temperature) for x in logits)
        u_draft, u_accept, u_residual = uniforms[:, live, t]
        x = inverse_cdf(q, u_draft)
        scalars = position_scalars(p, q, p_raw, q_raw)
        lossless = lossless_accept(scalars)
        lenient = accept_prob(rule, scalars, setting.theta, setting.rho)
        lenient = torch.where(held[live, None], lossless, lenient)
        for row, value in enumerate((q * lenient, q * (lenient - lossless), torch.minimum(p, q))):
            sums[row, live] += value.sum(-1).double()
        a0, a = (table.gather(1, x[:, None])[:, 0] for table in (lossless, lenient))
        touch = (u_accept > a0) & (u_accept <= a)
        held[live] |= touch & (touches[live] == 0) & hold[live]
        touches[live] += touch.long()
        residual = (p - q).clamp_min(0)
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
        y = torch.where(u_accept <= torch.where(held[live], a0, a), x, inverse_cdf(residual, u_residual))
        for i, token in zip(live.tolist(), y.tolist(), strict=True):
            tokens[i].append(token)
        live = live[stream.advance(y)]
        if len(live) == 0:
            break
    return tokens, touches.numpy(), held.numpy(), sums.numpy()


class _Stream:
    """Both models over the same left-padded batch: the next logits, then one token per row; ended rows are dropped."""

    def __init__(self, pair: Pair, problems: Sequence[Problem]) -> None:
        ids = [prompt_ids(pair.tokenizer, problem.prompt) for problem in problems]
        width = max(map(len, ids))
        self.models: tuple[Any, Any] = (pair.target, pair.draft)
        self.caches = (DynamicCache(), DynamicCache())
        self.step = torch.tensor([[PAD] * (width - len(row)) + row for row in ids])
        self.mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
        self.position = (self.mask.cumsum(-1) - 1).clamp_min(0)

    def logits(self) -> list[torch.Tensor]:
        """The target's and the draft's logits of the next token, each (rows, vocabulary)."""
        out = []
        for model, cache in zip(self.models, self.caches, strict=True):
            answer = model(
                self.step,
                attention_mask=self.mask,
                position_ids=self.position,
                use_cache=True,
                logits_to_keep=1,
                **{CACHE_ARGUMENT: cache},
            )
            out.append(answer.logits[:, -1])
        return out

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token per row; returns the rows that go on (those that did not end), the only ones kept."""
        keep = (tokens != EOS).nonzero()[:, 0]
        if 0 < len(keep) < len(tokens):
            for cache in self.caches:
                cache.batch_select_indices(keep)
        self.step = tokens[keep, None]
        self.position = self.position[keep, -1:] + 1
        self.mask = torch.cat([self.mask[keep], torch.ones(len(keep), 1, dtype=torch.long)], 1)
        return keep
