"""From logits to the distributions that decoding works with, and draws from them by given uniforms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

MAX_LOGPROBS = 20
_COLDEST = 1e-37  # a float32 above 0


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    ``temperature`` >= 0 (0 is greedy); ``top_k`` >= 0 (0 is off); ``top_p`` in (0, 1] (1 is off); ``max_tokens`` >= 1;
    ``seed`` >= 0; ``logit_bias`` maps token ids to what is added to their logits of both models (minus infinity masks a
    token: it never comes out). ``min_p`` in [0, 1] drops tokens of less than that share of the greatest probability (0
    is off); before output index ``min_tokens`` no end token comes out; the request ends where its text holds one of the
    strings ``stop``; ``logprobs`` >= 0 asks for the target's log-probability of every output token and of so many most
    probable ones (None: not at all). Penalties depend on the output so far and are refused unless they are off (0, 0
    and 1). Raises ValueError that names the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 128
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    min_p: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number >= 0, not {self.temperature!r}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 is off), not {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p!r}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens!r}")
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, not {self.seed!r}")
        for token, bias in self.logit_bias.items():
            if token < 0 or math.isnan(bias) or bias == math.inf:
                raise ValueError(f"logit_bias of token {token!r} must be a number below infinity, not {bias!r}")
        self._check_ends_and_penalties()

    def _check_ends_and_penalties(self) -> None:
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1] (0 is off), not {self.min_p!r}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be >= 0, not {self.min_tokens!r}")
        if not isinstance(self.stop, tuple) or not all(self.stop):
            raise ValueError(f"stop must be a tuple of strings that are not empty, not {self.stop!r}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs must lie in 0..{MAX_LOGPROBS}, not {self.logprobs!r}")
        for name, off in (("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0)):
            if getattr(self, name) != off:
                raise ValueError(f"{name} is not supported: leave it out, or set it to {off:g}")


def bias_tensor(params: SamplingParams, vocab_size: int, device: torch.device | str = "cpu") -> Tensor | None:
    """``params.logit_bias`` as a float32 tensor [V], or None if there is none; ValueError if it leaves no token."""
    if not params.logit_bias:
        return None
    bias = torch.zeros(vocab_size)
    for token, value in params.logit_bias.items():
        if token >= vocab_size:
            raise ValueError(f"logit_bias of token {token}: the vocabulary has {vocab_size} tokens")
        bias[token] = value
    if bool(torch.isneginf(bias).all()):
        raise ValueError("logit_bias masks every token")
    return bias.to(device)


def process(logits: Tensor, params: SamplingParams, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Processed and raw distributions of ``logits`` [..., V], both float32 [..., V].

    The first is what sampling draws from: after bias, temperature, top-k (ties with the k-th stay), top-p and min-p, in
    this order; one-hot at temperature 0 (the first of equal maxima). The second is taken at temperature 1 after the
    bias only, so that it still means something when decoding greedily. The two are one tensor where they are equal.
    ``bias`` is `bias_tensor` of the same parameters, passed in so that it is made once.
    """
    if bias is None:
        bias = bias_tensor(params, logits.shape[-1], logits.device)
    rows = logits.float().reshape(1, -1, logits.shape[-1])
    probs, raw = _Settings.of([params], logits.device).distributions(rows, bias)
    shaped = raw.view(logits.shape)
    return (shaped if probs is raw else probs.view(logits.shape)), shaped


