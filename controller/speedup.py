"""Closed forms for the speed of speculative decoding, for sanity checks, advice and simulation.

The solver does not use them: it works on measured reach and measured seconds. They hold when every examined token is
accepted independently with the same probability ``a``. Sources: Leviathan et al. 2023 (here `block_efficiency` is the
case study's Eq. 2, `speedup` Eq. 3, `best_block` Eq. 8, `stationarity` Eq. 9, `approximate_best_block` Eq. 10); Chen et
al. 2024, "Cascade Speculative Drafting", for `vertical_cascade` (with its power form corrected) and
`horizontal_cascade`.
Words and symbols: a acceptance rate, g block length (draft tokens per round), c seconds of one draft step over seconds
of one target pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_LONGEST = 4096  # no block is longer; bounds the searches below


def block_efficiency(a: float, g: float) -> float:
    """Expected tokens per target pass, ``(1 - a^(g+1)) / (1 - a)``, bonus token included.

    ``a`` in [0, 1]; ``g >= 0``, real values allowed. Limits: 1 at a=0, g + 1 at a=1. Raises ValueError out of range.
    """
    _check(a, g)
    if a == 1:
        return g + 1.0
    if a == 0:
        return 1.0
    return -math.expm1((g + 1) * math.log(a)) / (1 - a)


def tokens_per_round(conditional: Sequence[float]) -> float:
    """Expected tokens per round when position j is accepted with its own probability given that j-1 were.

    ``conditional`` holds g probabilities in [0, 1]; returns ``1 + a_1 + a_1 a_2 + ...``, so 1 for g=0. With one
    constant it is `block_efficiency`. Raises ValueError out of range.
    """
    total = reach = 1.0
    for a in conditional:
        _check(a, 0)
        reach *= a
        total += reach
    return total


def speedup(a: float, g: float, c: float) -> float:
    """Speed over plain decoding, ``(1 - a^(g+1)) / ((1 - a)(g c + 1))``; verification is taken to cost one target pass.

    Limits: 1 at g=0; ``(g + 1) / (g c + 1)`` at a=1; the block efficiency at c=0; below 1 at a=0. Raises ValueError.
    """
    _check(a, g, c)
    return block_efficiency(a, g) / (g * c + 1)


def stationarity(a: float, g: float, c: float) -> float:
    """``c (1 - a^(g+1)) + a^(g+1) ln(a) (g c + 1)``: negative where longer blocks are faster, zero at the best real g.

    Has the sign of minus the derivative of `speedup` in g. At a=0 it is c, at a=1 it is 0 (the derivative there is
    ``(1 - c) / (g c + 1)^2``, which this form has lost to the factor 1 - a). Raises ValueError out of range.
    """
    _check(a, g, c)
    if a == 0:
        return c
    left = math.exp((g + 1) * math.log(a))
    return c * (1 - left) + left * math.log(a) * (g * c + 1)


def best_block(a: float, c: float, g_max: int = 64) -> int:
    """The integer block length in [0, g_max] with the greatest `speedup`; the shorter one on a tie.

    0 (plain decoding) when a <= c, since the first draft token then costs what it saves. At a=1 and c<1, and at c=0 and
    a>0, the longest block. Raises ValueError out of range.
    """
    _check(a, g_max, c)
    return max(range(g_max + 1), key=lambda g: (speedup(a, g, c), -g))


def real_best_block(a: float, c: float) -> float:
    """The real g >= 0 where `stationarity` is zero; 0 where speed falls from the start; infinity at a=1 or c=0 (a>0).

    Speed is unimodal in g, since ``a^-(g+1)`` is convex and equals a line there. Raises ValueError out of range.
    """
    _check(a, 0, c)
    if a in (0, 1) or c == 0:
        return 0.0 if a == 0 or (a == 1 and c >= 1) else math.inf
    if stationarity(a, 0, c) >= 0:
        return 0.0
    low, high = 0.0, 1.0
    while stationarity(a, high, c) < 0 and high < _LONGEST:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if stationarity(a, middle, c) < 0 else (low, middle)
    return (low + high) / 2


def approximate_best_block(a: float, c: float) -> float:
    """``ln(c / (c - ln a)) / ln a - 1``: the stationary g when drafting takes little of a round (g c << 1).

    It errs to the short side and is never negative. Infinity at a=1 or c=0 (a>0), 0 at a=0. Raises ValueError.
    """
    _check(a, 0, c)
    if a == 0:
        return 0.0
    if a == 1 or c == 0:
        return math.inf
    return max(0.0, math.log(c / (c - math.log(a))) / math.log(a) - 1)


def mixed_acceptance(tv: float, weight: float) -> float:
    """Acceptance of `forgive`, ``1 - TV + weight TV`` (case study Eq. 6), for a mixing weight in [0, 1]."""
    _check(tv, 0)
    _check(weight, 0)
    return 1 - tv + weight * tv


def inner_round_transform(a_inner: float, k: int, x: float) -> float:
    """``E[x^tokens]`` of one inner round of block length k and acceptance a_inner, which emits 1 to k+1 tokens."""
    _check(a_inner, k)
    _check(x, 0)
    return sum(a_inner ** (i - 1) * (1 - a_inner) * x**i for i in range(1, k + 1)) + a_inner**k * x ** (k + 1)


def vertical_cascade_tokens(a: float, a_inner: float, k: int, n: int) -> float:
    """Tokens per target pass when the drafter itself drafts with a smaller model: n inner rounds of block length k.

    ``(1 - a phi(a)^n) / (1 - a)`` with phi the transform of one inner round. The tokens of n independent rounds add, so
    their transform is a *power* of phi; the source's Theorem 4.3 composes phi with itself, which is another process.
    Limits: 1 at n=0 or a=0; ``1 + n E[inner tokens]`` at a=1. Raises ValueError out of range.
    """
    _check(a, k)
    _check(a_inner, n)
    if a == 1:
        return 1 + n * block_efficiency(a_inner, k)
    return (1 - a * inner_round_transform(a_inner, k, a) ** n) / (1 - a)


def vertical_cascade(a: float, a_inner: float, k: int, n: int, c: float, c_inner: float) -> float:
    """Speed over plain decoding of `vertical_cascade_tokens`; costs of the draft and inner draft step per target pass.

    Each inner round is one pass of the drafter and k steps of the inner draft. 1 at n=0. Raises ValueError.
    """
    _check(a, k, c)
    _check(a_inner, n, c_inner)
    return vertical_cascade_tokens(a, a_inner, k, n) / (1 + n * (c + k * c_inner))


def horizontal_cascade(stages: Sequence[tuple[float, float, int]]) -> float:
    """Speed over plain decoding when the positions of a block are drafted by one model after another.

    ``stages`` holds (acceptance, cost ratio, draft tokens) in block order, best drafter first since early positions
    unlock the later ones. 1 with no stage; one stage is `speedup`. Raises ValueError out of range.
    """
    conditional: list[float] = []
    cost = 1.0
    for a, c, k in stages:
        _check(a, k, c)
        conditional += [a] * k
        cost += k * c
    return tokens_per_round(conditional) / cost


def _check(a: float, g: float, c: float = 0.0) -> None:
    if not 0 <= a <= 1:
        raise ValueError(f"a probability must lie in [0, 1], not {a!r}")
    if not 0 <= g <= _LONGEST:
        raise ValueError(f"a block length must lie in [0, {_LONGEST}], not {g!r}")
    if not 0 <= c < math.inf:
        raise ValueError(f"a cost ratio must be finite and not negative, not {c!r}")