class Sampler:
    """The sampling parameters of the rows of a batch, as tensors: every row gets what `process` would give it alone."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str = "cpu"):
        self._settings = _Settings.of(params, device)
        biases = [bias_tensor(row, vocab_size, device) for row in params]
        self._bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            none = torch.zeros(vocab_size, device=device)
            self._bias = torch.stack([none if bias is None else bias for bias in biases]).unsqueeze(1)

    @property
    def greedy(self) -> bool:
        """Whether every row is greedy."""
        return self._settings.greedy

    def process(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """`process` of ``logits`` [B, n, V], row by row."""
        return self._settings.distributions(logits.float(), self._bias)

    def best(self, logits: Tensor) -> Tensor:
        """The token of every greedy position of ``logits`` [B, n, V]: where `process` is one-hot, int64 [B, n]."""
        return (logits if self._bias is None else logits.float() + self._bias).argmax(-1)

    def draw(self, probs: Tensor, uniforms: Tensor) -> Tensor:
        """One token per position from processed ``probs`` [B, n, V], int64 [B, n], by ``uniforms`` [B, n]."""
        return probs.argmax(-1) if self.greedy else draw(probs, uniforms)


@dataclass(frozen=True)
class _Settings:
    """What `distributions` needs to know; tensors are [B, 1, 1], or [1, 1, 1] where all rows agree."""

    greedy: bool  # every row
    plain: bool  # every row: nothing to do at all
    temperature: Tensor  # 1 where greedy
    cold: Tensor | None  # greedy rows, if there are both kinds
    top_k: Tensor | None
    most_k: int
    top_p: Tensor | None
    min_p: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], device: torch.device | str) -> _Settings:
        first = rows[0]
        same = all(
            (row.temperature, row.top_k, row.top_p, row.min_p)
            == (first.temperature, first.top_k, first.top_p, first.min_p)
            for row in rows[1:]
        )
        rows = rows[:1] if same else rows
        cold = [row.temperature == 0 for row in rows]
        filtered = any(row.top_k or row.top_p < 1 or row.min_p for row in rows)

        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None, None]

        def wanted(values: list[float], off: float) -> Tensor | None:
            return None if all(value == off for value in values) else column(values)

        most_k = max(row.top_k for row in rows)
        return cls(
            greedy=all(cold),
            plain=not filtered and all(row.temperature == 1 for row in rows),
            temperature=column([max(row.temperature, _COLDEST) if row.temperature else 1.0 for row in rows]),
            cold=column([float(c) for c in cold], torch.bool) if any(cold) and not all(cold) else None,
            top_k=column([row.top_k for row in rows], torch.int64) if most_k else None,
            most_k=most_k,
            top_p=wanted([row.top_p for row in rows], 1.0),
            min_p=wanted([row.min_p for row in rows], 0.0),
        )

    def distributions(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `process`."""
        if bias is not None:
            logits = logits + bias
        raw = logits.softmax(-1)
        if self.greedy:
            return _one_hot(raw, logits), raw
        if self.plain:
            return raw, raw
        # Subtracting the maximum first keeps a tiny temperature finite.
        scaled = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is not None:
            scaled = self._keep_top_k(scaled, self.top_k)
        probs = scaled.softmax(-1)
        if self.top_p is not None:
            probs = self._keep_top_p(probs, self.top_p)
        if self.min_p is not None:
            kept = probs.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), 0.0)
            probs = torch.where(self.min_p > 0, kept / kept.sum(-1, keepdim=True), probs)
        return (probs if self.cold is None else torch.where(self.cold, _one_hot(raw, logits), probs)), raw

    def _keep_top_k(self, logits: Tensor, top_k: Tensor) -> Tensor:
        best = logits.topk(min(self.most_k, logits.shape[-1]), dim=-1).values
        place = (top_k - 1).clamp(0, best.shape[-1] - 1).expand(*best.shape[:-1], 1)
        gone = (logits < best.gather(-1, place)) & (top_k > 0)
        return logits.masked_fill(gone, -math.inf)

    def _keep_top_p(self, probs: Tensor, top_p: Tensor) -> Tensor:
        ordered, order = probs.sort(-1, descending=True)
        # A token goes when those before it already hold top_p; the first one always stays.
        gone = ordered.cumsum(-1) - ordered >= top_p
        gone[..., 0] = False
        kept = probs.masked_fill(gone.scatter(-1, order, gone), 0.0)
        return torch.where(top_p < 1, kept / kept.sum(-1, keepdim=True), probs)


def _one_hot(like: Tensor, logits: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index per row from non-negative ``weights`` [..., V], by inversion of ``uniforms`` [...] in [0, 1).

    Weights need not be normalised but must not be all zero. An index of weight 0 is never drawn. Returns int64 [...].
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    point = uniforms.to(torch.float64).unsqueeze(-1) * cdf[..., -1:]
    return torch.searchsorted(cdf, point, right=True).squeeze(-1)
